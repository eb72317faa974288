"""`quantkit serve` compared with `vllm serve`: the same files, as many cards, and the same requests
for both, one engine after the other.

    python benchmarks/vllm_beside.py --vllm PYTHON --directory DIR --cases qwen3-8b:awq:1,qwen3-8b:bf16:1 [--seconds 200]

A case is a model of shape_models.py, a format, and on how many cards (--tensor-parallel-size and
--tp). The servers of an engine, one for each case, are up before any is measured, and only one has
requests; they have ended when those of the other engine begin, so that each has the card for
itself. A cell is so many users who each send a prompt of so many tokens at once and get 64; its
figures are those of `quantkit bench`, medians of its rounds. `gap`: while 32 users get answers, a
prompt of 16,000 tokens arrives; the largest time between two tokens of an answer.

Cells come in the order of CELLS, of all cases in turn, until the time of an engine is up. Rows are
kept in DIRECTORY/beside.json, and what is there is not measured again. A server that does not end a
cell is ended. --steps write,run: the first writes the models, on --device.
"""

import argparse
import json
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/judges"))

import httpx
from shape_models import FORMATS, SHAPES, write_shape
from vllm_server import SETTINGS, Server

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.speed.measure import Workload, summarize
from quantkit.evaluation.speed.targets import EndpointTarget

PEER, OURS = "vllm", "quantkit"
CELLS = (
    "4096x32,1024x32,gap,1024x64,128x64,128x8,128x32,4096x8,1024x8,1024x1,4096x1,128x1,"
    "16000x1,16000x8,4096x64,16000x32,16000x64"
)
USERS, OUTPUT = 64, 64
WARM = ((128, 64), (1024, 8), (4096, 1), (16000, 1))
"""Tokens and users of rounds that are not counted: what a server compiles for its first requests is
no figure of any cell."""
PEER_WARM = tuple(
    (tokens - odd, 1) for tokens in (256, 512, 1024, 1536, 2048, 3072, 4096, 8192) for odd in (0, 1)
)
"""More of them for experts at vLLM: their Triton kernel is compiled for every size of its table, and
again where 16 does not divide the number of tokens."""
WARM_S = 90.0
PEER_OPTIONS = {
    "qwen3-next-80b": "--gdn-prefill-backend triton",
    "glm-4.5-air": "--dtype float16",
}
"""Where vLLM by itself takes FlashInfer, which is not there, and where its kernel of AWQ for inputs
that 128 does not divide knows float16 alone."""
ROUNDS, LONG_S = 3, 1.6
"""Rounds of a cell, and after how many seconds of them no further one begins."""
ANSWERS, ANSWER_INPUT, ANSWER_OUTPUT, ARRIVING = 32, 1024, 512, 16000
LEAST_BOUND_S = 20.0
"""How long a cell may take at least, before its server is ended."""
KEYS = ("ttft_s", "tpot_ms", "system_tps")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model in a format on some cards."""

    model: str
    form: str
    tp: int

    @property
    def name(self):
        return f"{self.model}:{self.form}:{self.tp}"


def command(engine, path, case, port, asked):
    if engine == PEER:
        words = f"--max-num-seqs {USERS} --tensor-parallel-size {case.tp}"
        words = f"{words} {PEER_OPTIONS.get(case.model, '')}"
        program = [asked.vllm, "-m", "vllm.entrypoints.cli.main"]
        if asked.cache_tokens:
            size = asked.cache_tokens * token_bytes(path) // case.tp
            words += f" --gpu-memory-utilization 0.1 --kv-cache-memory-bytes {size}"
    else:
        words = f"--max-batch {USERS} --tp {case.tp} --device {asked.device}"
        program = [sys.executable, "-m", "quantkit"]
        if asked.cache_tokens:
            words += f" --cache-tokens {asked.cache_tokens}"
    words += f" --max-model-len {context(asked.cells)} --host 127.0.0.1 --port {port}"
    return [*program, "serve", str(path), *words.split()]


def context(cells):
    """Tokens of the longest prompt, with room for an answer."""
    return max([ARRIVING, *(tokens for tokens, _ in sizes(cells))]) + ANSWER_OUTPUT + 128


def sizes(cells):
    return [tuple(map(int, cell.split("x"))) for cell in cells.split(",") if cell != "gap"]


def token_bytes(path):
    """Of what a token keeps in the cache in 16 bits, on all cards together."""
    config = json.loads((path / "config.json").read_text())
    if "kv_lora_rank" in config:
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"] + config["index_head_dim"]
    else:
        width = 2 * config["num_key_value_heads"] * config["head_dim"]
    return 2 * config["num_hidden_layers"] * width


def start(engine, case, port, asked):
    server = Server(f"http://127.0.0.1:{port}")
    words = command(engine, asked.directory / case.model / case.form, case, port, asked)
    log = asked.directory / f"beside-{case.name.replace(':', '-')}-{engine}.log"
    server.start(words, SETTINGS["cuda"], log)
    return server


def requests(url, tokens, users, output):
    """Raises QuantkitError where one of them failed."""
    times = list(EndpointTarget(url).run(Workload(tokens, output, users, users)))
    errors = [one.error for one in times if one.error]
    if errors:
        raise QuantkitError(
            f"{len(errors)} of {users} requests of {tokens} tokens failed: {errors[0]}",
            "see the server's log",
        )
    return times


def cell_of(url, cell):
    """Of its rounds."""
    if cell == "gap":
        return gap_of(url)
    tokens, users = map(int, cell.split("x"))
    rows, began = Rows(), time.monotonic()
    while len(rows) < ROUNDS and (not rows or time.monotonic() - began < LONG_S):
        row = summarize(requests(url, tokens, users, OUTPUT), tokens, users).to_json()
        rows.append({key: row[key] for key in (*KEYS, "latency_s")})
    return rows


def gap_of(url):
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


def ends_of_gaps(one):
    """When each gap between two pieces of an answer ended, and how long it was."""
    at = one.first_token
    for gap in one.gaps:
        at += gap
        yield at, gap


def expected_s(cell):
    """Of a cell on one server, generously."""
    if cell == "gap":
        return 8.0
    tokens, users = map(int, cell.split("x"))
    return max(tokens * users / 25_000 + 1.0, LONG_S + 1)


def warm(url, engine, case, cells):
    experts = engine == PEER and any("experts" in key for key in SHAPES[case.model])
    longer = [(tokens, 1) for tokens, _ in sizes(cells) if tokens > ARRIVING]
    for tokens, users in (*WARM, *longer, *(PEER_WARM if experts else ())):
        requests(url, tokens, users, 8)
    return []


def measure(servers, engine, asked, until, found):
    """Cell after cell of every case into `found`, which is written after each; what failed is told,
    and is not there."""
    for case, server in list(servers.items()):
        name = f"{case.name} {engine}"
        first = partial(warm, engine=engine, case=case, cells=asked.cells)
        if attempt(name, server, first, WARM_S) is None:
            del servers[case]
    for cell in asked.cells.split(","):
        for case, server in list(servers.items()):
            rows = found.setdefault(case.name, {}).setdefault(cell, {})
            if engine in rows or time.monotonic() + expected_s(cell) >= until:
                continue
            bound = max(LEAST_BOUND_S, 2 * expected_s(cell) + LONG_S)
            name = f"{case.name} {engine} {cell}"
            took = attempt(name, server, lambda url, cell=cell: cell_of(url, cell), bound)
            if took is None:
                del servers[case]
            elif took:
                rows[engine] = took
            (asked.directory / "beside.json").write_text(json.dumps(found, indent=1))
            print("\n".join(told(case.name, cell, rows)), flush=True)


def attempt(name, server, measured, most_s):
    """No rows where what was asked of the server failed; None where it did not end in `most_s`:
    then the server is ended."""
    answer = Future()

    def answered():
        try:
            answer.set_result(measured(server.url))
        except BaseException as problem:
            answer.set_exception(problem)

    threading.Thread(target=answered, daemon=True).start()
    try:
        return answer.result(most_s)
    except (QuantkitError, httpx.HTTPError) as problem:
        print(f"{name}: {problem}", flush=True)
        return []
    except TimeoutError:
        server.end()
        print(f"{name}: it did not end an answer in {most_s:.0f} s", flush=True)
        return None


def told(name, cell, rows):
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
            ratio = theirs / ours if key == "system_tps" else ours / theirs
            said.append(f"{key} {theirs:.4g} {ours:.4g} ({ratio:.2f})")
        lines += [" | ".join(said)] if engine != PEER else []
    return lines


def run(cases, asked):
    kept = asked.directory / "beside.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for engine in asked.engines:
        until = time.monotonic() + asked.seconds
        servers = {
            case: start(engine, case, asked.first_port + number, asked)
            for number, case in enumerate(cases)
        }
        begun = list(servers.values())
        try:
            for case in cases:
                try:
                    servers[case].wait(asked.wait)
                except RuntimeError as problem:
                    print(f"{case.name} {engine}: {problem}", flush=True)
                    servers.pop(case).end()
            measure(servers, engine, asked, until, found)
        finally:
            for server in begun:
                server.end()
    whole = set(asked.engines)
    cells = [rows for case in cases for rows in found.get(case.name, {"": {}}).values()]
    return int(any(not set(rows) >= whole for rows in cells))


def case_of(text):
    model, form, tp = text.split(":")
    if model not in SHAPES or form not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"{text} is none of {', '.join(SHAPES)} with {' or '.join(FORMATS)} and a number of "
            "cards"
        )
    return Case(model, form, int(tp))


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended then, too
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vllm", default=sys.executable, help="python of an environment with vLLM")
    add("--directory", type=Path, required=True)
    add("--steps", default="write,run")
    add("--cases", default="qwen3-8b:awq:1", help="MODEL:FORMAT:CARDS, comma-separated")
    add("--cells", default=CELLS, help="TOKENSxUSERS and gap")
    add("--engines", default=[OURS, PEER], type=lambda text: text.split(","))
    add("--cache-tokens", type=int, default=0, help="of each server, where several share a card")
    add("--layers", type=int, default=0, help="of the models; all by default")
    add("--device", default="cuda")
    add("--first-port", type=int, default=19100, help="of servers, one each")
    add("--wait", type=float, default=150, help="seconds that servers may take to come up")
    add("--seconds", type=float, default=3600, help="of an engine: no further cell is measured")
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    cases = [case_of(text) for text in asked.cases.split(",")]
    if "write" in asked.steps:
        for case in cases:
            write_shape(asked.directory, case.model, case.form, asked.layers, asked.device)
    return run(cases, asked) if "run" in asked.steps else 0


if __name__ == "__main__":
    sys.exit(main())
