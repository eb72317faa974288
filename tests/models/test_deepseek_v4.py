"""DeepSeek-V4 against transformers, in float32 on tiny random models; over a cache, however a text
is cut; and as it is published."""

import json
import random

import make_model
import pytest
import torch
from cut_texts import cut_at_random, furthest_from_whole
from plain_weights import PlainWeights
from refused import refused
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, random_tensors, rows_of, write
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers_peers import COMPRESSED, checkpoint_tensors, random_peer
from ulp_bound import assert_near, movement

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.weights.load import load_model, open_model
from quantkit.grids.base import dequantize
from quantkit.grids.schemes import SCHEMES
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.deepseek_v4.dspark import head_parameters
from quantkit.models.hyper_connections import expand_streams, pack_streams
from quantkit.quantization.run import quantize

CASES = TABLES["deepseek_v4_cases"]


class Case:
    def __init__(self, changes):
        self.peer = random_peer(
            "DeepseekV4",
            {key: value for key, value in {**COMPRESSED, **changes}.items() if value is not None},
        )
        self.config_dict, self.tensors = self.peer.config.to_dict(), checkpoint_tensors(self.peer)
        self.architecture = find_architecture(self.config_dict)
        self.config = self.architecture.Config.from_dict(self.config_dict)

    def logits(self, lengths, token_ids, tensors=None):
        model = self.architecture.Model(self.config, self.weights(tensors))
        with torch.no_grad():
            return model.logits(model(token_ids, CausalContext(lengths)))

    def weights(self, tensors=None):
        return PlainWeights(
            self.tensors if tensors is None else tensors, self.config.mixture.linears
        )


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Texts shorter and longer than the window, than a group of tokens, and with more entries than
    are selected; layer by layer as well."""
    one, lengths = Case(CASES[case]), [40, 7, 1, 31]
    token_ids = torch.randint(0, 211, (sum(lengths),), generator=torch.Generator().manual_seed(3))

    def stated():
        return torch.cat([one.peer(own[None]).logits[0] for own in token_ids.split(lengths)])

    with torch.no_grad():
        expected, moved = stated(), movement(stated, one.peer.parameters())
    assert expected.abs().max() > 1
    assert_near(one.logits(lengths, token_ids), expected, moved)
    rows = {
        row.name: row.shape for row in one.architecture.parameters(one.config) if not row.mtp
    }  # which transformers has not
    assert rows == {k: tuple(v.shape) for k, v in one.tensors.items()}
    model = one.architecture.Model(one.config, one.weights())
    hidden = pack_streams(
        expand_streams(one.tensors["embed.weight"][token_ids], one.config.hc_mult), token_ids
    )
    with torch.no_grad():
        for layer in model.layers:
            hidden = layer.feed_forward(
                layer.attend(hidden, CausalContext(lengths)), CausalContext(lengths)
            )
        whole = model(token_ids, CausalContext(lengths))
        streams = hidden[:, :-1].unflatten(-1, (one.config.hc_mult, -1))
        end, _ = model.end(streams, model.norm, one.config.rms_norm_eps)
    assert (end - whole).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["release", "odd"])
def test_the_mtp_layer_is_the_published_one(case):
    """As the release's inference/model.py has it (MTPBlock): linears over the normed embedding of
    the next token and over each stream, normed, added; a layer with a window, here transformers';
    streams that end by weights of its own; the main model's head."""
    layers = COMPRESSED["num_hidden_layers"] + 1
    kinds = {"compress_ratios": [4, 0, 128, 4, 0], "layer_types": None, "compress_rates": None}
    one, generator = (
        Case({**CASES[case], **kinds, "num_hidden_layers": layers}),
        torch.Generator().manual_seed(5),
    )
    hidden, eps = one.config.hidden_size, one.config.rms_norm_eps
    own = {
        name: torch.randn(hidden, generator=generator) for name in ("enorm.weight", "hnorm.weight")
    }
    own |= {
        f"{side}_proj.weight": torch.randn(hidden, hidden, generator=generator) / hidden**0.5
        for side in "eh"
    }
    ends = [name for name in one.tensors if name.startswith("hc_head") or name == "norm.weight"]
    tensors = {
        name.replace(f"layers.{layers - 1}.", "mtp.0."): tensor
        for name, tensor in one.tensors.items()
    }
    tensors |= {
        f"mtp.0.{name}": tensor
        for name, tensor in (own | {name: one.tensors[name] for name in ends}).items()
    }
    tensors |= {name: torch.randn(one.tensors[name].shape, generator=generator) for name in ends}
    token_ids = torch.randint(0, 211, (40,), generator=generator)
    next_ids = token_ids.roll(-1)

    def mixed(module, given):
        embedded = (
            F.rms_norm(one.tensors["embed.weight"][next_ids], (hidden,), own["enorm.weight"], eps)
            @ own["e_proj.weight"].T
        )
        streams = F.rms_norm(given[0], (hidden,), own["hnorm.weight"], eps) @ own["h_proj.weight"].T
        return embedded[None, :, None] + streams, *given[1:]

    one.peer.model.layers[layers - 1].register_forward_pre_hook(mixed)
    config = one.architecture.Config.from_dict(
        {**one.config_dict, "num_hidden_layers": layers - 1, "num_nextn_predict_layers": 1}
    )
    weights = PlainWeights(tensors, config.mixture.linears)
    model, mtp = one.architecture.Model(config, weights), one.architecture.MtpLayer(config, weights)
    mtp.follow(model)
    with torch.no_grad():
        expected = one.peer(token_ids[None]).logits[0]
        made = mtp(next_ids, model(token_ids, CausalContext([40])), CausalContext([40]))
        assert_near(
            mtp.logits(made),
            expected,
            movement(lambda: one.peer(token_ids[None]).logits[0], one.peer.parameters()),
        )
    assert expected.abs().max() > 1
    assert made.shape == (40, model.width)


def tiny(**changes):
    return {**CONFIGS["deepseek_v4"], **changes}


def written(path, **changes):
    return write(path, "deepseek_v4", **changes)


@pytest.mark.parametrize(("csa", "hca"), [(4, 128), (5, 70)])
def test_a_text_is_the_same_however_it_is_cut(csa, hca, tmp_path):
    """Chunks of any lengths, steps and both in one pass, over groups that end inside blocks, at
    their ends, and every second one."""
    loaded = load_model(
        written(tmp_path / "model", compress_rate_csa=csa, compress_rate_hca=hca),
        device="cpu",
        dtype="float32",
    )
    assert furthest_from_whole(loaded, random.Random(csa)) < 1e-4


def test_where_scores_are_equal_too(tmp_path):
    """Of an indexer with two heads a quarter of the scores are 0."""
    loaded = load_model(written(tmp_path / "model", index_n_heads=2), device="cpu", dtype="float32")
    once, again = (cut_at_random(loaded, random.Random(seed)) for seed in (4, 5))
    assert max(float((one - other).abs().max()) for one, other in zip(once, again)) < 1e-4


PROMPTS = [list(range(6 + i, 30 + 13 * i)) for i in range(5)]


def drafted(path, draft_length, budget=None, **options):
    """Tokens, greedy and drawn, and the share of guesses that were kept."""
    options = {"max_batch": 3, "max_model_len": 128, "draft_length": draft_length, **options}
    engine = Engine.load(path, device="cpu", dtype="float32", **options)
    if budget is not None:
        engine.scheduler.budget = budget
    params = [
        SamplingParams(max_new_tokens=20 + i, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(5)
    ]
    done = sorted(engine.generate(PROMPTS, params), key=lambda one: one.index)
    assert options.get("cache_tokens") is None or engine.scheduler.num_preempted > 0
    return [one.token_ids for one in done], engine.speculation.acceptance.rate


@pytest.fixture(scope="module")
def easy(tmp_path_factory):
    """Hidden states are nearly the embeddings, and so the next token follows from the last one; the
    MTP layer passes the embedding of the
    next token through: guesses are often right."""
    tensors = random_tensors(tiny())
    for name, tensor in tensors.items():
        if name.endswith((".wo_b.weight", ".w2.weight", "mtp.0.h_proj.weight")):
            tensors[name] = tensor * 0.1
    tensors["head.weight"] = tensors["head.weight"] * 4
    tensors["mtp.0.e_proj.weight"] = torch.eye(256).bfloat16()
    return make_model.write_dense(tmp_path_factory.mktemp("models") / "easy", tiny(), tensors)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (None, {}),
        (StepBudget(16, 7, mixed=True), {}),
        (None, {"cache_tokens": 192, "max_model_len": 192}),
        (None, {"prompt_lookup": 2}),
    ],
    ids=["plain", "chunks", "preempted", "looked-up"],
)
def test_guesses_change_no_token(easy, budget, options):
    """Guesses of the MTP layer, right and wrong ones: entries, windows and what is pooled are taken
    back."""
    found, rate = drafted(easy, 3, budget, **options)
    assert found == drafted(easy, 0)[0]
    assert 0.1 < rate < 0.95


@pytest.mark.usefixtures("poisoned_memory")
def test_what_is_measured_at_load_is_in_no_answer(easy):
    """Passes over made-up tokens, behind a context too, leave entries and windows of nobody."""
    assert drafted(easy, 0, measure_steps=True)[0] == drafted(easy, 0)[0]


def _fp4(weight):
    """E2M1 codes two to a byte, the first in the low bits, and a power of two for 32."""
    groups = weight.float().unflatten(1, (-1, 32))
    power = (groups.abs().amax(-1).clamp(min=1e-30) / 6).log2().ceil()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = (
        ((groups / power.exp2()[..., None])[..., None] - values)
        .abs()
        .argmin(-1)
        .flatten(1)
        .to(torch.uint8)
    )
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), power.exp2().to(
        torch.float8_e8m0fnu
    )


def _fp8(weight):
    rows, columns = weight.shape
    blocks = (
        F.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        .unflatten(0, (-1, 128))
        .unflatten(2, (-1, 128))
    )
    scale = (blocks.abs().amax((1, 3)).clamp(min=1e-30) / 448).log2().ceil().exp2()
    codes = (
        (blocks / scale[:, None, :, None])
        .to(torch.float8_e4m3fn)
        .flatten(2)
        .flatten(0, 1)[:rows, :columns]
    )
    return codes.contiguous(), scale.to(torch.float8_e8m0fnu)


def as_published(tensors):
    """FP4 experts, FP8 linears, a tensor of a draft model of another kind, and a table of 32-bit
    ids."""
    tensors = tensors | {"mtp.1.main_norm.weight": tensors["norm.weight"].clone()}
    made = {}
    for name, tensor in tensors.items():
        last = name.split(".")[-2] if name.endswith(".weight") else ""
        linear = (
            (last[:1] == "w" or last in ("e_proj", "h_proj"))
            and tensor.dim() == 2
            and ".compressor." not in name
        )
        packed_as = _fp4 if ".experts." in name else _fp8 if linear else None
        if packed_as is None or last == "weights_proj":
            made[name] = tensor.int() if tensor.dtype == torch.int64 else tensor
        else:
            made[name], made[f"{name.removesuffix('weight')}scale"] = packed_as(tensor)
    return made


QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def test_the_published_layout_is_read_and_its_experts_are_kept(tmp_path):
    """To the bit what transformers decodes; MXFP4 experts stay as they are where they are asked
    for, the MTP layer's too, which guesses from either; what is of another draft model is
    copied."""
    config = tiny(expert_dtype="fp4", quantization_config=QUANTIZATION)
    stored = as_published(random_tensors(tiny()))
    source = make_model.write_dense(tmp_path / "source", config, stored)
    checkpoint, decode = Checkpoint.open(source), Fp8Dequantize(None)
    for name in (
        "layers.0.ffn.experts.3.w2",
        "layers.1.ffn.experts.0.w1",
        "layers.2.attn.wo_a",
        "mtp.0.e_proj",
    ):
        values, scale = stored[f"{name}.weight"], stored[f"{name}.scale"].float()
        wide = decode._unpack_fp4(values) if values.dtype == torch.int8 else values.float()
        tall, long = (
            (32 if values.dtype == torch.int8 else 128),
            (1 if values.dtype == torch.int8 else 128),
        )
        expected = (
            wide
            * scale.repeat_interleave(long, 0).repeat_interleave(tall, 1)[
                : len(wide), : wide.shape[1]
            ]
        )
        assert torch.equal(dequantize(checkpoint.weight(name)), expected), name
    recipe = Recipe(scheme="mxfp4-w4a16", methods=())
    quantize(source, tmp_path / "out", SCHEMES["mxfp4-w4a16"], "auto", recipe, device="cpu")
    out = Checkpoint.open(tmp_path / "out")
    for name in ("layers.1.ffn.experts.0.w1", "mtp.0.ffn.experts.2.w2"):
        assert torch.equal(dequantize(out.weight(name)), dequantize(checkpoint.weight(name)))
    assert torch.equal(
        out.read("mtp.0.e_proj.weight").float(), dequantize(checkpoint.weight("mtp.0.e_proj"))
    )
    assert torch.equal(out.read("mtp.1.main_norm.weight"), stored["norm.weight"])
    guessed = [drafted(path, 2)[0] for path in (source, tmp_path / "out")]
    assert guessed == [drafted(path, 0)[0] for path in (source, tmp_path / "out")]
    with refused("by token id"):
        quantize(
            source,
            tmp_path / "no",
            SCHEMES["awq-w4a16"],
            "auto",
            Recipe(scheme="awq-w4a16", prune=0.25),
            device="cpu",
        )


def test_what_an_engine_does_not_serve_is_refused(tmp_path):
    with refused("--prefix-cache"):
        Engine.load(
            written(tmp_path / "model"),
            device="cpu",
            max_batch=1,
            max_model_len=64,
            prefix_cache=True,
        )
    with refused("o_groups = 2, which 4 ranks cannot share evenly"):
        open_model(tmp_path / "model", device="cpu", tp=4)


def test_a_dspark_head_drafts_and_is_not_run_as_an_mtp_layer(tmp_path):
    """As V4-Flash-0731 has one; it changes no token, is kept, and without its sizes is refused."""
    sizes = {"dspark_block_size": 5, "dspark_target_layer_ids": [0, 2], "dspark_noise_token_id": 7}
    config = {**tiny(num_nextn_predict_layers=1), **sizes}
    made = find_architecture(config).Config.from_dict(config)
    head = rows_of(head_parameters(made), torch.Generator().manual_seed(12))
    tensors = {
        name: one for name, one in random_tensors(config).items() if not name.startswith("mtp.")
    }
    source = make_model.write_dense(tmp_path / "source", config, tensors | head)
    recipe = Recipe(scheme="rtn-w4a16")
    quantize(source, tmp_path / "out", SCHEMES["rtn-w4a16"], "auto", recipe, device="cpu")
    out = Checkpoint.open(tmp_path / "out")
    assert all(torch.equal(out.read(name).float(), one.float()) for name, one in head.items())
    for model in (source, tmp_path / "out"):
        assert drafted(model, 3)[0] == drafted(model, 0)[0]
    bare = {key: value for key, value in config.items() if key not in sizes}
    (source / "config.json").write_text(json.dumps(bare))
    with refused("DSpark.*dspark_block_size"):
        open_model(source, device="cpu", mtp=1)
