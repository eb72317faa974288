"""Passes with prompts over static buffers compute what eager ones do, padded and replayed; those
that are large or come once stay eager."""

import pytest
import torch
from engines import capture, in_place, load, note, tokens
from packed_model import GROUPED, write_random

from quantkit import SamplingParams
from quantkit.executor.ranks.parallel import SINGLE
from quantkit.executor.runner import graph_warmup, prefill_graphs
from quantkit.executor.runner.graph_warmup import warm_up_graphs
from quantkit.executor.runner.prefill_graphs import PrefillChunk
from quantkit.executor.scheduler.scheduler import StepBudget

NARROW = GROUPED | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
PROMPTS = [
    [7 + i] * 4 + list(range(20, 20 + length))
    for i, length in enumerate((3, 90, 120, 30, 150, 64, 12))
]
PARAMS = [
    SamplingParams(max_new_tokens=5, ignore_eos=True, temperature=(i % 2) * 0.8, seed=i)
    for i in range(len(PROMPTS))
]


@pytest.fixture(autouse=True)
def captured_soon(monkeypatch):
    """A size that comes a second time is captured."""
    monkeypatch.setattr(prefill_graphs, "RUNS_BEFORE_CAPTURE", 1)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("models") / "grouped", NARROW)


def engine_of(path, captured=None, draft_length=0, budget=None):
    engine = load(path, max_model_len=320, draft_length=draft_length, prefix_cache=True)
    if captured is not None:
        capture(engine, captured, draft_length)
    engine.scheduler.budget = budget or StepBudget(512, 48)
    return engine


@pytest.mark.parametrize(
    ("kind", "mixed"), [("latents", False), ("latents with guesses", True), ("keys", True)]
)
def test_padded_passes_give_the_tokens_of_eager_ones(tiny_checkpoint, grouped, kind, mixed):
    """Chunks of 1 to 48 tokens of up to four prompts, beside answers in one pass or apart, the
    prefixes known from the second time on."""
    path, drafts = grouped if kind == "keys" else tiny_checkpoint, 2 if "guesses" in kind else 0
    budget = StepBudget(64, 48, mixed=mixed)
    expected = tokens(engine_of(path, None, drafts, budget), PROMPTS, PARAMS)
    engine = engine_of(path, in_place, drafts, budget)
    assert [tokens(engine, PROMPTS, PARAMS) for _ in range(2)] == [expected] * 2
    sizes = list(engine.runner.prefill_runner._graphs)
    assert len(sizes) > 1
    assert any(size.decode[0] for size in sizes) == mixed
    assert {bool(size.cached) for size in sizes} == {kind != "keys"}
    assert max(size.sequences for size in sizes) > 2


def widths(engine, monkeypatch):
    """How many tokens the last layer's MLP computes, pass by pass, from now on."""
    found = []
    note(monkeypatch, engine.loaded.model.layers[-1], "mlp", lambda x: found.append(len(x)))
    return found


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["latents", "keys"])
def test_last_tokens_alone_go_through_the_last_mlp(tiny_checkpoint, grouped, kind, monkeypatch):
    """Of passes that are launched and replayed; who asks for all tokens gets all."""
    engine = engine_of(tiny_checkpoint if kind == "latents" else grouped, in_place)
    prompts, computed = engine.runner.prefill_runner, widths(engine, monkeypatch)
    assert not prompts.keep_all_hidden
    rows = [PrefillChunk(PROMPTS[2][:40], 0, [3, 1]), PrefillChunk(PROMPTS[1][:30], 0, [2])]
    every = prompts.launch(None, rows, all_hidden=True)
    assert len(every) == computed.pop() == 70
    for last in (prompts.launch(None, rows), prompts.run(None, rows), prompts.run(None, rows)):
        torch.testing.assert_close(last, every[[39, 69]], rtol=0, atol=1e-5)
    assert computed[0] == 2
    assert max(computed) < 10
    assert {size.all_hidden for size in prompts._graphs} == {False}


def test_little_of_a_pass_is_padding_and_few_graphs_serve_any_number(tiny_checkpoint):
    cache = engine_of(tiny_checkpoint).cache
    for count in (1, 16, 17, 129, 300, 513, 700, 1000, 1024):
        size = prefill_graphs.graph_size(None, [PrefillChunk([0] * count, 0, [1] * 20)], cache)
        assert count <= size.tokens < max(count + 16, 1.25 * count)
        assert size.tokens <= size.cached <= 1.25 * size.tokens + 64
    for prompts, sequences in {1: 2, 2: 4, 3: 4, 4: 16, 15: 16, 16: 64}.items():
        size = prefill_graphs.graph_size(None, [PrefillChunk([0] * 4, 0, [1])] * prompts, cache)
        assert size.sequences == sequences, "one is padding"


@torch.inference_mode()
def test_large_passes_are_not_captured_and_a_limit_lets_go_of_larger_graphs(
    tiny_checkpoint, monkeypatch
):
    """Of more tokens than the limit, of more blocks or behind as many graphs as there may be."""
    passes = engine_of(tiny_checkpoint, in_place).runner.prefill_runner
    passes.keep_all_hidden = True  # a product of another size may differ in its last bit
    monkeypatch.setattr(prefill_graphs, "_MAX_GRAPHS", 2)
    monkeypatch.setattr(prefill_graphs, "_MAX_BLOCKS", 2)

    def run(length, blocks=(1, 2)):
        prompt = [PrefillChunk([3 + one for one in range(length)], 0, [*blocks])]
        return passes.launch(None, prompt).clone(), [passes.run(None, prompt) for _ in range(3)]

    for length in (48, 16, 17):
        expected, found = run(length)
        assert all(torch.equal(one, expected) for one in found)
    run(3, (1, 2, 3))
    assert [size.tokens for size in passes._graphs] == [48, 16]
    passes.limit(32)
    expected, found = run(48)
    assert torch.equal(found[-1], expected)
    assert [size.tokens for size in passes._graphs] == [16]


@torch.inference_mode()
def test_a_failed_capture_is_computed_eagerly_and_says_why(tiny_checkpoint):
    def refuse(step, lengths):
        raise RuntimeError("operation not permitted\nsecond line")

    passes, prompt = (
        engine_of(tiny_checkpoint, refuse).runner.prefill_runner,
        [PrefillChunk([3, 4, 5], 0, [1])],
    )
    eager = passes.run(None, prompt).clone()
    with pytest.warns(
        UserWarning,
        match="a pass with prompts could not be captured: operation not permitted; prompts are "
        "launched",
    ):
        assert torch.equal(passes.run(None, prompt), eager)
    assert torch.equal(passes.run(None, prompt), eager), "told once"


USERS = [list(range(5, 5 + length)) for length in (40, 7, 90)]


def three_users(grouped, count=None):
    """count: of captures, where steps are captured."""

    def counted(step, lengths):
        count[0] += 1
        return in_place(step, lengths)

    engine = load(grouped, max_batch=3, max_model_len=320)
    return engine if count is None else capture(engine, counted)


def answers(engine):
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    alone = [tokens(engine, [prompt], params)[0] for prompt in USERS]
    return alone + tokens(engine, USERS, params)


def test_nobody_waits_for_what_was_captured_ahead(grouped, monkeypatch):
    monkeypatch.setattr(graph_warmup, "MIN_FREE_BYTES", 0)
    monkeypatch.setattr(graph_warmup, "MAX_SECONDS", 600.0)
    expected, count = answers(three_users(grouped)), [0]
    engine = three_users(grouped, count)
    done = warm_up_graphs(engine.runner, SINGLE, 3, engine.max_model_len)
    # 1, 2 and 4 rows; 16 to 128 tokens by sixteens, 160 to 256 by 32s, 320: of one prompt, of up to
    # three and of up to fifteen.
    assert done == count[0] == 3 + 3 * 13
    assert answers(engine) == expected
    assert count[0] == done


@pytest.mark.parametrize("field", ["MAX_SECONDS", "MIN_FREE_BYTES"])
def test_time_and_memory_are_bounded(grouped, field, monkeypatch):
    monkeypatch.setattr(graph_warmup, "MIN_FREE_BYTES", 0)
    monkeypatch.setattr(graph_warmup, field, 0.0 if field == "MAX_SECONDS" else 1 << 60)
    engine = three_users(grouped, count := [0])
    assert warm_up_graphs(engine.runner, SINGLE, 3, 320) == count[0] == 0
