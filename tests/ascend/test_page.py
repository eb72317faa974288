"""Every command of docs/ascend.md, in its order, on the double of torch_npu: a small model stands
where the page has DeepSeek-R1, one rank where it has eight, the CPU where it has an NPU."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import make_model
import pytest
from ascend import npu_double
from commands import command

ROOT = Path(__file__).parents[2]
ON_THE_DOUBLE = (sys.executable, str(Path(__file__).with_name("on_the_double.py")))
BLOCKS = re.findall(r"(?ms)^```\n(.*?)^```", (ROOT / "docs/ascend.md").read_text())
LINES = [line for block in BLOCKS for line in block.splitlines()]
CHANGED = {
    "--device npu": "--device cpu",
    "--tp 8": "--tp 1",
    "--max-model-len 4096": "--max-model-len 512",
    "--input-len 128,1024 --concurrency 1,8 --output-len 64": "--input-len 32 --concurrency 1,2 "
    "--output-len 8 --requests 1",
    "--input-len 128 --concurrency 1 --output-len 16": "--input-len 16 --concurrency 1 "
    "--output-len 4 --requests 1",
}
ADDED = {"quantize": "--samples 2 --seq-len 64", "serve": "--port {port}"}


def changed(line, port):
    for ours, theirs in CHANGED.items():
        line = line.replace(ours, theirs)
    line = line.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("NAME", "R1-awq")
    words = shlex.split(line.partition(" > ")[0])
    return words + ADDED.get(words[1], "").format(port=port).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run: DeepSeek-R1-0528 as it is published, with small sizes that two
    boxes of eight can share."""
    made = tmp_path_factory.mktemp("page")
    config = make_model.tiny_config(num_attention_heads=16, n_routed_experts=16)
    make_model.write_fp8(made / "DeepSeek-R1-0528", config, make_model.random_tensors(config))
    return made


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def server(folder):
    """The page's own server of quantkit, on the double; its port."""
    (folder / "R1-awq").symlink_to("R1-w4")
    port = free_port()
    (line,) = (one for one in LINES if one.startswith("quantkit serve"))
    path = [ROOT / "tests", ROOT / "tests/support", ROOT, ROOT / "kernels"]
    process = subprocess.Popen(
        [*ON_THE_DOUBLE, "-m", *changed(line, port)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        start_new_session=True,
    )
    try:
        for _ in range(1200):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models").close()
                break
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def test_the_page_is_short_and_names_the_kit():
    text = (ROOT / "docs/ascend.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "make acceptance-npu" in text
    assert all(line.startswith(("quantkit ", "curl ")) for line in LINES)


def test_every_command(folder, monkeypatch, request):
    monkeypatch.chdir(folder)
    port, asked = 0, 0
    with npu_double.installed() as called:
        for line in LINES:
            if line.startswith("quantkit serve"):
                port = request.getfixturevalue("server")
                continue
            words = changed(line, port)
            if words[0] == "curl":
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout)["object"] in (
                    "list",
                    "chat.completion",
                    "text_completion",
                )
                asked += 1
                continue
            if "--check" in words:  # of every operator in tests/ascend/test_check.py
                continue
            answer = command(*words[1:])
            assert answer.code == 0, (line, answer.err)
            if "--json" in words:
                assert answer.json
    assert asked == 3
    assert "npu_fused_infer_attention_score_v2" in called, "the double answered"
