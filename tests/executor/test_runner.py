"""What the host does between two steps: tables written once, texts read while the device
computes."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from engines import finish, load, note

from quantkit import SamplingParams
from quantkit.executor.runner import runner
from quantkit.executor.runner.runner import Runner
from quantkit.executor.scheduler.sequence import Sequence


def test_rows_that_are_kept_are_those_made_anew(tiny_checkpoint, monkeypatch):
    """Of sequences that grow, whose blocks come when they are needed or earlier, that are computed
    again in other blocks, or end."""
    engine = load(tiny_checkpoint, max_model_len=512)
    draw, size, anew = random.Random(3), engine.cache.block_size, Runner.rows
    made, params = Counter(), SamplingParams(max_new_tokens=4000, ignore_eos=True)
    note(monkeypatch, Runner, "rows", lambda *_: made.update(["anew"]))

    def sequence(index):
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
        told = found.context(engine.cache)
        assert told.lengths == told.seq_lens.tolist() == [one.num_cached + 1 for one in running]
        for row, one in enumerate(running):
            needed = one.num_cached // size + 1
            assert found.tables[row, :needed].tolist() == one.blocks[:needed], step
            later = zip(found.tables[row, needed:].tolist(), [*one.blocks[needed:], *[0] * 99])
            assert all(block in (0, own) for block, own in later), step
            one.append(draw.randrange(99), 1.0)
    assert 0 < made["anew"] < 100, "most steps kept them"


def test_a_sequence_that_was_computed_again_has_rows_of_its_new_blocks(tiny_checkpoint):
    """Even where it comes back a token further, in the middle of a block: its last chunk left one
    token."""
    engine = load(tiny_checkpoint, max_batch=1, max_model_len=64)
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


@pytest.mark.parametrize(("kind", "made"), [("npu", ["steps"]), ("cuda", ["steps", "draws"])])
def test_what_an_npu_does_not_capture(tiny_checkpoint, monkeypatch, kind, made):
    """Its attention wants lengths on the host, and prompts and draws have none of their own."""
    loaded, captures = (load(tiny_checkpoint, max_batch=2, max_model_len=64).loaded, [])
    monkeypatch.setattr(
        runner, "DeviceCapture", lambda device: captures.append(object()) or captures[-1]
    )
    cache = SimpleNamespace(
        device=SimpleNamespace(type=kind),
        block_size=16,
        read_in_place=False,
        prefills_per_sequence=False,
    )
    found = Runner(loaded.model, cache)
    assert len(captures) == len(made)
    assert (found.prefill_runner._capture is None) == (kind == "npu")


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_texts_are_read_while_the_device_computes(tiny_checkpoint, monkeypatch, stop):
    """After a decode pass is launched and before its tokens are waited for; before a prompt, which
    the host may launch for long. With a stop string the text is read with its token."""
    engine = load(tiny_checkpoint, max_batch=2, max_model_len=64)
    told, texts = [], []

    def hand_out(brought):
        told.append("texts")
        texts.append(sequence.take_text())

    note(monkeypatch, Runner, "decode", lambda *_: told.append("decode"))
    note(monkeypatch, Runner, "prefill", lambda *_: told.append("prompt"))
    note(monkeypatch, type(engine.parallel), "agree", lambda *_: told.append("wait"))
    engine.while_computing = hand_out
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, stop=stop)
    sequence = engine.submit([5, 6, 7], params)
    finish(engine)
    assert told == ["texts", "prompt", "texts", "wait", *["decode", "texts", "wait"] * 3]
    assert texts[:2] == ["", ""]
    assert "".join(texts) + sequence.take_text() == sequence.completion().text


def test_a_text_that_cannot_be_read_ends_its_request_at_the_next_step(tiny_checkpoint, monkeypatch):
    engine = load(tiny_checkpoint, max_batch=2, max_model_len=64)
    broken, other = (
        engine.submit([5, 6, 7 + i], SamplingParams(max_new_tokens=6, ignore_eos=True))
        for i in range(2)
    )
    engine.step()
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
