"""Judge: `evalscope perf` drives `quantkit serve` over loopback; its figures are held against the
server's own of the same requests.

    python tests/judges/evalscope_perf.py --evalscope .venv-evalscope/bin/evalscope        (`make test-evalscope`)

Two runs, with one and with four users. Token counts must be equal, nothing may fail, and latency,
time to first token and time per output token must agree: evalscope's are seen from outside, so they
hold the HTTP exchange too. The server's means also hold evalscope's first request, which is in none
of evalscope's: a run before them takes what only a server's first requests take.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import httpx
from serving import serve

from quantkit.checkpoint.hub import find_model

INPUT, OUTPUT = 48, 32
RUNS = ((1, 4), (4, 12))
"""Users and requests."""
MILLISECONDS, SHARE = 100.0, 0.15


def server_metrics(url):
    page = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
    return {
        name: float(value) for name, value in re.findall(r"^(\w+) ([\d.e+-]+)$", page, re.MULTILINE)
    }


def evalscope_perf(evalscope, url, users, requests, folder):
    """Its summary of one run."""
    words = (
        f"perf --model tiny-r1 --url {url}/chat/completions --api openai --dataset random "
        f"--tokenizer-path {find_model('tiny-r1')} --prefix-length 0 --min-prompt-length {INPUT} "
        f"--max-prompt-length {INPUT} --min-tokens {OUTPUT} --max-tokens {OUTPUT} "
        f"--parallel {users} --number {requests} --stream --outputs-dir {folder} --seed 0"
    )
    command = [evalscope, *words.split(), "--extra-args", '{"ignore_eos": true}']
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"evalscope perf failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    (summary,) = folder.rglob("benchmark_summary.json")
    return json.loads(summary.read_text())


def check(theirs, ours, users, requests):
    """evalscope asks once more, to see whether the server answers: that request is among ours."""
    assert (theirs["Success Requests"], theirs["Failed Requests"]) == (requests, 0), theirs
    assert theirs["Avg Output Tokens"] == OUTPUT, theirs
    assert ours["quantkit_generated_tokens_total"] == (requests + 1) * OUTPUT, ours

    def mean(name):
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evalscope", required=True)
    options = parser.parse_args()
    with serve("tiny-r1", "tiny-r1") as url:
        with tempfile.TemporaryDirectory() as folder:
            evalscope_perf(options.evalscope, url, *RUNS[0], Path(folder))
        for users, requests in RUNS:
            before = server_metrics(url)
            with tempfile.TemporaryDirectory() as folder:
                theirs = evalscope_perf(options.evalscope, url, users, requests, Path(folder))
            after = server_metrics(url)
            ours = {key: value - before.get(key, 0) for key, value in after.items()}
            check(theirs, ours, users, requests)


if __name__ == "__main__":
    main()
