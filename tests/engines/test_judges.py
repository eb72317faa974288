"""What the judges of tests/judges start, measure and decide by, without the engines that they
judge."""

import json
import socket
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "judges"))

import checkpoints
import judged
import middle_models
import sglang_topologies
import shape_models
import torch
import vllm_beside
import vllm_tokens
from make_model import write_dense
from vllm_beside import ends_of_gaps
from vllm_server import Server, deployed
from vllm_topologies import CASES, TOPOLOGIES, attention, compare, deployments

from quantkit.checkpoint.reader import Checkpoint
from quantkit.deploy.launch import deploy
from quantkit.evaluation.speed.measure import RequestTimes
from quantkit.models import find_architecture

SMALL = {
    "hidden_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
}
LATENT = SMALL | {"intermediate_size": 128, "q_lora_rank": 64, "num_nextn_predict_layers": 0}
MODELS = {"deepseek_v3-middle": LATENT, "qwen3_moe-middle": SMALL | {"head_dim": 64}}


def written(path, name, **changes):
    config = middle_models.MIDDLE[name] | MODELS[name] | changes
    return write_dense(path, config, middle_models.weights(config))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return written(folder / "m", "deepseek_v3-middle", num_nextn_predict_layers=1)


@pytest.mark.parametrize("name", MODELS)
def test_routers_of_middle_models_are_decided(name, tmp_path, monkeypatch):
    """Of 120 tokens, the experts of none may differ in BF16; of a random router, of some."""
    draw = torch.Generator().manual_seed(1)
    sequences = torch.randint(8, 320, (3, 40), generator=draw).tolist()

    def ties(path):
        return sum(int(one.sum()) for one in judged.routing_ties(written(path, name), sequences))

    assert ties(tmp_path / "decided") == 0
    monkeypatch.setattr(middle_models, "_ROUTER", 0.0)
    assert ties(tmp_path / "random") > 3


def test_the_tokens_of_the_checkpoint_pass_and_those_of_another_do_not(tmp_path, monkeypatch):
    """quantkit's own answers, as vLLM would give them: of AWQ, and where it read shifted zero
    points."""
    name = "llama-dense"
    monkeypatch.setattr(vllm_tokens, "CONTROLS", (name,))
    cases = vllm_tokens.cases("cpu", [name], ["awq", "shifted"])
    assert cases == [(name, "awq"), (name, "shifted")]
    prompts = judged.prompts_of(name)
    for _, format in cases:
        path, sequences = checkpoints.write(tmp_path, name, format), prompts
        for _ in range(3):
            tables = judged.log_probabilities(path, sequences)
            sequences = [[*one, int(table[-1].argmax())] for one, table in zip(sequences, tables)]
        answers = []
        for prompt, table, whole in zip(
            prompts, judged.log_probabilities(path, sequences), sequences
        ):
            top = table[len(prompt) - 1 : -1].topk(5)
            rows = zip(top.indices.tolist(), top.values.tolist())
            logprobs = [list(map(list, zip(ids, values))) for ids, values in rows]
            answers.append({"tokens": whole[len(prompt) :], "logprobs": logprobs})
        good, line = vllm_tokens.verdict(tmp_path / name, format, "vllm 1", answers, "cpu")
        assert good, line
    refused = vllm_tokens.verdict(tmp_path / name, "awq", "vllm 1", {"error": "no"}, "cpu")
    assert refused == (False, "vLLM refuses it: no")


def test_cases_have_writers():
    for device, cases in CASES.items():
        for model, format, topology in cases:
            assert topology in TOPOLOGIES, (device, topology)
            assert model in checkpoints.MODELS or model == "tiny-r1"
            assert format in (checkpoints.SOURCE, checkpoints.PLAIN, *checkpoints.FORMATS)


# --- topologies


@pytest.mark.parametrize(
    "case",
    [
        "tensor 4 1 1 1",
        "pipeline 2 2 1 2",
        "experts 1 1 4 1",
        "experts-over-boxes 1 1 4 2",
        "apart 2 1 1 2",
        "apart-twice 1 1 1 4",
        "mtp-alone 1 1 1 1",
    ],
)
def test_commands_take_four_cards(model, case):
    topology, *sizes = case.split()
    *ways, boxes = map(int, sizes)
    launches = [
        launch
        for made in deployments(model, topology, 4)
        for launch in made.launches
        if launch.role != "router"
    ]
    assert len({launch.box for launch in launches}) == len(launches) == boxes
    for launch in launches:
        ((_, words),) = launch.commands
        named = [f"--{way}-parallel-size" for way in ("tensor", "pipeline", "data")]
        found = [int(words[words.index(name) + 1]) if name in words else 1 for name in named]
        assert found == ways
    alone, apart = TOPOLOGIES[topology].devices, boxes if topology.startswith("apart") else 1
    assert TOPOLOGIES[topology].ranks(4) == (alone or 4) == ways[0] * ways[1] * ways[2] * apart


@pytest.mark.parametrize(
    ("topology", "given"), [("pipeline", False), ("experts", True), ("apart", True)]
)
def test_workers_of_boxes_in_a_pipeline_find_their_own_ports(model, tmp_path, topology, given):
    """Two workers of a box that both look for a port from VLLM_PORT on found the same one in two of
    six starts on four cards."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho from ${VLLM_PORT:-anywhere}\nexec sleep 60\n")
    program.chmod(0o755)
    made, logs = deployments(model, topology, 4), tmp_path / "log"
    server = deployed(made, 39, range(4), "cuda", str(program), logs, [])
    try:
        until, said = time.monotonic() + 30, list[str]()
        while len(said) < (1 if topology == "experts" else 2) and time.monotonic() < until:
            time.sleep(0.05)
            lines = [log.read_text().splitlines() for log in tmp_path.glob("log.[01].log")]
            said = [line for log in lines for line in log if line.startswith("from ")]
    finally:
        server.end()
    assert said
    assert [line != "from anywhere" for line in said] == [given] * len(said)


def test_a_result_says_that_its_server_was_compiled(tmp_path):
    (tmp_path / "topologies.json").write_text(
        '{"m awq tensor": {"error": "gone"}, "m awq apart-twice": {"error": "gone"}}'
    )
    for more in ("", "compiled"):
        found = compare(tmp_path, 4, "H200", "vllm 0.22.1", 1, more)
        options = [(run.options, run.ranks, run.said) for run in found]
        assert options == [(more, 4, "gone"), (f"2-of-each {more}".strip(), 4, "gone")]


def test_a_given_attention_backend_reaches_the_mtp_layer():
    assert attention("", 1) == []
    assert attention("TRITON_ATTN", 0) == ["--attention-backend", "TRITON_ATTN"]
    *model, option, said = attention("TRITON_ATTN", 1)
    assert (model, option) == (["--attention-backend", "TRITON_ATTN"], "--speculative-config")
    about = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "TRITON_ATTN"}
    assert json.loads(said) == about


def test_sglangs_printed_command_is_run_with_the_given_options(model):
    _, words = sglang_topologies.command_of(model, "PYTHON", 2, 21064, 1)
    asked = {"device": "cuda", "devices": 2, "context": 1024, "draft_length": 1}
    made = deploy(model, "sglang", layout="one-box", **asked)
    ((_, printed),) = made.launches[0].commands
    changed = {words[at] for at, (one, other) in enumerate(zip(words, printed)) if one != other}
    assert changed == {"PYTHON", "21064", "0.6"}
    assert words[len(printed) :] == [*sglang_topologies.ADDED, "--nccl-port", "21096"]
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "2"


# --- servers

# Answers /health after the second time it is asked, and /generate with the prompt's tokens, one
# more each.
ENGINE = """
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
HTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
"""


def test_answers_are_read_and_the_server_ends(tmp_path):
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = sglang_topologies.SglangServer(f"http://127.0.0.1:{port}")
    server.start([sys.executable, str(program), str(port)], {}, tmp_path / "log")
    try:
        server.wait(30)
        found = server.answer("m", [4, 5])
        assert found == {"tokens": [5, 6], "logprobs": [[[5, -0.5]], [[6, -0.5]]]}
    finally:
        server.end()
    assert server.processes[0].returncode is not None
    assert str(program) in (tmp_path / "log").read_text().splitlines()[0]


def test_a_server_that_ends_is_reported(tmp_path):
    server = Server("http://127.0.0.1:21995")
    server.start([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "log")
    with pytest.raises(RuntimeError, match="process 0 ended with 3"):
        server.wait(30)
    server.end()


# --- speed


@pytest.mark.parametrize(("name", "form"), [("qwen3-8b", "awq"), ("qwen3-30b-a3b", "bf16")])
def test_a_model_of_repeated_layers_has_all_its_tensors(name, form, tmp_path, monkeypatch):
    small = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "qwen3-30b-a3b":
        small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    monkeypatch.setitem(shape_models.SHAPES, name, shape_models.SHAPES[name] | small)
    path = shape_models.write_shape(tmp_path, name, form, 3, "cpu")
    config = Checkpoint.open(path).config
    architecture = find_architecture(config)
    rows = architecture.parameters(architecture.Config.from_dict(config))
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    there = {one.rpartition(".")[0] for one in index}
    assert {row.name.removesuffix(".weight") for row in rows} == there
    assert sum(".2." in one for one in there) > 3


def test_gaps_are_counted_while_the_long_prompt_is_computed(monkeypatch):
    one = RequestTimes(0.0, 1.0, 9.0, 8, 4, gaps=(5.0, 1.0, 2.0))
    assert list(ends_of_gaps(one)) == [(6.0, 5.0), (7.0, 1.0), (9.0, 2.0)]
    answers = {vllm_beside.ANSWERS: [one], 1: [RequestTimes(6.5, 7.5, 7.6, 8, 4)]}
    monkeypatch.setattr(vllm_beside, "requests", lambda url, tokens, users, output: answers[users])
    monkeypatch.setattr(vllm_beside.time, "sleep", lambda seconds: None)
    assert vllm_beside.gap_of("") == [{"gap_s": 2.0, "ttft_s": 1.0}]
