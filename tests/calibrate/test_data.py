"""Calibration sequences from files, what is told of them, and what a bad source gets."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from refused import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quantkit.calibrate.data import load_sequences, split_text
from quantkit.common.assets import calibration_text
from quantkit.tokenizer.chat import ChatTokenizer

BUILDER = Path(__file__).parent.parent.parent / "tools" / "calibration" / "build.py"


class Letters:
    """One token per character; a conversation starts with \x01."""

    def __init__(self):
        self.templates, self.eos = {"default": None}, None

    def encode(self, text):
        return [ord(letter) for letter in text]

    encode_rendered = encode

    def render(self, messages, *, add_generation_prompt=True, **variables):
        assert variables == {"tools": None}
        assert not add_generation_prompt
        return "\x01" + "".join(message["content"] for message in messages)


def jsonl(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def load(source, samples=4, held_out=1, seq_len=8, seed=0):
    return load_sequences(
        str(source), Letters(), samples=samples, held_out=held_out, seq_len=seq_len, seed=seed
    )


def texts(found):
    return sorted("".join(map(chr, one.tolist())) for one in (*found.calibration, *found.held_out))


def test_jsonl_records_are_sequences_of_their_own(tmp_path):
    source = jsonl(
        tmp_path / "c.jsonl",
        [{"text": "a" * 30}, {"messages": [{"role": "user", "content": "bbb"}]}, {"text": "cc"}],
    )
    found = load(source, samples=2)
    assert texts(found) == ["\x01bbb", "aaaaaaaa", "cc"]
    assert (len(found.calibration), len(found.held_out)) == (2, 1)


class Marked(Letters):
    """BOS and EOS around a text."""

    def encode(self, text):
        return [1, *super().encode(text), 2]


def test_every_piece_of_a_text_begins_with_bos():
    pieces = split_text(Marked(), "abcdefgh", 4)
    assert ["".join(map(chr, one.tolist())) for one in pieces] == ["\1abc", "\1def", "\1gh\2"]
    assert [one.tolist() for one in split_text(Letters(), "abcd", 4)] == [[97, 98, 99, 100]]
    assert split_text(Letters(), "", 4) == []
    with refused("no room after the 1"):
        split_text(Marked(), "ab", 2)


def test_the_seed_alone_decides(tmp_path):
    source = jsonl(tmp_path / "c.jsonl", [{"text": f"{i} text"} for i in range(50)])
    draw = [[s.tolist() for s in load(source, 5, 2, 64, seed).calibration] for seed in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]


def test_a_small_source_is_split_in_proportion(tmp_path):
    records = [{"text": f"{i} text"} for i in range(18)]
    found = load(jsonl(tmp_path / "c.jsonl", records), 128, 16, 64)
    assert (len(found.calibration), len(found.held_out)) == (16, 2)
    told = "144 documents were asked for and 18 are there"
    assert any(told in line for line in found.summary.lines())


def test_empty_documents_are_replaced_by_others(tmp_path):
    """As many are fitted as were asked for, where the source has them."""
    records = [
        {"text": ""} if number % 2 else {"text": f"document {number}"} for number in range(40)
    ]
    found = load(jsonl(tmp_path / "c.jsonl", records), 15, 5, 64)
    assert (len(found.calibration), len(found.held_out)) == (15, 5)
    assert found.summary.empty > 0


CONVERSATION = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
SHARED = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]
FORMS = {
    "messages": {"messages": CONVERSATION},
    "messages as text": {"messages": json.dumps(CONVERSATION)},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "ab"}]},
            CONVERSATION[1],
            {"role": "user", "content": None},
        ]
    },
    "ShareGPT": {"conversations": SHARED, "id": "x1"},
    "ShareGPT as messages": {"messages": SHARED},
    "alpaca": {"instruction": "ab", "input": "", "output": "cd"},
    "with capitals": {"Prompt": "ab", "Response": "cd"},
    "completion": {"prompt": "ab", "completion": "cd"},
    "preferences": {"prompt": "ab", "chosen": CONVERSATION, "rejected": CONVERSATION[:1]},
    "question": {"question": "ab", "answer": "cd"},
}


@pytest.mark.parametrize("form", FORMS)
def test_known_forms(tmp_path, form):
    found = load(jsonl(tmp_path / "c.jsonl", [FORMS[form]] * 4))
    assert set(texts(found)) == {"\x01abcd"}


@pytest.mark.parametrize(
    "ending",
    [".json", ".jsonl", ".json: lines", ".json: data", ".csv", ".csv: ;", ".tsv", ".parquet"],
)
def test_files(tmp_path, ending):
    rows = [
        {"instruction": "ab", "input": 'x, "y"\nz', "output": str(number)} for number in range(6)
    ]
    path = tmp_path / f"c{ending.partition(':')[0]}"
    if "sv" in ending:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(
                file, list(rows[0]), delimiter={".tsv": "\t", ".csv: ;": ";"}.get(ending, ",")
            )
            writer.writeheader()
            writer.writerows(rows)
    elif ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif ending == ".json: lines":
        jsonl(path, rows)
    else:
        path.write_text(
            json.dumps({"version": 1, "data": rows} if "data" in ending else rows, indent=2),
            encoding="utf-8",
        )
    found = load(path, samples=5, seq_len=64)
    assert texts(found) == sorted(f'\x01ab\n\nx, "y"\nz{number}' for number in range(6))


ODD = {
    "fewer than half": [{"text": f"{number}" * 2} for number in range(20)],
    "only 1 of 20 documents are different; one of them comes 20 times": [{"text": "all alike here"}]
    * 20,
    "all documents have 12 tokens": [{"text": f"{number:012}"} for number in range(20)],
}


@pytest.mark.parametrize("said", ODD)
def test_odd_data_is_warned_of(tmp_path, said):
    taken = load(jsonl(tmp_path / "c.jsonl", ODD[said]), 16, 4, 20).summary
    assert any(said in warning for warning in taken.warnings), taken.warnings


def test_few_tokens_are_cured_by_what_there_is(tmp_path):
    """More documents where some are left; and the text that a model ships is as much as its maker
    chose."""
    records = [{"text": f"{number:03}"} for number in range(30)]
    path = jsonl(tmp_path / "calibration.jsonl", records)
    warnings = load(path, 16, 4, 20).summary.warnings
    assert "raise --samples, 10 documents more are there" in warnings[0]
    (tmp_path / "config.json").write_text("{}")
    assert load(path, 16, 4, 20).summary.warnings == ()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "c.jsonl",
            '{"text": "ab"}\n{"prompt": "ab"}',
            "c.jsonl:2 is not a document: it has prompt; give text, messages",
        ),
        ("c.jsonl", '{"text": "ab"}\nnot json', ":2 is not JSON"),
        ("c.jsonl", '{"text": "ab"}\n{"text": 3}', ":2 is not a document: text is 3"),
        (
            "c.jsonl",
            '{"text": "ab"}\n\n{"messages": [{"content": "x"}]}',
            r":3 .* messages\[0\] has neither role nor from",
        ),
        (
            "c.jsonl",
            '{"text": "ab"}\n{"conversations": [{"from": "alien", "value": "x"}]}',
            r"conversations\[0\] has role 'alien'",
        ),
        (
            "c.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "has a part that is not a text",
        ),
        ("c.jsonl", '{"text": "ab"}', "gives 1 sequence; give at least two"),
        (
            "c.jsonl",
            '{"text": null}\n{"text": ""}\n{"text": "ab"}\n{"text": "a"}',
            "gives 1 sequence: 3 of its 4 records hold no two tokens",
        ),
        ("c.txt", "", "gives no sequence; give"),
        ("c.json", '[\n{"text": "ab"},\n{"text": }\n]', "is not JSON .*line 3"),
        (
            "c.json",
            '[\n{"text": "ab"},\n\n{"txt": "cd"}\n]',
            "record 2 is not a document: it has txt",
        ),
        ("c.json", "[" * 100_000, "is not JSON .*too deep"),
        ("c.csv", "a,b\n1,2", ":2 is not a document: it has a, b"),
        ("c.csv", "text\nab, cd", ":2 has more fields than the header"),
        ("c.pdf", "text", "is none of the files"),
        ("c.txt", None, "cannot be read"),
        ("c.parquet", None, "cannot be read"),
        ("c.parquet", "PAR1 and nothing else", "is not Parquet"),
        ("../c d/", None, "does not exist"),
    ],
)
def test_bad_sources_are_named(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    with refused(says) as told:
        load(tmp_path / name)
    assert "\n" not in str(told.value)


def test_a_text_that_is_one_sequence_gives_two_shorter_ones_as_its_refusal_says(tmp_path):
    source = tmp_path / "c.txt"
    source.write_text("a" * 40)
    with refused(r"gives 1 sequence; .* --seq-len \d+$") as said:
        load(source, seq_len=64)
    found = load(source, seq_len=int(str(said.value).split()[-1]))
    assert len(found.calibration) + len(found.held_out) == 2


def test_sequences_beyond_the_positions_of_a_model_are_said(tmp_path):
    source = tmp_path / "c.txt"
    source.write_text("".join(map(chr, range(97, 177))))
    options = {"samples": 3, "held_out": 1, "seq_len": 20, "seed": 0}
    for positions, beyond in ((0, False), (20, False), (16, True)):
        found = load_sequences(str(source), Letters(), **options, positions=positions)
        assert any("--seq-len 16" in one for one in found.summary.warnings) == beyond


def test_a_byte_order_mark_and_odd_line_ends_are_read(tmp_path):
    """U+2028 ends no line of a .jsonl, and a mark that an editor put before the first one is no
    part of it."""
    path = tmp_path / "data.jsonl"
    lines = [
        json.dumps({"text": f"line {number} one\u2028two"}, ensure_ascii=False)
        for number in range(4)
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert len(load(path, 4, 0, 64).calibration) == 4


def test_own_text_is_what_its_sources_make(tmp_path):
    subprocess.run(
        [sys.executable, str(BUILDER), str(tmp_path / "built.jsonl")],
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "built.jsonl").read_bytes() == calibration_text().read_bytes()


def test_own_text_fills_the_usual_lengths(tiny_checkpoint):
    sizes = {"samples": 128, "held_out": 16, "seq_len": 512, "seed": 0}
    found = load_sequences(None, ChatTokenizer(tiny_checkpoint), **sizes, further=24)
    used = {tuple(one.tolist()) for one in (*found.calibration, *found.held_out)}
    assert len(found.further) == 24
    assert used.isdisjoint(tuple(one.tolist()) for one in found.further)
    assert {len(one) for one in (*found.calibration, *found.held_out)} == {512}
    assert len(found.calibration) == 128
    assert found.summary
    assert (found.summary.source, found.summary.warnings) == ("quantkit's own text", ())


def test_a_script_that_the_tokenizer_does_not_know_comes_last(tmp_path):
    """Without Chinese in its vocabulary a model is calibrated on the rest, where there is enough of
    it."""
    records = [
        json.loads(line) for line in calibration_text().read_text(encoding="utf-8").splitlines()
    ]
    known = [one for one in records if one["kind"] in ("questions", "mathematics", "programs")][::4]
    english = [message["content"] for one in known for message in one["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(english, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    found = load_sequences(
        None, ChatTokenizer(tmp_path), samples=200, held_out=0, seq_len=64, seed=0
    )
    texts = [tokenizer.decode(one.tolist()) for one in found.calibration]
    chinese = [
        text
        for text in texts
        if sum("\u3400" < letter < "\u9fff" for letter in text) > len(text) / 4
    ]
    assert (
        len(chinese) <= 14
    )  # translations, which are half English; of 528 documents 122 are Chinese or half so
    assert len(texts) == 200
