"""Decode steps over static buffers give the tokens of eager ones, and where they cannot be captured
they are computed all the same."""

import numpy as np
import pytest
import torch
from engines import capture, in_place, load, tokens

from quantkit import SamplingParams
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import DecodeBuffers, DecodeSteps, DeviceCapture

PROMPTS = [list(range(6 + i, 30 + 9 * i)) for i in range(11)]
PARAMS = [
    SamplingParams(
        max_new_tokens=4 + 3 * i,
        ignore_eos=True,
        temperature=i % 3 / 2,
        seed=i,
        min_new_tokens=i % 2 * 3,
    )
    for i in range(11)
]


def refuse(step, lengths):
    try:
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def engine_of(path, captured=None, draft_length=0):
    engine = load(path, max_batch=8, draft_length=draft_length)
    return engine if captured is None else capture(engine, captured, draft_length)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_share_their_memory():
    """What one needs while it computes serves all others."""
    device, room = torch.device("cuda", 0), 1 << 24
    capture = DeviceCapture(device)

    def step():
        return (torch.ones(room, device=device) * 2).sum()

    replays, before = [capture(step, [])], torch.cuda.memory_reserved(device)
    replays += [capture(step, []) for _ in range(8)]
    assert torch.cuda.memory_reserved(device) - before < 4 * room
    assert [float(replay()) for replay in replays] == [2.0 * room] * 9


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    engine = engine_of(tiny_checkpoint)
    assert "cpu" in engine.runner.why_eager
    return tokens(engine, PROMPTS, PARAMS)


@pytest.mark.parametrize("draft_length", [0, 2])
def test_static_buffers_change_no_token(tiny_checkpoint, expected, draft_length):
    """Batches of 1 to 8 (24 rows with drafts) shrink and grow, greedy and sampled, through padded
    steps."""
    engine = engine_of(tiny_checkpoint, in_place, draft_length)
    assert tokens(engine, PROMPTS, PARAMS) == expected
    assert engine.runner.why_eager == ""
    assert {rows for rows, _ in engine.runner.draw._sizes} >= {4, 8}, "draws are captured too"
    if (drafter := engine.speculation.drafter) is not None:
        assert isinstance(drafter.steps, DecodeSteps), "the MTP layer is captured too"
        assert drafter.steps.failure == ""


def test_a_failed_capture_is_computed_eagerly_and_says_why(tiny_checkpoint, expected):
    engine = engine_of(tiny_checkpoint, refuse)
    with pytest.warns(RuntimeWarning, match="could not be captured"):
        found = tokens(engine, PROMPTS, PARAMS)
    assert found == expected
    assert (
        engine.runner.why_eager
        == "the decode step could not be captured: operation not permitted when stream is capturing"
    )


@torch.inference_mode()
def test_rows_that_are_wanted_are_those_of_all(tiny_checkpoint):
    """A step for each number of them; who asks for one of so many rows is told the one that makes
    the fewest."""
    engine = engine_of(tiny_checkpoint)
    steps, block = DecodeSteps(engine.loaded.model, engine.cache, in_place), np.arange(1, 4)
    slots, tables = block * engine.cache.block_size, block.astype(np.int32)[:, None]
    rows = DecodeRows(np.array([7, 8, 9]), np.zeros(3, np.int64), slots, tables)
    assert steps.num_results(3, 1) is None
    whole = steps.run(rows)
    assert (steps.has(3, 1), steps.num_results(3, 1)) == (True, 0)
    for wanted in ([2], [2, 0, 1], [1]):
        for found, expected in zip(steps.run(rows, result_rows=torch.tensor(wanted)), whole):
            torch.testing.assert_close(found, expected[wanted])
    assert [steps.num_results(count, 1) for count in (2, 3, 4)] == [None, 1, 1]
    buffers = DecodeBuffers(4, 16, torch.device("cpu"), num_results=2)
    for kept in ([3, 2], [1]):
        buffers.fill(rows, result_rows=torch.tensor(kept))
        assert buffers.result_rows.tolist() == [*kept, 0][:2]
        assert buffers.tables[:3, 0].tolist() == [1, 2, 3]
