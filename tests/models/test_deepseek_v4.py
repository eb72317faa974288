"""DeepSeek-V4 against transformers, in float32 on tiny random models; its guesses, and the layout
that it is published in."""

import random
from functools import partial

import make_model
import pytest
import torch
from block_heads import MODELS, write_with_head
from cut_texts import cut_at_random
from edited import edited
from engines import load, tokens
from letters import write_letters
from quantized import quantized
from refused import refused
from releases import check_read, fp4, fp8, packed
from small_recipe import SMALL
from stated_logits import check_logits, opened
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, random_tensors, write
from torch.nn import functional as F
from transformers_peers import COMPRESSED, checkpoint_tensors, random_peer
from ulp_bound import assert_near, movement

from quantkit import SamplingParams
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.weights.load import load_model, open_model
from quantkit.models.context import CausalContext

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
    peer, config_dict, made = model_of({**CASES[case], **kinds, "num_hidden_layers": layers})
    torch.manual_seed(5)
    hidden, eps = config_dict["hidden_size"], config_dict["rms_norm_eps"]
    own = {f"{side}norm.weight": torch.randn(hidden) for side in "eh"}
    own |= {f"{side}_proj.weight": torch.randn(hidden, hidden) / hidden**0.5 for side in "eh"}
    ends = {name: made[name] for name in made if name.startswith(("hc_head", "norm."))}
    tensors = {name.replace(f"layers.{layers - 1}.", "mtp.0."): one for name, one in made.items()}
    tensors |= {f"mtp.0.{name}": one for name, one in (own | ends).items()}
    tensors |= {name: torch.randn(one.shape) for name, one in ends.items()}
    token_ids, context = torch.randint(0, 211, (40,)), CausalContext([40])
    next_ids = token_ids.roll(-1)

    def normed(x, side):
        x = F.rms_norm(x, (hidden,), own[f"{side}norm.weight"], eps)
        return x @ own[f"{side}_proj.weight"].T

    def mixed(module, given):
        embedded = normed(made["embed.weight"][next_ids], "e")
        return embedded[None, :, None] + normed(given[0], "h"), *given[1:]

    def stated():
        return peer(token_ids[None]).logits[0]

    peer.model.layers[layers - 1].register_forward_pre_hook(mixed)
    config_dict |= {"num_hidden_layers": layers - 1, "num_nextn_predict_layers": 1}
    architecture, config, weights = opened(config_dict, tensors)
    model, mtp = architecture.Model(config, weights), architecture.MtpLayer(config, weights)
    mtp.follow(model)
    with torch.no_grad():
        expected, found = stated(), mtp(next_ids, model(token_ids, context), context)
        assert_near(mtp.logits(found), expected, movement(stated, peer.parameters()))
    assert expected.abs().max() > 1
    assert found.shape == (40, model.width)


def tiny(**changes):
    return {**CONFIGS["deepseek_v4"], **changes}


def test_where_scores_are_equal_too(tmp_path):
    """Of an indexer with two heads a quarter of the scores are 0."""
    loaded = load_model(
        write(tmp_path / "model", "deepseek_v4", index_n_heads=2), device="cpu", dtype="float32"
    )
    once, again = (cut_at_random(loaded, random.Random(seed)) for seed in (4, 5))
    assert max(float((one - other).abs().max()) for one, other in zip(once, again)) < 1e-4


PROMPTS = [list(range(6 + i, 30 + 13 * i)) for i in range(5)]


def drafted(path, draft_length, budget=None, **options):
    """Tokens, greedy and drawn, and the share of guesses that were kept."""
    options = {"max_batch": 3, "max_model_len": 128, "draft_length": draft_length, **options}
    engine = load(path, **options)
    if budget is not None:
        engine.scheduler.budget = budget
    params = [
        SamplingParams(max_new_tokens=20 + i, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(5)
    ]
    found = tokens(engine, PROMPTS, params)
    assert options.get("cache_tokens") is None or engine.scheduler.num_preempted > 0
    return found, engine.speculation.acceptance.rate


@pytest.fixture(scope="module")
def easy(tmp_path_factory):
    """Hidden states are nearly the embeddings, and so the next token follows from the last one; the
    MTP layer passes the embedding of the next token through: guesses are often right."""
    tensors = random_tensors(tiny())
    for name, tensor in tensors.items():
        if name.endswith((".wo_b.weight", ".w2.weight", "mtp.0.h_proj.weight")):
            tensors[name] = tensor * 0.1
    tensors["head.weight"] = tensors["head.weight"] * 4
    tensors["mtp.0.e_proj.weight"] = torch.eye(256).bfloat16()
    return make_model.write_dense(tmp_path_factory.mktemp("models") / "easy", tiny(), tensors)


@pytest.fixture(scope="module")
def expected(easy):
    return drafted(easy, 0)[0]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("draft_length", "budget", "options"),
    [
        (3, None, {}),
        (3, StepBudget(16, 7, mixed=True), {}),
        (3, None, {"cache_tokens": 192, "max_model_len": 192}),
        (3, None, {"prompt_lookup": 2}),
        (0, None, {"measure_steps": True}),
    ],
    ids=["plain", "chunks", "preempted", "looked-up", "measured"],
)
def test_tokens_are_those_of_plain_decoding(easy, expected, draft_length, budget, options):
    """Guesses of the MTP layer, right and wrong ones: entries, windows and what is pooled are taken
    back. Passes over made-up tokens at load, behind a context too, leave those of nobody."""
    found, rate = drafted(easy, draft_length, budget, **options)
    assert found == expected
    assert 0.1 < rate < 0.95 or not draft_length


def packer(name, tensor):
    """FP4 experts, FP8 linears."""
    last = name.split(".")[-2] if name.endswith(".weight") else ""
    linear = last != "weights_proj" and (last[:1] == "w" or last in ("e_proj", "h_proj"))
    if not linear or tensor.dim() != 2 or ".compressor." in name:
        return None
    return fp4 if ".experts." in name else partial(fp8, tall=128, wide=128)


QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def test_the_published_layout_is_read_and_its_experts_are_kept(tmp_path):
    """To the bit; MXFP4 experts stay as they are where they are asked for, the MTP layer's too,
    which guesses from either; what is of another draft model is copied; a table's ids have 32
    bits."""
    named = {"topk_method": "noaux_tc", "swiglu_limit": 10.0}
    config = tiny(expert_dtype="fp4", quantization_config=QUANTIZATION, **named)
    tensors = {
        name: one.int() if one.dtype == torch.int64 else one
        for name, one in random_tensors(tiny()).items()
    }
    tensors["mtp.1.main_norm.weight"] = tensors["norm.weight"].clone()
    stored, worth = packed(tensors, packer)
    source, out = make_model.write_dense(tmp_path / "source", config, stored), tmp_path / "out"
    check_read(Checkpoint.open(source), worth)
    for engine in ("vllm", "sglang"):
        assert check_checkpoint(engine, Checkpoint.open(source)) == []
    quantized(source, out, Recipe(scheme="mxfp4-w4a16", methods=()))
    kept = (
        "layers.1.ffn.experts.0.w1",
        "mtp.0.ffn.experts.2.w2",
        "mtp.0.e_proj",
        "mtp.1.main_norm",
    )
    check_read(Checkpoint.open(out), {f"{name}.weight": worth[f"{name}.weight"] for name in kept})
    for path in (source, out):
        assert drafted(path, 2)[0] == drafted(path, 0)[0]
    text = str(write_letters(tmp_path / "text.txt", 600))
    fewer = Recipe(scheme="mxfp4-w4a16", methods=(), prune=0.25, calibration=text, **SMALL)
    quantized(source, tmp_path / "fewer", fewer)
    table = Checkpoint.open(tmp_path / "fewer").read("layers.0.ffn.gate.tid2eid")
    assert (table.dtype, int(table.max())) == (torch.int32, 2)


def test_heads_that_ranks_cannot_share_are_refused(tmp_path):
    with refused("o_groups = 2, which 4 ranks cannot share evenly"):
        open_model(write(tmp_path / "model", "deepseek_v4"), device="cpu", tp=4)


def test_a_dspark_head_drafts_and_is_not_run_as_an_mtp_layer(tmp_path):
    """As V4-Flash-0731 has one; it changes no token, and without its sizes is refused."""
    source, out = write_with_head(tmp_path / "source", MODELS["deepseek_v4"]), tmp_path / "out"
    quantized(source, out, "rtn-w4a16")
    assert "mtp.1.ffn.experts.0.w1" in Checkpoint.open(out).linears
    for path in (source, out):
        assert drafted(path, 3)[0] == drafted(path, 0)[0]
    with edited(source / "config.json") as config:
        del config["dspark_block_size"]
    with refused("DSpark.*dspark_block_size"):
        open_model(source, device="cpu", mtp=1)
