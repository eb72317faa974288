"""Decode steps that a CPU records and repeats give the tokens of those that are computed anew, for
every kind of layer."""

import make_model
import pytest
from engines import load, tokens
from tiny_models import CONFIGS, random_tensors

from quantkit import SamplingParams
from quantkit.executor.runner import graphs

FAMILIES = [
    "llama",
    "gpt_oss",
    "qwen3_next",
    "kimi_k2",
    "glm_moe_dsa",
    "deepseek_v4",
    "openpangu_v2",
    "qwen4_exp",
    "deepseek_v41",
]
"""Every kind of attention, state and expert, and tables that the host reads, between them."""
PROMPTS = [list(range(10 + i, 30 + 17 * i)) for i in range(4)]
PARAMS = [
    SamplingParams(max_new_tokens=7 + 9 * i, ignore_eos=True, temperature=i % 2 / 2, seed=i)
    for i in range(4)
]
"""Sequences end one by one, and cross from one block into the next."""


def written(name, tmp_path):
    config = CONFIGS[name]
    return make_model.write_dense(tmp_path / name, config, random_tensors(config))


@pytest.mark.parametrize("name", FAMILIES)
def test_repeated_steps_change_no_token(name, tmp_path):
    path = written(name, tmp_path)
    anew, engine = load(path, max_batch=3), load(path, max_batch=3)
    anew.runner._repeated = None
    expected = tokens(anew, PROMPTS, PARAMS)
    assert tokens(engine, PROMPTS, PARAMS) == expected
    assert engine.runner._repeated.failure == ""
    assert [size[:2] for size in engine.runner._repeated._steps] == [(3, 1), (3, 2), (2, 2), (1, 2)]
    assert tokens(engine, PROMPTS, PARAMS) == expected, "recorded before these began"


def test_what_is_kept_is_bounded(tmp_path, monkeypatch):
    path = written("llama", tmp_path)
    engine = load(path, max_batch=3)
    expected, kept = tokens(engine, PROMPTS, PARAMS), engine.runner._repeated._steps
    bytes_of = {size[:2]: recording.nbytes for size, (_, _, recording) in kept.items()}
    monkeypatch.setattr(graphs, "MOST_BYTES", bytes_of[2, 2] + bytes_of[1, 2])
    small = load(path, max_batch=3)
    assert tokens(small, PROMPTS, PARAMS) == expected
    assert [size[:2] for size in small.runner._repeated._steps] == [(2, 2), (1, 2)]


def test_a_step_that_reads_on_the_host_is_computed_anew(tmp_path, monkeypatch):
    engine = load(written("llama", tmp_path), max_batch=3)
    expected = tokens(engine, PROMPTS, PARAMS)
    again = load(tmp_path / "llama", max_batch=3)
    attention, counted = again.loaded.model.layers[1].attention, []
    attend = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda q, context: counted.append(q.tolist()) or attend(q, context)
    )
    assert tokens(again, PROMPTS, PARAMS) == expected
    assert "tolist" in again.runner._repeated.failure
    assert again.runner._repeated._steps == {}
