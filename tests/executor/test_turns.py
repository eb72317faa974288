"""A long pass in two halves that take turns at sums computes what one pass does, and a half that fails ends the other."""

import threading
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from packed_model import write_random
from torch import Tensor

from quantkit.executor import prompt_graphs
from quantkit.executor.load import load_model
from quantkit.executor.parallel import Parallel
from quantkit.executor.prompt_graphs import PromptPasses, PromptRows, halved
from quantkit.executor.turns import Turns

CPU = torch.device("cpu")
GROUPED = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def rows(*lengths: int) -> list[PromptRows]:
    """Prompts of which some tokens are cached, each with a block of 64 and one more."""
    return [PromptRows([(5 * i + t) % 300 for t in range(length)], 0, [1 + 2 * i, 2 + 2 * i]) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(("lengths", "cut"), [((100,), (0, 50)), ((30, 20, 50, 7), (2, 3)), ((80, 9), (0, 44))])
def test_halves_hold_all_tokens_in_their_order(lengths: tuple[int, ...], cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "_HALF_STEP", 1)
    whole = rows(*lengths)
    first, second = halved(whole)
    sequence, tokens = cut
    assert [len(one.token_ids) for one in first] == [*lengths[:sequence], tokens]
    assert sum(len(one.token_ids) for one in first) == sum(lengths) // 2
    assert [token for one in (*first, *second) for token in one.token_ids] == [token for one in whole for token in one.token_ids]
    if first[-1].blocks == second[0].blocks:
        assert second[0].start == len(first[-1].token_ids)


def computed(parallel: Parallel, path: Path, in_turns: bool) -> tuple[Tensor, Tensor, list[str]]:
    """Hidden states of a pass behind cached tokens, what the cache holds then, and which threads began sums, in order."""
    loaded = load_model(path, device="cpu", dtype="float32", parallel=parallel)
    cache, order = loaded.new_cache(9), []
    parts = [part for layer in cache.layers for part in (layer if isinstance(layer, tuple) else (layer,))]
    for part in parts:
        part.zero_()
    passes = PromptPasses(loaded.model, cache, None, parallel.turns if in_turns else None)
    passes.launch(None, rows(10, 20))
    add_up = parallel._all_reduce_now if not in_turns else parallel._all_reduce_meanwhile

    def noted(x: Tensor) -> Tensor:
        order.append(threading.current_thread().name)
        return add_up(x)

    setattr(parallel, add_up.__name__, noted)
    new = [one._replace(start=start) for one, start in zip(rows(60, 41), (10, 20))]
    hidden = passes.launch(None, new)
    delattr(parallel, add_up.__name__)
    return hidden, torch.cat([part.flatten() for part in parts]), order


@pytest.mark.parametrize("kind", ["grouped", "latents"])
def test_two_halves_are_the_whole(kind: str, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "LEAST_IN_TURNS", 100)
    monkeypatch.setattr(prompt_graphs, "_HALF_STEP", 1)
    path = write_random(tmp_path / "grouped", GROUPED) if kind == "grouped" else tiny_checkpoint

    def compute(parallel: Parallel) -> list[object]:
        return [computed(parallel, path, in_turns) for in_turns in (False, True)]

    for (hidden, cached, alone), (halves, left, both) in run_ranks(2, tmp_path, compute):
        torch.testing.assert_close(halves, hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(left, cached, rtol=1e-4, atol=1e-4)
        assert set(alone) == {"MainThread"}
        assert both == ["MainThread", "second half"] * len(alone)


def test_short_passes_and_caches_that_go_by_sequence_are_computed_whole(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "LEAST_IN_TURNS", 100)
    loaded, turns = load_model(tiny_checkpoint, device="cpu", dtype="float32"), Turns()
    monkeypatch.setattr(turns, "both", lambda *given: pytest.fail("in turns"))
    cache = loaded.new_cache(9)
    PromptPasses(loaded.model, cache, None, turns).launch(None, rows(50, 49))
    monkeypatch.setattr(type(cache), "goes_by_sequence", property(lambda cache: True))
    PromptPasses(loaded.model, cache, None, turns).launch(None, rows(50, 60))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_half_that_fails_ends_the_other(failing: int, at: int) -> None:
    turns, done = Turns(), [0, 0]

    def half(place: int) -> Tensor:
        for turn in range(4):
            if place == failing and turn == at:
                raise ValueError(f"half {place}")
            done[place] += 1
            turns.pass_on()
        return torch.tensor(place)

    with pytest.raises(ValueError, match=f"half {failing}"):
        turns.both(lambda: half(0), lambda: half(1), CPU)
    assert done[failing] == at
    assert done[1 - failing] <= at + 1
    assert not turns.taken
    failing = 2  # and then it serves again
    for _ in range(2):
        done[:] = [0, 0]
        assert turns.both(lambda: half(0), lambda: half(1), CPU) == (torch.tensor(0), torch.tensor(1))
        assert done == [4, 4]


def test_one_runs_at_a_time_and_the_first_is_ahead() -> None:
    turns, order = Turns(), []

    def half(place: int, count: int) -> Tensor:
        for turn in range(count):
            order.append((turn, place))
            turns.pass_on()
        return torch.tensor(place)

    with torch.inference_mode():
        turns.both(lambda: half(0, 3), lambda: half(1, 5), CPU)
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 1), (4, 1)]


def test_the_second_half_computes_as_its_caller_does() -> None:
    with torch.inference_mode():
        found = Turns().both(lambda: torch.ones(()), lambda: torch.tensor(torch.is_inference_mode_enabled()), CPU)
    assert found[1]
