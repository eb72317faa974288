"""Rows of the hubs' repositories, from a local server that answers as they do: listings with
checksums, files by their paths."""

import hashlib
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet
import pytest
from refused import refused

from quantkit.evaluation.tasks.data import read_rows
from quantkit.evaluation.tasks.definitions import find_task


def parquet(rows):
    packed = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), packed)
    return packed.getvalue()


GSM8K = [{"question": "1 + 1?", "answer": "#### 2"}]
LAW = [{"id": 0, "question": "?", "A": "1", "B": "2", "C": "3", "D": "4", "answer": "B"}]
FILES = {
    "openai/gsm8k": {
        "README.md": b"x",
        "main/test-00000-of-00001.parquet": parquet(GSM8K),
        "main/train-00000-of-00001.parquet": parquet(GSM8K * 2),
        "socratic/test-00000-of-00001.parquet": parquet(GSM8K * 3),
    },
    "HuggingFaceH4/MATH-500": {
        ".gitattributes": b"",
        "test.jsonl": b'{"problem": "?", "answer": "2"}\n',
    },
    "google/IFEval": {"ifeval_input_data.jsonl": b'{"key": 1}\n'},
    "livecodebench/code_generation_lite": {
        f"test{number}.jsonl": b'{"question_id": "%s"}\n' % number.encode()
        for number in ("", *"2356")
    },
    "ceval/ceval-exam": {
        f"{name}/{split}-00000-of-00001.parquet": parquet(LAW)
        for name in ("law", "logic")
        for split in ("dev", "val", "test")
    },
}
NAMES = {
    "AI-ModelScope/gsm8k": "openai/gsm8k",
    "AI-ModelScope/MATH-500": "HuggingFaceH4/MATH-500",
    "opencompass/ifeval": "google/IFEval",
    "AI-ModelScope/code_generation_lite": "livecodebench/code_generation_lite",
    "evalscope/ceval": "ceval/ceval-exam",
}


def sha(data):
    return hashlib.sha256(data).hexdigest()


def git(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def hugging_face(repo, held):
    """The addresses of a repository at huggingface.co, with what is there."""
    listing = [{"type": "directory", "path": "main", "oid": "0"}]
    for path, data in held.items():
        large = {"lfs": {"oid": sha(data)}} if path.endswith(".parquet") else {}
        listing.append({"type": "file", "path": path, "oid": git(data)} | large)
        yield f"/datasets/{repo}/resolve/main/{path}", data
    yield f"/api/datasets/{repo}/tree/main?recursive=true", json.dumps(listing).encode()


def modelscope(repo, held):
    """The same at modelscope.cn."""
    place = f"/api/v1/datasets/{repo}/repo"
    listing = [{"Path": "main", "Type": "tree", "Sha256": ""}]
    for path, data in held.items():
        listing.append({"Path": path, "Type": "blob", "Sha256": sha(data)})
        yield f"{place}?Revision=master&FilePath={path}", data
    text = json.dumps({"Code": 200, "Data": {"Files": listing}}).encode()
    yield f"{place}/tree?Revision=master&Recursive=True&PageSize=500", text


BODIES = {at: body for repo, held in FILES.items() for at, body in hugging_face(repo, held)}
BODIES |= {at: body for repo, name in NAMES.items() for at, body in modelscope(repo, FILES[name])}


class Hubs(BaseHTTPRequestHandler):
    damaged = False

    def do_GET(self):
        path = unquote(self.path)
        if path not in BODIES:  # of gpqa, whose terms must be accepted
            return self.send_error(401)
        is_file = "/resolve/" in path or "FilePath" in path
        self.send_response(200)
        self.end_headers()
        self.wfile.write(BODIES[path] + b" " * (is_file and self.damaged))

    def log_message(self, *args):
        pass


@pytest.fixture(params=["huggingface", "modelscope"])
def hub(request, tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hubs)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    named = dict.fromkeys(("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"), url)
    for name, value in (
        named | {"QUANTKIT_HUB": request.param, "XDG_CACHE_HOME": tmp_path}
    ).items():
        monkeypatch.setenv(name, str(value))
    yield request.param
    server.shutdown()
    server.server_close()


def test_the_files_of_a_split_are_loaded_and_kept(hub, tmp_path, monkeypatch):
    gsm8k = find_task("gsm8k")
    read = read_rows("gsm8k", gsm8k.data, None)
    assert read.rows == GSM8K
    assert read.sha256 == sha(FILES["openai/gsm8k"]["main/test-00000-of-00001.parquet"])
    assert read.origin.endswith(f"gsm8k (test) of {hub}")
    assert read_rows("gsm8k", gsm8k.shots, None).rows == GSM8K * 2
    assert read_rows("math_500", find_task("math_500").data, None).rows[0]["answer"] == "2"
    assert read_rows("ifeval", find_task("ifeval").data, None).rows == [{"key": 1}]
    for name, files in (("live_code_bench_v5", "235"), ("live_code_bench_v6", "2356")):
        rows = read_rows(name, find_task(name).data, None).rows
        assert [row["question_id"] for row in rows] == ["", *files]
    ceval = read_rows("ceval", find_task("ceval").data, None).rows
    assert [row["file"] for row in ceval] == ["law", "logic"]
    monkeypatch.setattr(Hubs, "damaged", True)  # what is kept is not asked for again
    assert read_rows("gsm8k", gsm8k.data, None).rows == GSM8K


def test_what_is_not_as_listed_is_refused(hub, tmp_path, monkeypatch):
    source = find_task("gsm8k").data
    monkeypatch.setattr(Hubs, "damaged", True)
    with refused("checksum differs"):
        read_rows("gsm8k", source, None)
    lacking = source.model_copy(update={"hub": source.hub | {"split": "validation"}})
    with refused("has no files of"):
        read_rows("gsm8k", lacking, None)
    with refused(r"401 .*; set (HF|MODELSCOPE_API)_TOKEN to a key"):
        read_rows("gpqa_diamond", find_task("gpqa_diamond").data, None)
    for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with refused(f"cannot be downloaded: {hub} at http"):
        read_rows("gsm8k", source, None)
    monkeypatch.setenv("QUANTKIT_HUB", "else")
    with refused("use huggingface or modelscope"):
        read_rows("gsm8k", source, None)
