"""Calibration sequences from files, and what a bad source gets."""

import json
from pathlib import Path

import pytest

from quantkit.calibrate.data import load_sequences
from quantkit.errors import QuantkitError


class Letters:
    """One token per character; a conversation starts with token 1."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: list[dict], **variables: object) -> list[int]:
        assert variables == {"add_generation_prompt": False}
        return [1, *self.encode("".join(message["content"] for message in messages))]


def jsonl(path: Path, records: list[object]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def test_jsonl_records_are_sequences_of_their_own(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "c.jsonl", [{"text": "a" * 30}, {"messages": [{"role": "user", "content": "bbb"}]}, {"text": "cc"}])
    found = load_sequences(source, Letters(), samples=2, held_out=1, seq_len=8, seed=0)
    assert sorted(s.tolist() for s in (*found.calibration, *found.held_out)) == [[1, 98, 98, 98], [97] * 8, [99, 99]]
    assert (len(found.calibration), len(found.held_out)) == (2, 1)


def test_a_text_is_cut_whole(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("".join(chr(97 + i) for i in range(20)))
    found = load_sequences(str(tmp_path / "c.txt"), Letters(), samples=4, held_out=1, seq_len=4, seed=0)
    tokens = sorted(t for s in (*found.calibration, *found.held_out) for t in s.tolist())
    assert tokens == list(range(97, 117))


def test_the_seed_alone_decides(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "c.jsonl", [{"text": f"{i} text"} for i in range(50)])
    draw = [
        [s.tolist() for s in load_sequences(source, Letters(), samples=5, held_out=2, seq_len=64, seed=seed).calibration]
        for seed in (1, 1, 2)
    ]
    assert draw[0] == draw[1] != draw[2]


def test_a_small_source_is_split_in_proportion(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "c.jsonl", [{"text": f"{i} text"} for i in range(18)])
    found = load_sequences(source, Letters(), samples=128, held_out=16, seq_len=64, seed=0)
    assert (len(found.calibration), len(found.held_out)) == (16, 2)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.jsonl", '{"text": "ab"}\n{"prompt": "ab"}', "line 2"),
        ("c.jsonl", '{"text": "ab"}\nnot json', "line 2"),
        ("c.jsonl", '{"text": "ab"}', "1 sequences"),
        ("c.csv", "a,b", "neither .txt nor .jsonl"),
        ("c.txt", None, "cannot read"),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(QuantkitError, match=says):
        load_sequences(str(tmp_path / name), Letters(), samples=4, held_out=1, seq_len=8, seed=0)


def test_a_data_set_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(QuantkitError, match=r"quantkit\[datasets\]"):
        load_sequences("org/name", Letters(), samples=4, held_out=1, seq_len=8, seed=0)


def test_a_byte_order_mark_and_odd_line_ends_are_read(tmp_path: Path) -> None:
    """U+2028 ends no line of a .jsonl, and a mark that an editor put before the first one is no part of it."""
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": f"line {number} one\u2028two"}, ensure_ascii=False) for number in range(4)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    found = load_sequences(str(path), Letters(), samples=4, held_out=0, seq_len=64, seed=0)
    assert len(found.calibration) == 4
