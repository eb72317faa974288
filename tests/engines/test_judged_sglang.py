"""What tests/judges/sglang_topologies.py starts and reads: the printed command, and answers in
SGLang's shape."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from make_model import write_dense

sys.path.insert(0, str(Path(__file__).parents[1] / "judges"))

import middle_models
from sglang_topologies import ADDED, SglangServer, command_of

from quantkit.deploy.launch import deploy

# Answers /health after the second time it is asked, and /generate with the prompt's tokens, one
# more each.
STANDS_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
asked = []
class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200 if len(asked) > 2 else 503)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"].startswith("Bearer ")
        tokens = [token + 1 for token in body["input_ids"]]
        one = [[-0.5, token, None] for token in tokens]
        meta = {"output_token_logprobs": one, "output_top_logprobs": [[top] for top in one]}
        said = json.dumps({"meta_info": meta}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Engine).serve_forever()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_attention_heads": 2,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 2,
    }
    config = (
        middle_models.MIDDLE["deepseek_v3-middle"]
        | sizes
        | {"intermediate_size": 128, "q_lora_rank": 64, "num_nextn_predict_layers": 1}
    )
    return write_dense(
        tmp_path_factory.mktemp("model") / "m", config, middle_models.weights(config)
    )


def test_the_printed_command_is_run_with_the_given_options(model: Path) -> None:
    _, words = command_of(model, "PYTHON", 2, 21064, 1)
    ((_, printed),) = (
        deploy(
            model,
            "sglang",
            layout="one-box",
            device="cuda",
            devices=2,
            context=1024,
            draft_length=1,
        )
        .launches[0]
        .commands
    )
    changed = {words[at] for at, (one, other) in enumerate(zip(words, printed)) if one != other}
    assert changed == {"PYTHON", "21064", "0.6"}
    assert tuple(words[len(printed) :]) == (*ADDED, "--nccl-port", "21096")
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "2"


def test_answers_are_read_and_the_server_ends(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(STANDS_IN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = SglangServer(
        [sys.executable, str(program), "--port", str(port)], {}, port, tmp_path / "log"
    )
    try:
        server.wait(30)
        assert server.answer("m", [4, 5]) == {
            "tokens": [5, 6],
            "logprobs": [[[5, -0.5]], [[6, -0.5]]],
        }
    finally:
        server.end()
    assert server.process.returncode == -9
    assert json.dumps(str(program))[1:-1] in (tmp_path / "log").read_text().splitlines()[0]


def test_a_server_that_ends_is_reported(tmp_path: Path) -> None:
    server = SglangServer(
        [sys.executable, "-c", "raise SystemExit(3)"], {}, 21995, tmp_path / "log"
    )
    with pytest.raises(RuntimeError, match="it ended with 3"):
        server.wait(30)
    server.end()
