"""Load curves of the commands that `quantkit deploy` prints: latency at rising request rates, until
it passes a limit.

    python tests/judges/load_curves.py --vllm PYTHON --directory DIR --cards 4

The model is one that vllm_topologies.py wrote in DIRECTORY, with a tokenizer of whole words. All
servers are started beside each other on the same cards, with their graphs, and measured one after
the other, each by as many clients as it takes: a client is what `quantkit bench URL --request-rate`
runs. The requests of a rate arrive for --per-rate seconds (Poisson). Then a process of each server
is killed while streams run (dead_worker.py): of its ranks the second, or of its servers for decode
the last. Writes DIRECTORY/load-curves.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from dead_worker import observed
from vllm_server import HEADERS, KEY, Server, deployed
from vllm_topologies import TOPOLOGIES, deployments
from word_tokenizer import with_words

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.speed.endpoint import EndpointTarget
from quantkit.evaluation.speed.measure import RequestTimes, Workload, summarize

CLIENTS = 8
# requests/s: few clients, for the last of many ends late, and what is answered a second counts
# until then
RATE_OF_A_CLIENT = 32.0
USERS = 1024  # requests that may be open at a time
FEWEST = 32  # requests of a rate
# Several servers share a card, and none needs much of it.
MEMORY = f"--gpu-memory-utilization 0.05 --kv-cache-memory-bytes {2**33} --max-num-seqs 256".split()
# Whose death is looked at: by its title, among all processes of the server or of the one with that
# number.
KILLED = {
    "tensor": ("VLLM::Worker_TP1", None),
    "pipeline": ("VLLM::Worker_PP1", None),
    "experts": ("VLLM::EngineCore_DP1", None),
    "apart": ("VLLM::EngineCore", 1),
    "apart-twice": ("VLLM::EngineCore", 3),
}
COLUMNS = ("topology", "offered_rate", "request_rate")
COLUMNS += ("ttft_s_p50", "ttft_s_p95", "tpot_ms_p50", "tpot_ms_p95", "system_tps", "failed")


def ask(url: str, model: str, work: Workload) -> list[RequestTimes]:
    """One client's requests."""
    return list(EndpointTarget(url, model, api_key=KEY).run(work))


def measured(
    pool: Executor,
    url: str,
    model: str,
    lengths: tuple[int, int],
    rate: float | None,
    requests: int,
) -> dict[str, Any]:
    """One row: `requests` of (input, output) tokens at `rate` in all, or without one as fast as
    USERS / CLIENTS users ask."""
    clients = CLIENTS if rate is None else min(CLIENTS, max(round(rate / RATE_OF_A_CLIENT), 1))
    share, users = rate and rate / clients, USERS // clients
    works = [
        Workload(*lengths, requests // clients, users, round((rate or 0) * 100) + client, share)
        for client in range(clients)
    ]
    times = [
        one
        for client in [pool.submit(ask, url, model, work) for work in works]
        for one in client.result()
    ]
    row = summarize(times, lengths[0], USERS, rate=rate).to_json()
    good = [one for one in times if one.error is None]
    series = {
        "ttft_s": [one.ttft_s for one in good],
        "tpot_ms": [one.tpot_ms for one in good if one.tpot_ms is not None],
    }
    for name, values in series.items():
        row |= {
            f"{name}_p{percent}": round(float(np.percentile(values, percent)), 4)
            for percent in (50, 95)
            if values
        }
    return row


def curve(
    pool: Executor, url: str, model: str, asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row a rate; the last is the first that passes a limit or loses a request."""
    lengths = (asked.input_len, asked.output_len)
    measured(pool, url, model, lengths, None, FEWEST)  # warms up
    until = time.monotonic() + asked.seconds
    for rate in asked.rates:
        if time.monotonic() > until:
            break
        row = measured(pool, url, model, lengths, rate, max(FEWEST, round(rate * asked.per_rate)))
        yield row
        if row["failed"] or row["ttft_s_p95"] > asked.ttft or row["tpot_ms_p95"] > asked.tpot:
            break


def killed(name: str, server: Server, model: str) -> dict[str, Any]:
    """What clients see when one process dies, by dead_worker.py."""
    title, number = KILLED[name]
    found = server.find(title, number)
    seen = observed(server.url, HEADERS, model, found, 12, tokens=900)
    ended = [
        number for number, process in enumerate(server.processes) if process.poll() is not None
    ]
    return {"killed": title} | seen | {"commands that ended": ended, "of": len(server.processes)}


def told(name: str, row: dict[str, Any]) -> str:
    return " ".join(
        f"{name if column == 'topology' else _short(row.get(column)):>18}" for column in COLUMNS
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def start(path: Path, asked: argparse.Namespace, names: Sequence[str]) -> dict[str, Server]:
    more = [*MEMORY, *(["--enforce-eager"] if asked.eager else [])]
    cards, logs = range(asked.cards), asked.directory
    return {
        name: deployed(
            deployments(path, name, asked.cards),
            40 + number,
            cards,
            "cuda",
            asked.vllm,
            logs / f"load-{name}",
            more,
        )
        for number, name in enumerate(names)
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vllm", default=sys.executable, help="python of an environment with vLLM")
    add("--directory", type=Path, required=True)
    add("--model", default="deepseek_v3-middle/awq", help="of DIRECTORY")
    add("--cards", type=int, default=4)
    add("--topologies", default="tensor,experts,apart,apart-twice", help=", ".join(TOPOLOGIES))
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=64)
    add("--rates", default="4,16,32,64,128,256,512", help="requests/s")
    add("--per-rate", type=float, default=3, help="seconds that requests of a rate arrive for")
    add("--ttft", type=float, default=1.0, help="limit in seconds, of 95 %% of the requests")
    add("--tpot", type=float, default=50.0, help="limit in milliseconds, likewise")
    add("--seconds", type=float, default=30, help="after which a curve begins no further rate")
    add("--wait", type=float, default=150, help="seconds that servers may take to come up")
    add("--eager", action="store_true")
    asked = parser.parse_args()
    asked.rates = [float(rate) for rate in asked.rates.split(",")]
    path = with_words(
        asked.directory / asked.model, asked.directory / "words" / Path(asked.model).name
    )
    result: dict[str, Any] = {
        "model": asked.model,
        "input_len": asked.input_len,
        "output_len": asked.output_len,
        "curves": {},
        "failed": {},
        "dead": {},
    }
    servers = start(path, asked, asked.topologies.split(","))
    print(told("topology", {column: column for column in COLUMNS}), flush=True)

    def keep() -> None:
        (asked.directory / "load-curves.json").write_text(json.dumps(result, indent=1))

    try:
        with ProcessPoolExecutor(CLIENTS, get_context("spawn")) as pool:
            for name, server in servers.items():
                rows = result["curves"][name] = []
                try:
                    server.wait(asked.wait)
                    for row in curve(pool, server.url, path.name, asked):
                        rows.append(row)
                        print(told(name, row), flush=True)
                        keep()
                except (RuntimeError, OSError, QuantkitError, httpx.HTTPError) as problem:
                    result["failed"][name] = f"{type(problem).__name__}: {problem}"
                    print(f"{name}: {problem}", flush=True)
                    keep()
        serving = [name for name in servers if name not in result["failed"]]
        with ThreadPoolExecutor(len(servers)) as threads:
            for name, waited in [
                (name, threads.submit(killed, name, servers[name], path.name)) for name in serving
            ]:
                try:
                    result["dead"][name] = waited.result()
                except (OSError, httpx.HTTPError) as problem:
                    result["dead"][name] = f"{type(problem).__name__}: {problem}"
                print(f"{name}: {json.dumps(result['dead'][name])}", flush=True)
                keep()
    finally:
        for server in servers.values():
            server.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
