"""What the host does between two steps: tables written once, texts read while the device
computes."""

import pytest
from engines import finish, load, note

from quantkit import SamplingParams
from quantkit.executor.runner.runner import Runner
from quantkit.executor.scheduler.sequence import Sequence


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
