"""Families that keep more than keys and values: a text is the same however it is cut over a cache,
in codes too. Of these and others an answer is the same however it is computed."""

import random

import make_model
import pytest
import torch
from cut_texts import furthest_from_whole
from engines import check_same_answers, completions, load
from pangu_statement import random_tensors
from refused import refused
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, write

from quantkit import SamplingParams
from quantkit.executor.weights.load import load_model
from quantkit.models import attention_residuals
from quantkit.models.context import CausalContext


def text_of(name, **changes):
    return {"text_config": {**CONFIGS[name]["text_config"], **changes}}


PANGU = {**TABLES["openpangu_v2"], "vocab_size": 320}
HY_V4 = (
    "hy_v4",
    {"index_n_heads": 24, "index_topk": 32, "indexer_types": ["full", "shared", "full"]},
)
QWEN4 = ("qwen4_exp", text_of("qwen4_exp", indexer_n_heads=24))
V32 = ("deepseek_v32", {"index_n_heads": 24})
KIMI_K3 = ("kimi_k3", {})
V41 = ("deepseek_v41", text_of("deepseek_v41", candidate_topk_blocks=8))
"""With more entries than are selected and than their best blocks hold."""
CASES = [
    ("deepseek_v4", {"compress_rate_csa": 4, "compress_rate_hca": 128}),
    ("deepseek_v4", {"compress_rate_csa": 5, "compress_rate_hca": 70}),
    ("glm5_next", text_of("glm5_next", index_n_heads=24, index_topk=32)),
    HY_V4,
    ("openpangu_v2", PANGU),
    QWEN4,
    V32,
    ("glm_moe_dsa", {"index_n_heads": 24, "index_topk_pattern": "FS"}),
    KIMI_K3,
    V41,
]
"""Of 24 heads no score is 0. Groups of V4 end inside blocks, at their ends, and every second
one."""


@pytest.fixture
def whole_numbers(monkeypatch):
    """Caches keep what is computed, not 16 bits of it, by which other experts and other keys would
    be chosen. Kimi-K3 reads streams a few tokens at once."""
    monkeypatch.setattr(attention_residuals, "_ROWS", 7)
    for user in ("executor.weights.load", "models.context"):
        monkeypatch.setattr(f"quantkit.{user}.cached_dtype", lambda dtype: dtype)


def written(path, name, changes):
    if changes is PANGU:
        return make_model.write_dense(path, PANGU, random_tensors(PANGU))
    return write(path, name, **changes)


@pytest.mark.usefixtures("whole_numbers")
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_text_is_the_same_however_it_is_cut(name, changes, tmp_path):
    """Chunks of any lengths, steps, wrong guesses, and both in one pass."""
    path = written(tmp_path / "model", name, changes)
    loaded = load_model(path, device="cpu", dtype="float32")
    assert furthest_from_whole(loaded, random.Random(4)) < 1e-4


@pytest.mark.usefixtures("whole_numbers")
@pytest.mark.parametrize(("name", "changes"), [HY_V4, QWEN4, V32])
def test_a_cache_of_codes_is_as_it_is_simulated(name, changes, tmp_path):
    path = write(tmp_path / "model", name, **changes)
    loaded = load_model(path, device="cpu", dtype="float32", cache="int8")
    found = furthest_from_whole(loaded, random.Random(4), loaded.codes)
    with torch.inference_mode():
        plain, coded = (
            loaded.model(torch.arange(90), CausalContext([90], codes=codes))
            for codes in (None, loaded.codes)
        )
    apart = (plain - coded).abs().max()
    assert found < (1e-3 if name == "hy_v4" else 1e-2)
    assert apart > (5e-2 if name == "hy_v4" else 1e-2)


ANSWERS = [
    (*HY_V4, [(True, {"draft_length": 1}), (False, {"prefix_cache": True, "prompt_lookup": 2})]),
    (*QWEN4, [(True, {})]),
    (*KIMI_K3, [(True, {})]),
    (*V41, [(True, {"prompt_lookup": 2})]),
    ("llama", {}, [(False, {"chunk_tokens": 13, "prefix_cache": True})]),
    ("mistral", {}, [(False, {"prefix_cache": True, "cache_tokens": 256})]),
    ("gpt_oss", {}, [(False, {"prompt_lookup": 4})]),
    ("qwen3_moe", {}, [(True, {"chunk_tokens": 33})]),
    ("hy_v3", {}, [(False, {"draft_length": 1, "prefix_cache": True})]),
    ("deepseek_v32", {}, [(True, {"chunk_tokens": 33, "prefix_cache": True})]),
]


@pytest.mark.parametrize(("name", "changes", "more"), ANSWERS)
def test_answers_do_not_depend_on_how_they_are_computed(name, changes, more, tmp_path):
    """Prompts in chunks and beside steps, requests that make way for others, captured steps, with
    drafts of an MTP layer, beginnings that requests share."""
    check_same_answers(write(tmp_path / "model", name, **changes), *more)


@pytest.mark.usefixtures("whole_numbers")
@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("qwen3_next", {}, {}),
        ("kimi_linear", {}, {"chunk_tokens": 200}),
        ("openpangu_v2", PANGU, {"draft_length": 2}),
        (*CASES[1], {"draft_length": 1}),
        (*CASES[2], {}),
        (*QWEN4, {}),
        (*KIMI_K3, {}),
        (*V41, {"prompt_lookup": 2}),
    ],
)
def test_beginnings_are_shared_where_states_were_kept(name, changes, options, tmp_path):
    """A system prompt of three blocks and a part, of three users: the second one's is cut where it
    leaves the first one's, if no chunk ended there. A prompt is cut at its last border: it is found
    there when it is asked again, and when the conversation goes on."""
    system = [7 + i * 13 % 300 for i in range(210)]
    prompts = [system + [20 + user] * 70 for user in range(3)]

    def answers(**given):
        engine, done = load(path, max_model_len=512, **options, **given), []
        for prompt in (*prompts, prompts[0], None):
            prompt = prompt or prompts[0] + done[0].token_ids + [30] * 140
            done += completions(engine, [prompt], params)
        logprobs = torch.tensor([[token.logprob for token in one.logprobs] for one in done])
        return [one.token_ids for one in done], logprobs, [one.cached_tokens for one in done]

    path = written(tmp_path / "model", name, changes)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=0)
    expected, theirs, _ = answers()
    found, ours, cached = answers(prefix_cache=True)
    assert cached == [0, 192 if "chunk_tokens" in options else 0, 192, 256, 256]
    assert found == expected
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("qwen4_exp", {"draft_length": 1}, "MTP"),
        ("kimi_k3", {"draft_length": 1}, "no MTP layer"),
        ("kimi_k3", {"prompt_lookup": 2}, "cannot be rolled back"),
    ],
)
def test_what_is_not_served_is_refused(name, options, line, tmp_path):
    with refused(line):
        load(write(tmp_path / "model", name), **options)
