"""DeepSeek-V4 against transformers, in float32 on tiny random models; its guesses, and the layout
that it is published in."""

import json
import random

import make_model
import pytest
import torch
from cut_texts import cut_at_random
from quantized import quantized
from refused import refused
from stated_logits import check_logits, opened
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, random_tensors, rows_of, write
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers_peers import COMPRESSED, checkpoint_tensors, random_peer
from ulp_bound import assert_near, movement

from quantkit import Engine, SamplingParams
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.weights.load import load_model, open_model
from quantkit.grids.base import dequantize
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.deepseek_v4.dspark import head_parameters

CASES = TABLES["deepseek_v4_cases"]


def model_of(changes):
    """Of transformers, its config.json and its tensors."""
    kept = {key: one for key, one in {**COMPRESSED, **changes}.items() if one is not None}
    peer = random_peer("DeepseekV4", kept)
    return peer, peer.config.to_dict(), checkpoint_tensors(peer)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Texts shorter and longer than the window, than a group of tokens, and with more entries than
    are selected."""
    check_logits(*model_of(CASES[case]), [40, 7, 1, 31])


@pytest.mark.parametrize("case", ["release", "odd"])
def test_the_mtp_layer_is_the_published_one(case):
    """As the release's inference/model.py has it (MTPBlock): linears over the normed embedding of
    the next token and over each stream, normed, added; a layer with a window, here transformers';
    streams that end by weights of its own; the main model's head."""
    layers = COMPRESSED["num_hidden_layers"] + 1
    kinds = {"compress_ratios": [4, 0, 128, 4, 0], "layer_types": None, "compress_rates": None}
    changes = {**CASES[case], **kinds, "num_hidden_layers": layers}
    (peer, config_dict, made), generator = model_of(changes), torch.Generator().manual_seed(5)
    hidden, eps = config_dict["hidden_size"], config_dict["rms_norm_eps"]
    own = {
        name: torch.randn(hidden, generator=generator) for name in ("enorm.weight", "hnorm.weight")
    }
    own |= {
        f"{side}_proj.weight": torch.randn(hidden, hidden, generator=generator) / hidden**0.5
        for side in "eh"
    }
    ends = [name for name in made if name.startswith("hc_head") or name == "norm.weight"]
    tensors = {
        name.replace(f"layers.{layers - 1}.", "mtp.0."): tensor for name, tensor in made.items()
    }
    tensors |= {
        f"mtp.0.{name}": tensor
        for name, tensor in (own | {name: made[name] for name in ends}).items()
    }
    tensors |= {name: torch.randn(made[name].shape, generator=generator) for name in ends}
    token_ids = torch.randint(0, 211, (40,), generator=generator)
    next_ids = token_ids.roll(-1)

    def mixed(module, given):
        embedded = (
            F.rms_norm(made["embed.weight"][next_ids], (hidden,), own["enorm.weight"], eps)
            @ own["e_proj.weight"].T
        )
        streams = F.rms_norm(given[0], (hidden,), own["hnorm.weight"], eps) @ own["h_proj.weight"].T
        return embedded[None, :, None] + streams, *given[1:]

    peer.model.layers[layers - 1].register_forward_pre_hook(mixed)
    config_dict |= {"num_hidden_layers": layers - 1, "num_nextn_predict_layers": 1}
    architecture, config, weights = opened(config_dict, tensors)
    model, mtp = architecture.Model(config, weights), architecture.MtpLayer(config, weights)
    mtp.follow(model)
    with torch.no_grad():
        expected = peer(token_ids[None]).logits[0]
        found = mtp(next_ids, model(token_ids, CausalContext([40])), CausalContext([40]))
        assert_near(
            mtp.logits(found),
            expected,
            movement(lambda: peer(token_ids[None]).logits[0], peer.parameters()),
        )
    assert expected.abs().max() > 1
    assert found.shape == (40, model.width)


def tiny(**changes):
    return {**CONFIGS["deepseek_v4"], **changes}


def written(path, **changes):
    return write(path, "deepseek_v4", **changes)


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
    quantized(source, tmp_path / "out", recipe)
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
        quantized(source, tmp_path / "no", Recipe(scheme="awq-w4a16", prune=0.25))


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
    quantized(source, tmp_path / "out", recipe)
    out = Checkpoint.open(tmp_path / "out")
    assert all(torch.equal(out.read(name).float(), one.float()) for name, one in head.items())
    for model in (source, tmp_path / "out"):
        assert drafted(model, 3)[0] == drafted(model, 0)[0]
    bare = {key: value for key, value in config.items() if key not in sizes}
    (source / "config.json").write_text(json.dumps(bare))
    with refused("DSpark.*dspark_block_size"):
        open_model(source, device="cpu", mtp=1)
