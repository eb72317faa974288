"""`quantkit serve` beside `vllm serve`: the same files, as many cards, and the same requests for
both, one engine after the other.

    python tests/judges/vllm_beside.py --vllm PYTHON --directory DIR --cases
    qwen3-8b:awq:1,qwen3-8b:bf16:1 [--seconds 200]

A case is a model of shape_models.py, a format, and on how many cards (--tensor-parallel-size and
--tp). The servers of an engine, one for each case, are up before any is measured, and only one has
requests; they have ended when those of the other engine begin, so that each has the card for
itself. --together: those of both engines are up at once, where memory has room for them, and a cell
is measured at one and then at the other. A cell is so many users who each send a prompt of so many
tokens at once and get 64; its figures are those of `quantkit bench`, medians of its rounds. `gap`:
while 32 users get answers, a prompt of 16,000 tokens arrives; the largest time between two tokens
of an answer.

What servers say is printed as it comes. A server that is not up in time, or does not end a cell, is
ended by a signal that leaves the stacks of ours in its log; one of ours is then started once more.

Cells come in the order of CELLS, of all cases in turn, until the time of an engine is up. Rows are
kept in DIRECTORY/beside.json, and what is there is not measured again. --traces: with when each
request was sent and had its first token and every later one, in ms.
--steps write,run: the first writes the models, on --device.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from shape_models import FORMATS, SHAPES, write_shape
from vllm_server import SETTINGS

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.speed.endpoint import EndpointTarget
from quantkit.evaluation.speed.measure import RequestTimes, Workload, summarize

PEER, OURS = "vllm", "quantkit"
ENGINES = [OURS, PEER]
CELLS = "4096x32,1024x32,gap,1024x64,128x64,128x8,128x32,4096x8,1024x8,1024x1,4096x1,128x1,16000x1,16000x8,4096x64,16000x32,16000x64"
FIRST_PORT = 19100
USERS, CONTEXT, OUTPUT = 64, 16640, 64
WARM = ((128, 64), (1024, 8), (4096, 1), (16000, 1))
"""Tokens and users of rounds that are not counted: what a server compiles for its first requests is
no figure of any cell."""
PEER_WARM = tuple(
    (tokens - odd, 1) for tokens in (256, 512, 1024, 1536, 2048, 3072, 4096, 8192) for odd in (0, 1)
)
"""More of them, one after the other, for experts at vLLM: their Triton kernel is compiled for every
size of its table, and again where 16 does not divide the number of tokens. Some of its rounds took
ten times as long as others where they were not made."""
WARM_S = 90.0
ROUNDS, LONG_S = 3, 1.6
"""Rounds of a cell, and after how many seconds of them, unless --long says so, no further one
begins."""
ANSWERS, ANSWER_INPUT, ANSWER_OUTPUT, ARRIVING = 32, 1024, 512, 16000
LEAST_BOUND_S = 20.0
"""How long a cell may take at least, before its server is ended and, if it is ours, started
again."""
ENDING_S, LINE = 10.0, 200
"""Seconds that servers have to end; characters of a line of theirs that is printed."""
KEYS = ("ttft_s", "tpot_ms", "system_tps")
Rows = list[dict[str, Any]]


@dataclass
class Case:
    """A model in a format on some cards, and its servers. again: whether the one of now was started
    a second time."""

    model: str
    form: str
    tp: int
    servers: dict[str, "Server"] = field(default_factory=dict)
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}:{self.form}:{self.tp}"


@dataclass
class Server:
    """One engine's process. `failed`: why it did not come up. answered: whether it ever did."""

    url: str
    process: subprocess.Popen[bytes]
    began: float
    failed: str = ""
    answered: bool = False

    def up(self) -> bool:
        if self.process.poll() is not None:
            self.failed = f"it ended with {self.process.returncode}"
        if self.failed or self.answered:
            return not self.failed
        with suppress(httpx.TransportError):
            self.answered = httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return self.answered


def engines(asked: argparse.Namespace) -> tuple[str, ...]:
    more = [f"{OURS}-{asked.chunk_tokens}"] if asked.chunk_tokens else []
    return tuple(
        engine for engine in (OURS, *more, PEER) if engine.partition("-")[0] in asked.engines
    )


def command(engine: str, path: Path, case: Case, port: int, asked: argparse.Namespace) -> list[str]:
    if engine == PEER:
        words = [
            "--max-model-len",
            str(CONTEXT),
            "--max-num-seqs",
            str(USERS),
            "--tensor-parallel-size",
            str(case.tp),
        ]
        if asked.cache_tokens:
            words += [
                "--gpu-memory-utilization",
                "0.1",
                "--kv-cache-memory-bytes",
                str(asked.cache_tokens * token_bytes(path) // case.tp),
            ]
        program = [asked.vllm, "-m", "vllm.entrypoints.cli.main"]
    else:
        words = [
            "--max-model-len",
            str(CONTEXT),
            "--max-batch",
            str(USERS),
            "--tp",
            str(case.tp),
            "--device",
            asked.device,
        ]
        words += ["--cache-tokens", str(asked.cache_tokens)] if asked.cache_tokens else []
        words += ["--chunk-tokens", str(asked.chunk_tokens)] if engine != OURS else []
        program = [sys.executable, "-X", "faulthandler", "-m", "quantkit"]
    return [*program, "serve", str(path), "--host", "127.0.0.1", "--port", str(port), *words]


def token_bytes(path: Path) -> int:
    """Of keys and values of a token in 16 bits, on all cards together."""
    config = json.loads((path / "config.json").read_text())
    return int(
        config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * 2
    )


def start_one(case: Case, engine: str, port: int, asked: argparse.Namespace) -> Server:
    told = {**os.environ, **SETTINGS["cuda"], "PYTHONUNBUFFERED": "1"}
    words = command(engine, asked.directory / case.model / case.form, case, port, asked)
    process = subprocess.Popen(
        words, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    log = asked.directory / f"beside-{case.name.replace(':', '-')}-{engine}.log"
    with log.open("a") as opened:
        opened.write(f"$ {' '.join(words)}\n")
    threading.Thread(target=tell, args=(process, f"{case.name} {engine}", log), daemon=True).start()
    return Server(f"http://127.0.0.1:{port}", process, time.monotonic())


def tell(process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    """Print and keep what a server says, as it comes; bars of progress are only kept."""
    began = time.monotonic()
    assert process.stdout is not None
    with log.open("ab", buffering=0) as to:
        for line in process.stdout:
            to.write(line)
            if b"it/s]" not in line and b"s/it]" not in line:
                print(
                    f"{time.monotonic() - began:6.1f} s  {name} | "
                    f"{line.decode(errors='replace').rstrip()[:LINE]}",
                    flush=True,
                )


def await_servers(cases: list[Case], engine: str, asked: argparse.Namespace) -> None:
    """Until each is up or has failed, --wait seconds after it began."""
    waiting = list(cases)
    while waiting:
        for case in list(waiting):
            server = case.servers[engine]
            if server.up() or server.failed or time.monotonic() - server.began > asked.wait:
                waiting.remove(case)
                if not (server.up() or server.failed):
                    give_up(server, "it did not come up in time")
                print(
                    f"{case.name} {engine}: "
                    f"{server.failed or f'up after {time.monotonic() - server.began:.0f} s'}",
                    flush=True,
                )
        time.sleep(0.3)


def give_up(server: Server, why: str) -> None:
    """The log of ours then says where it stood; and the card is those servers' that are up."""
    server.failed = why
    server.process.send_signal(signal.SIGABRT)


def begin(cases: list[Case], group: tuple[str, ...], asked: argparse.Namespace) -> None:
    """The servers of these engines, --head-start seconds apart; until they are up, or have
    failed."""
    for place, engine in sorted(enumerate(group), reverse=asked.head_start < 0):
        for number, case in enumerate(cases):
            case.again = False
            case.servers[engine] = start_one(
                case, engine, asked.first_port + place * len(cases) + number, asked
            )
        time.sleep(abs(asked.head_start) if len(group) > 1 else 0)
    for engine in group:
        await_servers(cases, engine, asked)
        start_again(cases, engine, asked)


def start_again(cases: list[Case], engine: str, asked: argparse.Namespace) -> None:
    """Those of ours that were given up, once."""
    if engine == PEER:
        return
    again = [
        case
        for case in cases
        if case.servers[engine].process.poll() != 0
        and case.servers[engine].failed
        and not case.again
    ]
    for case in again:
        stop([case.servers[engine].process])
        case.again = True
        case.servers[engine] = start_one(
            case, engine, int(case.servers[engine].url.rpartition(":")[2]), asked
        )
    await_servers(again, engine, asked)


def stop(processes: list["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + ENDING_S
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def requests(url: str, tokens: int, users: int, output: int) -> list[RequestTimes]:
    """Raises QuantkitError where one of them failed."""
    times = list(EndpointTarget(url).run(Workload(tokens, output, users, users)))
    errors = [one.error for one in times if one.error]
    if errors:
        raise QuantkitError(
            f"{len(errors)} of {users} requests of {tokens} tokens failed: {errors[0]}",
            "see the server's log",
        )
    return times


def cell_of(url: str, cell: str, asked: argparse.Namespace) -> Rows:
    """Of its rounds."""
    tokens, users = (int(part) for part in cell.split("x"))
    rows, began = Rows(), time.monotonic()
    while len(rows) < ROUNDS and (not rows or time.monotonic() - began < asked.long):
        times = requests(url, tokens, users, OUTPUT)
        row = summarize(times, tokens, users).to_json()
        rows.append(
            {key: row[key] for key in (*KEYS, "latency_s")}
            | ({"trace_ms": trace_of(times)} if asked.traces else {})
        )
    return rows


def trace_of(times: list[RequestTimes]) -> list[str]:
    """Of each request, from when the first was sent: sent, first token; then the gaps after it."""
    began = min(one.sent for one in times)
    return [
        " ".join(f"{1e3 * at:.1f}" for at in (one.sent - began, one.first_token - began, *one.gaps))
        for one in times
    ]


def gap_of(url: str) -> Rows:
    """The largest gap of running answers while the long prompt is computed, and its first token,
    seconds."""
    beginning = max(one.ttft_s for one in requests(url, ANSWER_INPUT, ANSWERS, 1))
    with ThreadPoolExecutor() as threads:
        running = threads.submit(requests, url, ANSWER_INPUT, ANSWERS, ANSWER_OUTPUT)
        time.sleep(beginning + 0.5)
        arrived = requests(url, ARRIVING, 1, 4)[0]
        answers = running.result()
    if any(
        one.first_token > arrived.sent or one.last_token < arrived.first_token for one in answers
    ):
        raise QuantkitError(
            "the answers did not run as long as the prompt was computed", "raise ANSWER_OUTPUT"
        )
    largest = max(
        gap
        for one in answers
        for end, gap in ends_of_gaps(one)
        if arrived.sent <= end and end - gap <= arrived.first_token
    )
    return [{"gap_s": largest, "ttft_s": arrived.ttft_s}]


def ends_of_gaps(one: RequestTimes) -> Iterator[tuple[float, float]]:
    """When each gap between two pieces of an answer ended, and how long it was."""
    at = one.first_token
    for gap in one.gaps:
        at += gap
        yield at, gap


def expected_s(cell: str) -> float:
    """Of a cell on one server, generously."""
    if cell == "gap":
        return 8.0
    tokens, users = (int(part) for part in cell.split("x"))
    return max(tokens * users / 25_000 + 1.0, LONG_S + 1)


def warm(url: str, rounds: tuple[tuple[int, int], ...]) -> None:
    for tokens, users in rounds:
        requests(url, tokens, users, 8)


def measure(
    cases: list[Case],
    group: tuple[str, ...],
    asked: argparse.Namespace,
    until: float,
    found: dict[str, Any],
) -> None:
    """Cell after cell of every case into `found`, which is written after each; what failed is told,
    and is not there."""
    for case in cases:
        for engine in group:
            rounds = (
                (*WARM, *PEER_WARM)
                if engine == PEER and "num_experts" in SHAPES[case.model]
                else WARM
            )
            attempt(
                f"{case.name} {engine}", case.servers[engine], partial(warm, rounds=rounds), WARM_S
            )
    for cell in asked.cells.split(","):
        for case in cases:
            rows = found.setdefault(case.name, {}).setdefault(cell, {})
            missing = [engine for engine in group if engine not in rows]
            if time.monotonic() + len(missing) * expected_s(cell) < until:
                for engine in missing:
                    measure_one(case, engine, case.servers[engine], cell, rows, asked)
            (asked.directory / "beside.json").write_text(json.dumps(found, indent=1))
            for line in told(case.name, cell, rows):
                print(line, flush=True)
        for engine in group:
            start_again(cases, engine, asked)


def measure_one(
    case: Case,
    name: str,
    server: Server,
    cell: str,
    rows: dict[str, Rows],
    asked: argparse.Namespace,
) -> None:
    bound = max(LEAST_BOUND_S, 2 * expected_s(cell) + asked.long)
    took = attempt(
        f"{case.name} {name} {cell}",
        server,
        gap_of if cell == "gap" else partial(cell_of, cell=cell, asked=asked),
        bound,
    )
    rows |= {name: took} if took else {}


def attempt(
    name: str, server: Server, measured: Callable[[str], Rows | None], most_s: float = LEAST_BOUND_S
) -> Rows | None:
    """Nothing where the server is not up, or what was asked of it failed, or did not end in
    `most_s`: then its log says where it stands."""
    if server.failed:
        return None
    answer: Future[Rows | None] = Future()
    threading.Thread(target=answered, args=(answer, measured, server.url), daemon=True).start()
    try:
        return answer.result(most_s)
    except (QuantkitError, httpx.HTTPError) as problem:
        print(f"{name}: {problem}", flush=True)
    except TimeoutError:
        give_up(server, f"it did not end an answer in {most_s:.0f} s")
        print(f"{name}: {server.failed}", flush=True)
    return None


def answered(
    answer: "Future[Rows | None]", measured: Callable[[str], Rows | None], url: str
) -> None:
    try:
        answer.set_result(measured(url))
    except BaseException as problem:
        answer.set_exception(problem)


def told(name: str, cell: str, rows: dict[str, Rows]) -> list[str]:
    """Lines of a cell: vLLM's figure, ours, and ours over theirs, of rates theirs over ours, so
    that 1 or less is what is asked."""
    if PEER not in rows or len(rows) == 1:
        return [f"{name} | {cell} | {', '.join(rows) or 'nothing'} measured"]
    lines = []
    for engine in rows:
        said = [name, cell, engine]
        for key in KEYS if cell != "gap" else ("gap_s", "ttft_s"):
            theirs, ours = (
                statistics.median(row[key] for row in rows[one]) for one in (PEER, engine)
            )
            said.append(
                f"{key} {theirs:.4g} {ours:.4g} "
                f"({theirs / ours if key == 'system_tps' else ours / theirs:.2f})"
            )
        lines += [" | ".join(said)] if engine != PEER else []
    return lines


def run(cases: list[Case], asked: argparse.Namespace) -> int:
    kept = asked.directory / "beside.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for group in [engines(asked)] if asked.together else [(engine,) for engine in engines(asked)]:
        until = time.monotonic() + asked.seconds
        try:
            begin(cases, group, asked)
            measure(cases, group, asked, until, found)
        finally:
            stop(
                [
                    case.servers[engine].process
                    for case in cases
                    for engine in group
                    if engine in case.servers
                ]
            )
    return int(
        any(
            not set(rows) >= set(engines(asked))
            for case in cases
            for rows in found.get(case.name, {"": {}}).values()
        )
    )


def case_of(text: str) -> Case:
    model, form, tp = text.split(":")
    if model not in SHAPES or form not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"{text} is none of {', '.join(SHAPES)} with {' or '.join(FORMATS)} and a number of "
            "cards"
        )
    return Case(model, form, int(tp))


def engines_of(text: str) -> list[str]:
    return [engine for engine in ENGINES if engine in text.split(",")]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended then, too
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default=sys.executable, help="python of an environment with vLLM")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", default="write,run")
    parser.add_argument(
        "--cases",
        default="qwen3-8b:awq:1",
        type=lambda text: [case_of(part) for part in text.split(",")],
    )
    parser.add_argument("--cells", default=CELLS, help="TOKENSxUSERS and gap")
    parser.add_argument(
        "--engines",
        type=engines_of,
        default=ENGINES,
        help="one of them alone; the rows of the other are kept",
    )
    parser.add_argument(
        "--cache-tokens",
        type=int,
        default=0,
        help="of each server, where several share a card; what fits otherwise",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="servers of both engines at once; see --cache-tokens",
    )
    parser.add_argument(
        "--head-start",
        type=float,
        default=0,
        help="seconds, with --together, of ours before vLLM's; after it where negative",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=0,
        help="of another server of ours, beside the one that chooses",
    )
    parser.add_argument(
        "--long",
        type=float,
        default=LONG_S,
        help=f"seconds of a cell's rounds after which none of its {ROUNDS} begins",
    )
    parser.add_argument(
        "--traces", action="store_true", help="keep the times of every token of every request"
    )
    parser.add_argument("--layers", type=int, default=0, help="of the models; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--wait", type=float, default=150, help="seconds that servers may take to come up"
    )
    parser.add_argument(
        "--first-port",
        type=int,
        default=FIRST_PORT,
        help="of the servers; another for a second run beside this one",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600,
        help="of an engine, after which no further cell of it is measured",
    )
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    if "write" in asked.steps:
        for case in asked.cases:
            write_shape(asked.directory, case.model, case.form, asked.layers, asked.device)
    if "run" not in asked.steps:
        return 0
    written = [
        case
        for case in asked.cases
        if (asked.directory / case.model / case.form / "config.json").exists()
    ]
    for case in asked.cases:
        if case not in written:
            print(f"{case.name}: not written", flush=True)
    return run(written, asked) or int(written != asked.cases)


if __name__ == "__main__":
    sys.exit(main())
