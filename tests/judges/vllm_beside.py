"""`quantkit serve` beside `vllm serve`: the same files, as many cards, and `quantkit bench URL` for both, one server at a time.

    python tests/judges/vllm_beside.py --vllm PYTHON --directory DIR --tp 2,4

The model has the shapes of Qwen3-8B and random weights, rounded by quantkit to W4A16 in AWQ's format. For each --tp both servers are
started with --tensor-parallel-size and --tp; all are up before the first is measured, and only one has requests. Each writes its rows
into DIRECTORY/beside.json. --steps write,run: the first writes the model, and needs a card for a minute.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from make_model import write_dense
from torch import Tensor
from vllm_server import SETTINGS
from word_tokenizer import write_word_tokenizer

from quantkit.models import find_architecture
from quantkit.quantization import quantize
from quantkit.recipe import Recipe
from quantkit.schemes import find_scheme

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
FIRST_PORT = 19100
USERS, CONTEXT = 64, 4352
CACHE = 24 * 2**30  # bytes of vLLM's on a card: other servers have memory there too


def write(directory: Path, layers: int, device: str) -> Path:
    """DIRECTORY/qwen3-8b/awq, unless it is there."""
    source, out = directory / "qwen3-8b" / "source", directory / "qwen3-8b" / "awq"
    if not (out / "config.json").exists():
        config = QWEN3_8B | {"num_hidden_layers": layers}
        write_dense(source, config, _weights(config, device), shards=8)
        write_word_tokenizer(source, config["vocab_size"])
        quantize(source, out, find_scheme("rtn-w4a16"), "awq", Recipe(scheme="rtn-w4a16"), engine="vllm", device=device)
    return out


def _weights(config: dict[str, Any], device: str) -> dict[str, Tensor]:
    architecture = find_architecture(config)
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        if row.role == "norm":
            tensors[row.name] = torch.ones(row.shape, dtype=torch.bfloat16)
        else:
            noise = torch.randn(row.shape, generator=generator, device=device)
            tensors[row.name] = (noise / row.shape[-1] ** 0.5).bfloat16().cpu()
    return tensors


def command(engine: str, python: str, path: Path, tp: int, port: int, device: str) -> list[str]:
    if engine == "vllm":
        asked = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(USERS), "--tensor-parallel-size", str(tp), "--port", str(port)]
        memory = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(CACHE)]
        return [python, "-m", "vllm.entrypoints.cli.main", "serve", str(path), "--host", "127.0.0.1", *asked, *memory]
    asked = ["--max-batch", str(USERS), "--max-model-len", str(CONTEXT), "--tp", str(tp), "--port", str(port), "--device", device]
    return [sys.executable, "-m", "quantkit", "serve", str(path), *asked]


def start(name: str, words: list[str], cards: list[int], directory: Path) -> subprocess.Popen[bytes]:
    log = (directory / f"beside-{name}.log").open("wb")
    told = {**os.environ, **SETTINGS["cuda"], "CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))}
    return subprocess.Popen(words, env=told, stdout=log, stderr=subprocess.STDOUT)


def wait(process: subprocess.Popen[bytes], url: str, seconds: float) -> None:
    """Raises RuntimeError where it does not come up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"it did not come up ({process.poll()})")


def bench(url: str, lengths: str, users: str) -> list[dict[str, Any]]:
    """What `quantkit bench` measures of it."""
    asked = ["--input-len", lengths, "--concurrency", users, "--output-len", "64", "--requests", "1", "--json"]
    done = subprocess.run([sys.executable, "-m", "quantkit", "bench", url, *asked], capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def show(tp: int, found: dict[str, Any]) -> None:
    """A line a cell, where both were measured: seconds to the first token, milliseconds a token, quantkit's in brackets over vLLM's."""
    if any(isinstance(rows, str) for rows in found.values()) or len(found) < 2:
        print(f"tp {tp}: { ({name: rows if isinstance(rows, str) else 'measured' for name, rows in found.items()}) }", flush=True)
    for ours, theirs in zip(found.get("quantkit", []), found.get("vllm", [])):
        if isinstance(ours, str) or isinstance(theirs, str):
            return
        said = [f"{name} {theirs[name]:.4g} {ours[name]:.4g} ({ours[name] / theirs[name]:.2f})" for name in ("ttft_s", "tpot_ms")]
        print(f"tp {tp} | {ours['input_len']} in | {ours['concurrency']} users | {' | '.join(said)}", flush=True)


def run(path: Path, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Rows, or why there are none, by tp and engine. Two servers that fit side by side have cards of their own."""
    servers, result = [], dict[str, dict[str, Any]]()
    for number, (tp, engine) in enumerate((tp, engine) for tp in asked.tp for engine in ("quantkit", "vllm")):
        first = tp if engine == "vllm" and 2 * tp <= asked.cards else 0
        cards, port = list(range(first, first + tp)), FIRST_PORT + number
        words = command(engine, asked.vllm, path, tp, port, asked.device)
        servers.append((tp, engine, f"http://127.0.0.1:{port}", start(f"{engine}-tp{tp}", words, cards, asked.directory)))
    try:
        for _, _, url, process in servers:
            try:
                wait(process, url, asked.wait)
            except RuntimeError as problem:
                print(f"{url}: {problem}", flush=True)
        for tp, engine, url, process in servers:
            found = result.setdefault(str(tp), {})
            try:
                wait(process, url, 1)
                found[engine] = bench(url, asked.input_len, asked.concurrency)
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                found[engine] = str(problem)
            (asked.directory / "beside.json").write_text(json.dumps(result, indent=1))
            if len(found) == 2:
                show(tp, found)
    finally:
        for *_, process in servers:
            process.terminate()
        for *_, process in servers:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=sys.executable, help="python of an environment with vLLM")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", default="write,run")
    parser.add_argument("--tp", default="2,4", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--cards", type=int, default=4)
    parser.add_argument("--input-len", default="128,4096")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--wait", type=float, default=150, help="seconds that servers may take to come up")
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    path = write(asked.directory, asked.layers, asked.device) if "write" in asked.steps else asked.directory / "qwen3-8b" / "awq"
    result = run(path, asked) if "run" in asked.steps else {}
    return int(any(isinstance(rows, str) for found in result.values() for rows in found.values()))


if __name__ == "__main__":
    sys.exit(main())
