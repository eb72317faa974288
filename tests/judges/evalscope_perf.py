"""Judge: `evalscope perf` drives `quantkit serve` over loopback; its figures are held against the
server's own of the same requests.

    python tests/judges/evalscope_perf.py --evalscope .venv-evalscope/bin/evalscope        (`make test-evalscope`)

Two runs, with one and with four users. Token counts must be equal, nothing may fail, and latency,
time to first token and time per output
token must agree: evalscope's are seen from outside, so they hold the HTTP exchange too.
"""

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from quantkit.checkpoint.hub import find_model

INPUT, OUTPUT = 48, 32
RUNS = ((1, 4), (4, 12))
"""Users and requests."""
MILLISECONDS, SHARE = 100.0, 0.15


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "quantkit",
        "serve",
        "tiny-r1",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--max-batch",
        "4",
    ]
    server = subprocess.Popen([*command, "--max-model-len", "512", "--served-name", "tiny-r1"])
    until = time.monotonic() + 120
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return server
        except httpx.HTTPError:
            time.sleep(0.3)
    server.kill()
    raise SystemExit("the server did not come up")


def server_metrics(port: int) -> dict[str, float]:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return {
        name: float(value) for name, value in re.findall(r"^(\w+) ([\d.e+-]+)$", page, re.MULTILINE)
    }


def evalscope_perf(
    evalscope: str, port: int, users: int, requests: int, folder: Path
) -> dict[str, Any]:
    """Its summary of one run."""
    command = [
        evalscope,
        "perf",
        "--model",
        "tiny-r1",
        "--url",
        f"http://127.0.0.1:{port}/v1/chat/completions",
        "--api",
        "openai",
    ]
    command += [
        "--dataset",
        "random",
        "--tokenizer-path",
        str(find_model("tiny-r1")),
        "--prefix-length",
        "0",
    ]
    command += [
        "--min-prompt-length",
        str(INPUT),
        "--max-prompt-length",
        str(INPUT),
        "--min-tokens",
        str(OUTPUT),
        "--max-tokens",
        str(OUTPUT),
    ]
    command += [
        "--parallel",
        str(users),
        "--number",
        str(requests),
        "--extra-args",
        '{"ignore_eos": true}',
        "--stream",
    ]
    command += ["--outputs-dir", str(folder), "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"evalscope perf failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    (summary,) = folder.rglob("benchmark_summary.json")
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def check(theirs: dict[str, Any], ours: dict[str, float], users: int, requests: int) -> None:
    """evalscope asks once more, to see whether the server answers: that request is among ours."""
    assert (theirs["Success Requests"], theirs["Failed Requests"]) == (requests, 0), theirs
    assert theirs["Avg Output Tokens"] == OUTPUT, theirs
    assert ours["quantkit_generated_tokens_total"] == (requests + 1) * OUTPUT, ours

    def mean(name: str) -> float:
        return 1e3 * ours[f"quantkit_{name}_seconds_sum"] / ours[f"quantkit_{name}_seconds_count"]

    pairs = {
        "latency": (1e3 * theirs["Avg Latency (s)"], mean("request_duration"), MILLISECONDS),
        "time to first token": (theirs["Avg TTFT (ms)"], mean("time_to_first_token"), MILLISECONDS),
        "time per output token": (
            theirs["Avg TPOT (ms)"],
            mean("time_per_output_token"),
            MILLISECONDS / OUTPUT,
        ),
    }
    for name, (seen, served, slack) in pairs.items():
        print(
            f"{users} users: {name} {seen:.1f} ms by evalscope, {served:.1f} ms by the server",
            flush=True,
        )
        assert abs(seen - served) <= slack + SHARE * seen, name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evalscope", required=True)
    options = parser.parse_args()
    port = free_port()
    server = start_server(port)
    try:
        for users, requests in RUNS:
            before = server_metrics(port)
            with tempfile.TemporaryDirectory() as folder:
                theirs = evalscope_perf(options.evalscope, port, users, requests, Path(folder))
            after = server_metrics(port)
            check(
                theirs,
                {key: value - before.get(key, 0) for key, value in after.items()},
                users,
                requests,
            )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


if __name__ == "__main__":
    main()
