import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from refused import refused

from quantkit.common import records
from quantkit.evaluation.grading.graders import find_grader
from quantkit.evaluation.tasks.data import problems, read_rows
from quantkit.evaluation.tasks.definitions import find_setting, find_task

ROWS = [
    {"question": "1 + 1?", "answer": "2\n#### 2"},
    {"question": "2 + 2?", "answer": "4\n#### 4"},
]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def setting(name="gsm8k", protocol="r1"):
    return find_setting(find_task(name), protocol)


@pytest.mark.parametrize("name", ["gsm8k/test.jsonl", "gsm8k_test.jsonl", "gsm8k/test.jsonl.gz"])
def test_files_are_found_by_any_of_their_names(tmp_path, name):
    write(tmp_path / name, ROWS)
    read = read_rows("gsm8k", find_task("gsm8k").data, tmp_path)
    assert read.rows == ROWS
    assert read.origin == str(tmp_path / name)
    made = problems(setting(), find_grader("number").gold, read.rows)
    assert [(p.id, p.gold) for p in made] == [("0", "2"), ("1", "4")]


def test_missing_data_say_where_to_get_them(tmp_path):
    with refused(r"put gsm8k/test\.jsonl .* below --data-dir \(grade_school_math"):
        read_rows("gsm8k", find_task("gsm8k").data, tmp_path)
    with refused("not a directory"):
        read_rows("gsm8k", find_task("gsm8k").data, tmp_path / "nowhere")
    with refused("data of bfcl not found: no --data-dir given"):
        read_rows("bfcl", find_task("bfcl").data, None)


DEEP = b'{"question": "?", "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        (
            "gsm8k_test.jsonl",
            '{"question": "Café?"}'.encode("latin-1"),
            r"gsm8k_test.jsonl:1 is not UTF-8 \(.*: byte 17\); save it as UTF-8",
        ),
        ("gsm8k_test.jsonl", b"{}\nnot json\n", ":2 is not JSON"),
        ("gsm8k_test.jsonl", b"[1]\n", "record 1 is not a JSON object"),
        ("gsm8k_test.jsonl", DEEP, ":1 is not JSON .*nested too deep"),
        ("gsm8k_test.jsonl", b'{"question": "\\ud800?"}', ":1 is not JSON .*half of a character"),
        (
            "gsm8k_test.jsonl",
            b'{"answer": "1", "answer": "2"}',
            ":1 is not JSON .*answer has two values",
        ),
        ("gsm8k_test.jsonl.gz", b"not gzip", r"gz cannot be read \(Not a gzipped file"),
        (
            "gsm8k_test.jsonl.gz",
            gzip.compress(b'{"question": "?"}' * 99, mtime=0)[:-12],
            "gz cannot be read",
        ),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path, name, data, told):
    (tmp_path / name).write_bytes(data)
    with refused(told):
        read_rows("gsm8k", find_task("gsm8k").data, tmp_path)


@pytest.mark.parametrize("answer", ["", "####", float("nan"), "work\n#### "])
def test_a_right_answer_that_is_none_is_refused(answer):
    with refused(
        r"row 1 of gsm8k: the right answer .* is none, and every reply would be wrong",
    ):
        problems(
            setting(), find_grader("number").gold, [ROWS[0], {"question": "?", "answer": answer}]
        )


def test_ids_must_be_unique():
    rows = [{"id": "a", "problem": "x", "answer": "1"}] * 2
    with refused("'a' occurs twice"):
        problems(setting("aime24"), find_grader("integer").gold, rows)


def _packed(name, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith(".gz"):
        return gzip.compress(text, mtime=0)
    if name.endswith(".parquet"):
        packed = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), packed, compression="gzip")
        return packed.getvalue()
    return text


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.parquet"])
def test_a_small_file_cannot_unpack_to_much(tmp_path, name, monkeypatch):
    """The limits are lowered; the rows just within them are read."""
    monkeypatch.setattr(records, "_LONGEST_LINE", 10_000)
    monkeypatch.setattr(records, "_LARGEST_UNPACKED", 50_000)
    source = find_task("gsm8k").data.model_copy(update={"files": [name]})
    few = [{"question": str(n) * 40} for n in range(100)]
    (tmp_path / name).write_bytes(_packed(name, few))
    assert read_rows("gsm8k", source, tmp_path).rows == few
    many = [{"question": f"{n:04} " * 20} for n in range(1000)]
    for rows in ([{"question": "x" * 60_000}], *([] if name == "t.jsonl" else [many])):
        (tmp_path / name).write_bytes(_packed(name, rows))
        with refused("unpacks to more than"):
            read_rows("gsm8k", source, tmp_path)


def test_dates_are_inclusive():
    row = {
        "question_content": "x",
        "public_test_cases": "[]",
        "private_test_cases": "[]",
        "metadata": "{}",
    }
    rows = [
        row | {"question_id": day, "contest_date": f"{day}T10:00:00"}
        for day in ("2024-07-31", "2024-08-01", "2025-01-31", "2025-02-01")
    ]
    made = problems(setting("live_code_bench"), find_grader("contest-tests").gold, rows)
    assert [p.id for p in made] == ["2024-08-01", "2025-01-31"]
    with refused("no problem remains"):
        problems(setting("live_code_bench"), find_grader("contest-tests").gold, rows[:1])
