"""Every architecture through the whole line, quantize with every scheme, run, tensor parallel; and
one that nobody knows."""

import functools
import json
import os
import re
import shutil

import make_model
import pytest
import torch
from engines import capture, completions, load
from guessed_models import ask_ranks
from quantized import quantized
from refused import refused
from small_recipe import SMALL
from tiny_models import CELLS, CONFIGS, PROMPTS, random_tensors, write
from ulp_bound import assert_near, write_nudged

from quantkit import Engine, SamplingParams
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import EvaluateOptions, PerplexityOptions
from quantkit.evaluation.run import run_evaluation
from quantkit.executor.speculation.mtp_drafter import MultiMtpDrafter
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.grids.schemes import SCHEMES
from quantkit.models.architecture import LatentCache
from quantkit.models.context import CausalContext
from quantkit.quantization.convert import convert

USUAL = ("awq-w4a16", "fp4-w4a16", "int8-a8w8c16", "int4-w4a8")
CALIBRATED = ("nvfp4-w4a4", "int8-a8w8c8")
"""Schemes that are never rounded uncalibrated."""
OTHER_CACHES = {
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen4_exp",
    "qwen4_exp_text",
    "kimi_linear",
    "glm5_next",
    "kimi_k3",
    "hy_v4",
    "deepseek_v41",
    "deepseek_v32",
    "glm_moe_dsa",
    "deepseek_v4",
    "openpangu_v2",
}
"""Architectures that keep something else than latents that all are read, or keys and values in
every layer."""
BY_NAME = {"qwen3_moe", "pangu_ultra_moe"}
EVERY_CELL = bool(os.environ.get("QUANTKIT_EVERY_CELL"))


@pytest.fixture(scope="module", params=CONFIGS)
def source(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("models") / request.param, request.param)


def logprobs(path):
    """Greedy continuations and the log-probabilities of their tokens."""
    engine = load(path, max_model_len=128)
    found = asked(engine)
    engine.close()
    return found


def asked(engine):
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    done = completions(engine, PROMPTS, params)
    return [one.token_ids for one in done], [
        [token.logprob for token in one.logprobs or []] for one in done
    ]


@functools.cache
def logprobs_of_source(path):
    """`logprobs` of a model that every test of it is held against, computed once."""
    return logprobs(path)


def schemes_of(name):
    """What `make test` quantizes an architecture with."""
    named = CELLS[name]["schemes"]
    return tuple(SCHEMES) if named == "all" else named


def _skip_unasked(source, asked):
    if not asked and not EVERY_CELL:
        pytest.skip(f"{source.name} here is for make test-families")


def _skip_without_experts(source, scheme):
    if SCHEMES[scheme].outside is not None and not any(
        ".experts." in name for name in Checkpoint.open(source).tensors
    ):
        pytest.skip("the scheme is for routed experts, and refuses others: test_schemes.py")
    if Checkpoint.open(source).grid == SCHEMES[scheme].weight:
        pytest.skip("the source has nothing to round: test_schemes.py")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_model_stays_near_its_source(source, tmp_path, scheme):
    """The first token's log-probability of the source's own choice moves little; the manifest
    accounts for every tensor."""
    _skip_without_experts(source, scheme)
    _skip_unasked(source, scheme in schemes_of(source.name))
    recipe = Recipe(scheme=scheme, **SMALL)
    if source.name in OTHER_CACHES and SCHEMES[scheme].cache is not None:
        with refused("this model keeps another"):
            quantized(source, tmp_path / "out", recipe)
        return
    quantized(source, tmp_path / "out", recipe)
    _, expected = logprobs_of_source(source)
    _, found = logprobs(tmp_path / "out")
    moved = [abs(ours[0] - theirs[0]) for ours, theirs in zip(found, expected)]
    assert max(moved) < 2.0, moved
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())["tensors"]
    assert any(entry["status"] == "quantized" for entry in manifest.values())


@pytest.fixture(params=[*CONFIGS, "deepseek_v3"])
def any_source(request, tmp_path):
    config = CONFIGS.get(request.param) or make_model.tiny_config()
    return make_model.write_dense(tmp_path / request.param, config, random_tensors(config))


def test_eval_scores_it(any_source, tmp_path):
    """A random model answers nothing right; what counts is that every reply is made, graded and
    given its reason."""
    _skip_unasked(any_source, CELLS.get(any_source.name, {"eval": True}).get("eval", False))
    asked = {"limit": 3, "repeats": 2, "protocol": "r1", "max_tokens": 12}
    results = run_evaluation(
        str(any_source), ["tiny-math"], EvaluateOptions(out=tmp_path / "out", **asked)
    )
    score = results.to_json()["results"]["tiny-math"]
    assert (score["n"], score["errors"], sum(score["reasons"].values())) == (3, 0, 6)
    rows = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert all(0 < row["completion_tokens"] <= 12 for row in rows)


def test_a_model_is_no_distance_from_itself(any_source, tmp_path):
    """Nor is any of its layers, whatever residual streams they have."""
    (text := tmp_path / "text.txt").write_text("What is 3 + 4? It is 7, and 5 + 5 is 10. " * 3)
    found = measure(str(any_source), text, PerplexityOptions(baseline=str(any_source)))
    layers = json.loads((any_source / "config.json").read_text())
    layers = layers.get("text_config", layers)["num_hidden_layers"]
    assert (found.kl, found.layer_errors) == (0.0, [0.0] * layers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_captured_decode_steps_give_the_eager_tokens(any_source, tmp_path, scheme):
    """On a CUDA device every step is a graph, with drafts too where the model has them, and the
    same steps launched one by one agree."""
    model = any_source
    if scheme is not None:
        _skip_without_experts(any_source, scheme)
        if any_source.name in OTHER_CACHES and SCHEMES[scheme].cache is not None:
            pytest.skip("refused: test_quantized_model_stays_near_its_source")
        few = (
            {"samples": 4, "held_out": 1, "seq_len": 24}
            if scheme in CALIBRATED
            else {"methods": ()}
        )
        quantized(any_source, model := tmp_path / "out", Recipe(scheme=scheme, **few))
    drafts = json.loads((model / "config.json").read_text()).get("num_nextn_predict_layers", 0)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for draft_length in {0, drafts}:
        asked = {"dtype": "bfloat16", "max_model_len": 128, "draft_length": draft_length}
        engine = Engine.load(model, device="cuda", max_batch=4, **asked)
        captured = completions(engine, PROMPTS, params)
        assert engine.runner.why_eager == ""
        if (drafter := engine.speculation.drafter) is not None:
            steps = drafter.steps if isinstance(drafter, MultiMtpDrafter) else [drafter.steps]
            assert {one.failure for one in steps} == {""}
        capture(engine, lambda step, _: step, draft_length)
        eager = completions(engine, PROMPTS, params)
        assert [one.token_ids for one in captured] == [one.token_ids for one in eager]


def test_a_quantized_model_computes_its_dequantized_weights(source, tmp_path, monkeypatch):
    """Whatever operators take int4 as it is: prompts and decode steps give the log-probabilities of
    the weights that it stands for. A cache of 16 bits would make 1e-3 of a last place."""
    _skip_unasked(source, "int4" in CELLS[source.name])
    monkeypatch.setattr(LoadedModel, "cache_dtype", torch.float32)
    quantized(source, tmp_path / "int4", "rtn-w4a16")
    convert(tmp_path / "int4", tmp_path / "plain", dtype="float32")
    (tokens, found), (same, expected) = logprobs(tmp_path / "int4"), logprobs(tmp_path / "plain")
    assert tokens == same
    moved = 0.0
    for draw in range(2):
        again, by_itself = logprobs(
            write_nudged(tmp_path / "plain", tmp_path / f"nudged-{draw}", draw)
        )
        assert again == same, "tokens nearly tie: draw other weights"
        moved = max(moved, (torch.tensor(by_itself) - torch.tensor(expected)).abs().max().item())
    # An operator of int4 sums q * scale and the offset apart, each up to 16 times the weight, and
    # so is what it rounds.
    assert_near(torch.tensor(found), torch.tensor(expected), moved, factor=32, most=1e-2)


def test_a_cache_in_8_bits_changes_little(source):
    if source.name in ("deepseek_v4", "deepseek_v41"):
        with refused("its entries have 16 bits"):
            load_model(source, device="cpu", cache="int8")
        return
    loaded, ids = (
        load_model(source, device="cpu", dtype="float32", cache="int8"),
        torch.arange(10, 60),
    )
    with torch.inference_mode():
        plain, coded = (
            loaded.model(ids, CausalContext([len(ids)], codes=codes))
            for codes in (None, loaded.codes)
        )
    cache = loaded.config.cache
    selects = isinstance(cache, LatentCache) and cache.index_dim and not cache.index_pool
    # By rounded keys a random indexer selects a few other tokens of 50.
    assert 0 < (coded - plain).norm() < (0.3 if selects else 0.1) * plain.norm()


@pytest.mark.parametrize("name", ["glm4_moe", "glm_moe_dsa", "hy_v3", "deepseek_v4"])
def test_drafts_of_the_mtp_layer_change_no_token(name, tmp_path):
    """DeepSeek's layer around other blocks, one that shares embedding and head, one behind streams;
    they guess at random."""
    model = write(tmp_path / "model", name)
    engine = load(model, max_model_len=128, draft_length=1)
    assert asked(engine)[0] == logprobs(model)[0]


def test_two_ranks_are_one(source, tmp_path):
    _skip_unasked(source, "ranks" in CELLS[source.name])
    assert (
        ask_ranks(2, tmp_path, source, asked, max_model_len=128)[0] == logprobs_of_source(source)[0]
    )


SHARED_HEADS = {
    "qwen3": (1, 2),
    "minimax_m2": (1, 2),
    "gpt_oss": (1, 2),
    "qwen3_next": (1, 2),
    "llama": (2, 4),
}
"""Key heads and ranks: norms of heads, norms over all heads, sinks, gated queries; biases, and
heads that two ranks each hold."""


@pytest.mark.parametrize("name", SHARED_HEADS)
def test_ranks_that_hold_the_same_key_head_are_one(name, tmp_path):
    key_heads, tp = SHARED_HEADS[name]
    model = write(tmp_path / "model", name, num_key_value_heads=key_heads)
    together, alone = (
        ask_ranks(tp, tmp_path, model, asked, max_model_len=128),
        logprobs(model),
    )
    assert together[0] == alone[0]
    assert torch.tensor(together[1]).sub(torch.tensor(alone[1])).abs().max() < 0.02, (
        "the cache is bfloat16"
    )


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in CALIBRATED])
def test_an_unknown_architecture_is_rounded_by_name(source, tmp_path, scheme):
    """Told by name, the same linears are quantized to the same bytes as with the table, less what
    only a table knows."""
    _skip_without_experts(source, scheme)
    _skip_unasked(source, source.name in BY_NAME and scheme in USUAL)
    unknown = shutil.copytree(source, tmp_path / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "never_heard_of"}))
    recipe = Recipe(scheme=scheme, methods=())
    quantized(source, tmp_path / "known", recipe)
    quantized(unknown, tmp_path / "by-name", recipe)
    known, by_name = Checkpoint.open(tmp_path / "known"), Checkpoint.open(tmp_path / "by-name")
    assert set(known.linears) <= set(by_name.linears)
    extra = set(by_name.linears) - set(known.linears)
    only_here = (
        r"kv_b_proj|eh_proj|wo_a$|compressor\.|in_proj_(?:ba|b|a)$|self_attn\.(?:[fg]_[ab]|b)_proj$|"
        r"indexer\.|mhc_module\.|layers\.[234]\.|^mtp\.|mtp_layers\.|_res_proj$|routed_expert_\w+_proj$|"
        r"hyper_connection|\.ple\.|shared_expert_gate$|engram\."
    )
    assert all(re.search(only_here, module) for module in extra), extra
    if (
        scheme != "fp4-w4a16"
    ):  # siblings share their FP4 global scale where the table says who they are
        for module in known.linears:
            if SCHEMES[scheme].outside is not None and re.search(r"\.layers\.[234]\.", module):
                # an MTP layer, whose experts are on another grid where the table says that it is
                # one
                continue
            for name in known.parts(module):
                assert torch.equal(known.read(name), by_name.read(name)), name
    with refused("never_heard_of"):
        quantized(unknown, tmp_path / "no", "awq-w4a16")
