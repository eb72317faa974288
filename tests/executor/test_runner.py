"""What the host does between two steps: tables written once, texts read while the device computes."""

from pathlib import Path

import pytest

from quantkit.executor.engine import Engine
from quantkit.executor.runner import BlockTables, Runner
from quantkit.executor.sampling import SamplingParams


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


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_texts_are_read_while_the_device_computes(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]) -> None:
    """After a decode pass is launched and before its tokens are waited for; before a prompt, which the host may launch for long. With a
    stop string the text is read with its token."""
    engine, told = Engine.load(tiny_checkpoint, device="cpu", dtype="float32", max_batch=2, max_model_len=64), list[str]()
    decode, prefill, agree, texts = Runner.decode, Runner.prefill, engine.parallel.agree, list[str]()

    def hand_out() -> None:
        told.append("texts")
        texts.append(sequence.take_text())

    monkeypatch.setattr(Runner, "decode", lambda self, sequences: (told.append("decode"), decode(self, sequences))[1])
    monkeypatch.setattr(Runner, "prefill", lambda self, parts: (told.append("prompt"), prefill(self, parts))[1])
    monkeypatch.setattr(type(engine.parallel), "agree", lambda self, chosen: (told.append("wait"), agree(chosen))[1])
    engine.meanwhile = hand_out
    sequence = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True, stop=stop))
    while sequence.finish_reason is None:
        engine.step()
    assert told == ["texts", "prompt", "texts", "wait", *["decode", "texts", "wait"] * 3]
    assert texts[:2] == ["", ""]
    assert "".join(texts) + sequence.take_text() == sequence.completion().text


def test_a_text_that_cannot_be_read_ends_its_request_at_the_next_step(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(tiny_checkpoint, device="cpu", dtype="float32", max_batch=2, max_model_len=64)
    broken, other = (engine.submit([5, 6, 7 + i], SamplingParams(max_new_tokens=6, ignore_eos=True)) for i in range(2))
    engine.step()
    assert broken._stream is not None
    monkeypatch.setattr(broken._stream, "push", lambda token: 1 / 0)
    assert (broken.take_text(), broken.finish_reason) == ("", None)
    assert broken in engine.step()
    assert (broken.finish_reason, type(broken.fault)) == ("error", ZeroDivisionError)
    while other.finish_reason is None:
        engine.step()
    assert (len(other.generated), other.fault, broken in engine.scheduler.running) == (6, None, False)
