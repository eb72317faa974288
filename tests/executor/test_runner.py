"""What the host does between two steps: tables written once, texts read while the device
computes."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quantkit.executor.engine import Engine
from quantkit.executor.runner import runner
from quantkit.executor.runner.decode_batch import BlockTables
from quantkit.executor.runner.runner import Runner
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence


def test_tables_follow_lists_that_grow_and_others_in_their_place() -> None:
    tables, first, second = BlockTables(), [1, 2], [3]
    assert tables.of([first, second]).tolist() == [[1, 2], [3, 0]]
    second.append(4)
    assert tables.of([first, second]).tolist() == [[1, 2], [3, 4]]
    assert tables.of([[5], second]).tolist() == [[5, 0], [3, 4]]
    assert tables.of([[6], second]).tolist() == [[6, 0], [3, 4]], "as long, and another list"
    second.append(7)
    assert tables.of([second, first]).tolist() == [[3, 4, 7], [1, 2, 0]]
    assert tables.of([first]).tolist() == [[1, 2]]


def test_a_token_goes_where_its_position_says(tiny_checkpoint: Path) -> None:
    """Before, at and behind the end of every block, and to no block of another sequence; a row
    attends to itself and all before."""
    engine = Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=2, max_model_len=256
    )
    size, sequences = (
        engine.cache.block_size,
        [SimpleNamespace(blocks=blocks, state=0) for blocks in ([7, 2, 9], [4, 1])],
    )
    tokens = [
        (one, position)
        for one in sequences
        for edge in range(len(one.blocks))
        for position in (edge * size, edge * size + size - 1)
    ]
    rows = engine.runner.rows(list(range(len(tokens))), cast(Any, tokens))
    assert rows.positions.tolist() == [position for _, position in tokens]
    assert rows.slots.tolist() == [
        one.blocks[position // size] * size + position % size for one, position in tokens
    ]
    assert rows.tables.tolist() == [[*one.blocks, 0][:3] for one, _ in tokens]
    assert (rows.positions + 1).tolist() == [position + 1 for _, position in tokens]


def test_rows_that_are_kept_are_those_made_anew(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences that grow, whose blocks come when they are needed or earlier, that are computed
    again in other blocks, or end."""
    engine = Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=4, max_model_len=512
    )
    draw, size, anew = random.Random(3), engine.cache.block_size, Runner.rows
    made, params = Counter[str](), SamplingParams(max_new_tokens=4000, ignore_eos=True)
    monkeypatch.setattr(
        Runner, "rows", lambda self, *given: made.update(["anew"]) or anew(self, *given)
    )

    def sequence(index: int) -> Sequence:
        one = Sequence(
            index,
            [draw.randrange(9)] * draw.randrange(1, 3 * size),
            params,
            engine.tokenizer,
            4096,
            streams=False,
        )
        one.state, one.num_cached = index, len(one.token_ids) - 1
        return one

    running = [sequence(index) for index in range(4)]
    for step in range(300):
        if step % 37 == 36:
            running[draw.randrange(4)] = sequence(step)
        if step % 23 == 22:
            running[0].blocks = []
            running = [*running[1:], running[0]]
        for one in running:
            missing = -(-(len(one.token_ids) + draw.randrange(9)) // size) - len(one.blocks)
            one.blocks += [draw.randrange(1, 99) for _ in range(missing)]
        found = engine.runner._decode_rows(running, 4)
        expected = anew(
            engine.runner,
            [one.token_ids[-1] for one in running],
            [(one, one.num_cached) for one in running],
        )
        for name in ("token_ids", "positions", "slots", "states"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), (step, name)
        assert engine.runner._decode_batch.counts == [(one, 1) for one in running], step
        for row, one in enumerate(running):
            needed = one.num_cached // size + 1
            assert found.tables[row, :needed].tolist() == one.blocks[:needed], step
            one.append(draw.randrange(99), 1.0)
    assert 0 < made["anew"] < 100, "most steps kept them"


def test_a_sequence_that_was_computed_again_has_rows_of_its_new_blocks(
    tiny_checkpoint: Path,
) -> None:
    """Even where it comes back a token further, in the middle of a block: its last chunk left one
    token."""
    engine = Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=1, max_model_len=64
    )
    one = Sequence(
        0, [1, 2, 3], SamplingParams(max_new_tokens=4), engine.tokenizer, 64, streams=False
    )
    one.blocks, one.num_cached = [3], 2
    engine.runner._decode_rows([one], 1)
    one.append(4, 1.0)
    one.blocks = [5]
    found = engine.runner._decode_rows([one], 1)
    assert found.tables[0, 0] == 5
    assert found.slots.tolist() == [5 * engine.cache.block_size + 3]


@pytest.mark.parametrize("stop", [(), ("b",)])
@pytest.mark.parametrize("ids", [(), (7,)])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_token_without_drafts_is_taken_as_one_with_them(
    tiny_checkpoint: Path,
    stop: tuple[str, ...],
    ids: tuple[int, ...],
    ignore_eos: bool,
    streams: bool,
) -> None:
    """First tokens, tokens that end an answer, and the last that there is room for."""
    engine = Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=1, max_model_len=64
    )
    params = SamplingParams(max_new_tokens=5, stop=stop, stop_token_ids=ids, ignore_eos=ignore_eos)
    eos = next(iter(engine.tokenizer.eos_ids))
    ended = Counter[str]()
    for last in (
        7,
        eos,
        engine.tokenizer.tokenizer.encode("b", add_special_tokens=False).ids[0],
        9,
    ):
        for place in range(5):
            one, other = (
                Sequence(0, [1, 2, 3], params, engine.tokenizer, 64, streams=streams)
                for _ in range(2)
            )
            for now, token in enumerate([10] * place + [last], 1):
                one.append(token, now)
                other.extend([token], now)
            for name in (
                "token_ids",
                "num_cached",
                "finish_reason",
                "first_token",
                "last_token",
                "_undecoded",
                "fault",
            ):
                assert getattr(one, name) == getattr(other, name), (last, place, name)
            assert one.take_text() == other.take_text()
            ended[str(one.finish_reason)] += 1
    assert ended["length"] > 0
    assert ended["None"] > 0
    assert bool(ended["stop"]) == bool(stop or ids or not ignore_eos)


def test_the_likeliest_token_of_each_prompt(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, passes, prefill = (
        Engine.load(tiny_checkpoint, device="cpu", dtype="float32", max_batch=4, max_model_len=64),
        [],
        Runner.prefill,
    )
    monkeypatch.setattr(
        Runner, "prefill", lambda self, parts: passes.append(prefill(self, parts)) or passes[-1]
    )
    for first in (5, 9, 20):
        engine.submit([first, first + 1], SamplingParams(max_new_tokens=1))
    engine.step()
    assert [one.greedy.tolist() for one in passes] == [
        one.logits.argmax(dim=-1).tolist() for one in passes
    ]
    assert len(passes[0].logits) == len(passes[0].greedy) == 3


@pytest.mark.parametrize(("kind", "made"), [("npu", ["steps"]), ("cuda", ["steps", "draws"])])
def test_what_an_npu_does_not_capture(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str, made: list[str]
) -> None:
    """Its attention wants lengths on the host, which prompts and draws are not told anew."""
    loaded, captures = (
        Engine.load(
            tiny_checkpoint, device="cpu", dtype="float32", max_batch=2, max_model_len=64
        ).loaded,
        list[object](),
    )
    monkeypatch.setattr(
        runner, "DeviceCapture", lambda device: captures.append(object()) or captures[-1]
    )
    cache = SimpleNamespace(
        device=SimpleNamespace(type=kind),
        block_size=16,
        read_in_place=False,
        prefills_per_sequence=False,
    )
    found = Runner(loaded.model, cast(Any, cache))
    assert len(captures) == len(made)
    assert (found.prefill_runner._capture is None) == (kind == "npu")


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_texts_are_read_while_the_device_computes(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    """After a decode pass is launched and before its tokens are waited for; before a prompt, which
    the host may launch for long. With a stop string the text is read with its token."""
    engine, told = (
        Engine.load(tiny_checkpoint, device="cpu", dtype="float32", max_batch=2, max_model_len=64),
        list[str](),
    )
    decode, prefill, agree, texts = (
        Runner.decode,
        Runner.prefill,
        engine.parallel.agree,
        list[str](),
    )

    def hand_out(brought: list[Sequence]) -> None:
        told.append("texts")
        texts.append(sequence.take_text())

    monkeypatch.setattr(
        Runner,
        "decode",
        lambda self, sequences: (told.append("decode"), decode(self, sequences))[1],
    )
    monkeypatch.setattr(
        Runner, "prefill", lambda self, parts: (told.append("prompt"), prefill(self, parts))[1]
    )
    monkeypatch.setattr(
        type(engine.parallel), "agree", lambda self, chosen: (told.append("wait"), agree(chosen))[1]
    )
    engine.while_computing = hand_out
    sequence = engine.submit(
        [5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True, stop=stop)
    )
    while sequence.finish_reason is None:
        engine.step()
    assert told == ["texts", "prompt", "texts", "wait", *["decode", "texts", "wait"] * 3]
    assert texts[:2] == ["", ""]
    assert "".join(texts) + sequence.take_text() == sequence.completion().text


def test_answers_do_not_wait_for_the_prompts_of_their_step(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are handed out when a prompt's chunk is launched, before the host waits for
    it."""
    engine = Engine.load(
        tiny_checkpoint,
        device="cpu",
        dtype="float32",
        max_batch=2,
        max_model_len=256,
        chunk_tokens=32,
    )
    told, prefill, agree = list[tuple[str, int]](), Runner.prefill, engine.parallel.agree
    answer = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True))
    engine.step()
    monkeypatch.setattr(
        Runner, "prefill", lambda self, parts: (told.append(("prompt", 0)), prefill(self, parts))[1]
    )
    monkeypatch.setattr(
        type(engine.parallel),
        "agree",
        lambda self, chosen: (told.append(("wait", 0)), agree(chosen))[1],
    )
    engine.while_computing = lambda brought: told.extend(
        ("handed out", len(one.generated)) for one in brought
    )
    prompt = engine.submit([9] * 80, SamplingParams(max_new_tokens=1, ignore_eos=True))
    while prompt.finish_reason is None:
        engine.step()
    steps = [[("wait", 0), ("prompt", 0), ("handed out", tokens)] for tokens in (2, 3, 4)]
    assert told == [*steps[0], *steps[1], *steps[2], ("wait", 0)]
    assert len(answer.generated) == 4


def test_a_text_that_cannot_be_read_ends_its_request_at_the_next_step(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=2, max_model_len=64
    )
    broken, other = (
        engine.submit([5, 6, 7 + i], SamplingParams(max_new_tokens=6, ignore_eos=True))
        for i in range(2)
    )
    engine.step()
    assert broken._stream is not None
    monkeypatch.setattr(broken._stream, "push", lambda token: 1 / 0)
    assert (broken.take_text(), broken.finish_reason) == ("", None)
    assert broken in engine.step()
    assert (broken.finish_reason, type(broken.fault)) == ("error", ZeroDivisionError)
    while other.finish_reason is None:
        engine.step()
    assert (len(other.generated), other.fault, broken in engine.scheduler.running) == (
        6,
        None,
        False,
    )
