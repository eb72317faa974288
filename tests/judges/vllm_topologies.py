"""The commands that `quantkit deploy` prints, run on one host: vLLM must give quantkit's tokens in
every topology.

    make test-vllm-topologies                    # vLLM on CPU, of .venv-vllm
    python tests/judges/vllm_topologies.py --vllm PYTHON --directory DIR --device cuda --cards 4 --beside 8 --eager

A box of `deploy` is as many of this host's cards (on a CPU: processes) as the topology takes.
vllm_server.py starts the commands; memory is given, so that several servers run on the same cards.
--eager adds --enforce-eager, which leaves out compiling and graphs; the result of a run on cards
without it says "compiled". Tokens are judged as judged.py does for mixtures of experts, of at least
HALF of the positions, and a control must fail: an answer with two prompts' continuations exchanged.

The steps, each with its files in --directory, can run on different machines: write (quantkit), run
(vLLM), compare (quantkit on a CPU).
"""

import argparse
import json
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
from checkpoints import DENSE, digest, write
from judged import MAX_TOKENS, judge, prompts_of
from vllm_server import deployed

from quantkit.common.errors import QuantkitError
from quantkit.deploy.launch import Network, deploy
from quantkit.engines.layouts import LayoutRun, layout_runs

CONTEXT = 1024
HALF = 0.5  # of the positions must be counted: of a few it says nothing that they are equal
OPTIONS = "options.json"
"""How the servers ran, kept for those who compare later, on another machine."""
# A server's memory is given, not measured: what its neighbours take meanwhile would count as its
# own.
FEW = f"--kv-cache-memory-bytes {2**28} --max-num-seqs 8 --max-num-batched-tokens 1024".split()
MEMORY = {"cuda": ["--gpu-memory-utilization", "0.02", *FEW], "cpu": FEW}
# Without compiling. On a CPU the later stages of a pipeline need the warming up that
# --enforce-eager leaves out: vLLM 0.32.0 stops with an AssertionError at the first request
# (v1/worker/cpu_worker.py, _should_warm_up_model).
EAGER = ("--enforce-eager",)
EAGER_STAGES = ("--compilation-config", '{"mode": 2, "backend": "eager"}')


@dataclass(frozen=True)
class Topology:
    """What `deploy` is asked for. boxes: the host's cards are shared out to so many, or `devices`
    to each. times: the commands are run so often, each on its share of the cards, with one proxy in
    front of all. more: options that the layout does not have."""

    layout: str
    boxes: int = 1
    devices: int | None = None
    guesses: int = 0
    times: int = 1
    more: tuple[str, ...] = ()

    def ranks(self, cards):
        return self.devices * self.boxes * self.times if self.devices else cards

    @property
    def options(self):
        """What a result tells of it apart from its layout."""
        return " ".join([*([f"{self.times}-of-each"] if self.times > 1 else []), *self.more])


# By NIXL, its default where that is installed, the copies of plain weights were wrong on four H200.
COPIES = '{"num_redundant_experts": 8, "step_interval": 16, "window_size": 16, "communicator": "torch_gloo"}'
TOPOLOGIES = {
    "tensor": Topology("one-box"),
    "pipeline": Topology("two-boxes", boxes=2),
    "tensor-in-pipeline": Topology("two-boxes", boxes=2, devices=2),
    "experts": Topology("one-box-experts"),
    "experts-over-boxes": Topology("four-boxes", boxes=2),
    "apart": Topology("prefill-decode", boxes=2),
    "apart-twice": Topology("prefill-decode", boxes=2, times=2),
    "mtp": Topology("one-box", guesses=1),
    "mtp-alone": Topology("one-box", devices=1, guesses=1),
    "mtp-experts": Topology("one-box-experts", guesses=1),
    "copies": Topology("one-box-experts", more=("--enable-eplb", "--eplb-config", COPIES)),
}
# Model, format, topologies; the most wanted first. tiny-r1 is trained, so that guesses of its MTP
# layer are taken, and vLLM's kernels take none of its linears cut for four cards. vLLM copies no
# experts of AWQ, of int8, or of int4 where Marlin multiplies by them. vLLM on CPU takes no experts
# quantized, and shares none out over data-parallel ranks: 0.32.0 stops with a NotImplementedError
# (device_communicators/base_device_communicator.py, all_gatherv). Of several boxes each may have
# one rank: it takes a CPU for one device (device_communicators/shm_broadcast.py,
# create_from_process_group_single_reader).
_CASES = {
    "cuda": """
deepseek_v3-middle awq tensor pipeline experts apart apart-twice mtp experts-over-boxes
deepseek_v3-middle ct-w8a8 tensor pipeline experts apart apart-twice mtp
deepseek_v3-middle ct-nvfp4 tensor pipeline experts apart mtp
deepseek_v3-middle ct-w4a16-symmetric tensor pipeline experts apart mtp
qwen3_moe-middle awq tensor pipeline experts
qwen3_moe-middle ct-w8a8 tensor pipeline experts
qwen3_moe-middle ct-nvfp4 experts
qwen3_moe-middle ct-w4a16-symmetric experts
tiny-r1 ct-w4a16-symmetric mtp-alone
tiny-r1 ct-w8a8 mtp-alone experts
tiny-r1 ct-nvfp4 mtp-alone
deepseek_v3-middle awq mtp-experts
deepseek_v3-middle ct-w8a8 experts-over-boxes
qwen3_moe-middle awq apart-twice
deepseek_v3-middle modelopt copies
deepseek_v3-middle source copies""",
    "cpu": """
deepseek_v3 source tensor pipeline apart mtp
tiny-r1 plain mtp
qwen3_moe source tensor
deepseek_v3-dense awq tensor pipeline
deepseek_v3-dense ct-w4a16-symmetric tensor
deepseek_v3-dense ct-w8a8 tensor apart
qwen3-dense awq apart experts
qwen3-dense ct-w8a8 pipeline experts-over-boxes""",
}
CASES = {
    device: [
        (model, format, topology)
        for model, format, *topologies in map(str.split, lines.strip().splitlines())
        for topology in topologies
    ]
    for device, lines in _CASES.items()
}


def attention(backend, guesses):
    """vLLM's options for it. An MTP layer does not take the model's, but that of its own options,
    which are given anew: the last count."""
    if not backend:
        return []
    said = {"method": "mtp", "num_speculative_tokens": guesses, "attention_backend": backend}
    drafts = ["--speculative-config", json.dumps(said)] if guesses else []
    return ["--attention-backend", backend, *drafts]


def deployments(path, name, cards):
    """What is printed for a topology, as often as it is run. Each box has an address of its own."""
    topology, made = TOPOLOGIES[name], []
    for turn in range(topology.times):
        addresses = [f"127.0.0.{turn * topology.boxes + box + 1}" for box in range(topology.boxes)]
        asked = {
            "boxes": topology.boxes,
            "devices": topology.devices or cards // topology.boxes // topology.times,
            "network": Network(addresses if topology.boxes > 1 else None, "lo"),
            "draft_length": topology.guesses,
            "context": CONTEXT,
        }
        made.append(deploy(path, "vllm", layout=topology.layout, device="cuda", **asked))
    return made


def started(number, case, asked):
    topology = TOPOLOGIES[case[2]]
    on_cuda, ranks = asked.device == "cuda", topology.ranks(asked.cards)
    given = [*MEMORY[asked.device], *topology.more, *attention(asked.attention, topology.guesses)]
    if not on_cuda or asked.eager:
        given += EAGER_STAGES if not on_cuda and "pipeline" in case[2] else EAGER
    cards = [(number * ranks + rank) % asked.cards for rank in range(ranks)]
    made = deployments(asked.directory / case[0] / case[1], case[2], asked.cards)
    logs = asked.directory / "-".join(case)
    own = cards if on_cuda else range(asked.cards)
    return deployed(made, number, own, asked.device, asked.python, logs, given)


def run(directory, cases, seconds, beside, last, start):
    """Writes DIRECTORY/topologies.json as answers come: one a case, or {"error": text}. `beside`
    servers run at a time, and none is started after `last` seconds."""
    path, lock, stopped = directory / "topologies.json", threading.Lock(), threading.Event()
    told = json.loads(path.read_text()) if path.exists() else {}
    servers = []
    began = time.monotonic()

    def one(number, case):
        if time.monotonic() - began > last:
            print(f"{' '.join(case)}: not started, no time is left", flush=True)
            return
        with ExitStack() as ending:
            try:
                server = start(number, case)
                servers.append(server)
                ending.callback(server.end)
                server.wait(seconds)
                up = time.monotonic() - server.began
                answers = [server.answer(case[1], prompt) for prompt in prompts_of(case[0])]
                said = f"up after {up:.0f} s"
            except (RuntimeError, OSError, KeyError, httpx.HTTPError, QuantkitError) as problem:
                said = f"{type(problem).__name__}: {problem}"
                answers = {"error": said}
            if stopped.is_set():
                return
            print(f"[{time.monotonic() - began:.0f} s] {' '.join(case)}: {said}", flush=True)
            with lock:
                told[" ".join(case)] = answers
                path.write_text(json.dumps(told))

    pool = ThreadPoolExecutor(beside)
    try:
        for running in [pool.submit(one, number, case) for number, case in enumerate(cases)]:
            running.result()
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for server in servers:
            server.end()


def options_of_run(device, attention_asked, *, eager):
    """What results tell of how their servers ran."""
    compiled = ["compiled"] if device == "cuda" and not eager else []
    return " ".join([*compiled, *attention(attention_asked, 0)])


def compare(directory, cards, machine, engine, beside, more=""):
    """Prints a line a case, and of the first that answered the control, which must fail. `beside`
    cases are judged at a time. more: what a result tells of how its server ran, apart from the
    layout's options."""
    told = json.loads((directory / "topologies.json").read_text())
    judged = partial(_run, directory, cards, machine, engine, more)
    with ProcessPoolExecutor(beside, get_context("spawn")) as pool:
        answered = {name: one for name, one in told.items() if not isinstance(one, dict)}
        waited = {name: pool.submit(judged, name, one) for name, one in answered.items()}
        runs = [
            waited[name].result() if name in waited else judged(name, told[name]) for name in told
        ]
    for name, found in zip(told, runs):
        print(f"{'ok  ' if found.passed else 'FAIL'} {name}: {found.said}", flush=True)
    for name in list(answered)[:1]:
        control = judged(name, told[name][::-1])
        print(f"control, continuations of other prompts: {control.said}", flush=True)
        if control.passed:
            raise SystemExit("the control passed: this judge cannot tell right from wrong")
    print(f"{engine} on {machine}: {sum(run.passed for run in runs)} of {len(runs)} passed")
    return runs


def _run(directory, cards, machine, engine, more, name, answers):
    model, format, topology = name.split()
    asked = TOPOLOGIES[topology]
    program, release = engine.split()
    about = {
        "engine": program,
        "release": release,
        "machine": machine,
        "layout": asked.layout,
        "ranks": asked.ranks(cards),
        "guesses": asked.guesses,
        "options": f"{asked.options} {more}".strip(),
        "model": model,
        "format": format,
    }
    if isinstance(answers, dict):
        return LayoutRun(**about, passed=False, said=answers["error"].partition("; see ")[0])
    int8, prompts = format == "ct-w8a8", prompts_of(model)
    path = directory / model / format
    found = judge(path, prompts, answers, int8=int8, mixture=model not in DENSE)
    good = found.mixture_passed(rounded=int8, least=HALF * MAX_TOKENS * len(prompts))
    about |= {"compared": found.compared, "equal": found.equal}
    return LayoutRun(**about, passed=good, said=str(found))


def keep(runs):
    """Into recipes/deploy/run.json, where they replace those of the same machine, engine, layout
    and checkpoint."""
    replaced = {_key(run) for run in runs}
    kept = sorted([*(run for run in layout_runs() if _key(run) not in replaced), *runs], key=_key)
    lines = ",\n ".join(json.dumps(run.model_dump()) for run in kept)
    (Path(__file__).parents[2] / "recipes/deploy/run.json").write_text(f"[\n {lines}\n]\n")


def _key(run):
    about = "engine device machine release layout guesses options ranks model format"
    return tuple(getattr(run, name) for name in about.split())


def main(start=started):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--vllm",
        "--sglang",
        dest="python",
        default=sys.executable,
        help="python of its environment",
    )
    add("--directory", type=Path, required=True, help="checkpoints and answers; kept for later")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--cards", type=int, default=2)
    add("--steps", default="write,run,compare")
    add("--cases", help="MODEL:FORMAT:TOPOLOGY, comma-separated; those of the device otherwise")
    add("--beside", type=int, default=1, help="servers, and judgements, at a time")
    add("--seconds", type=float, default=420, help="that a server may take to come up")
    add("--last", type=float, default=float("inf"), help="seconds: no server is started after them")
    add("--eager", action="store_true")
    add(
        "--attention",
        default="",
        help="vLLM's backend of it, such as TRITON_ATTN, for MTP layers too",
    )
    add("--engine", default="vllm 0.32.0")
    add("--machine", default="CPU", help="as the result names it: CPU, H200")
    add("--result", action="store_true", help="write recipes/deploy/run.json")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with it
    asked.directory.mkdir(parents=True, exist_ok=True)
    cases = CASES[asked.device]
    if asked.cases:
        cases = [tuple(case.split(":")) for case in asked.cases.split(",")]
    kept = asked.directory / OPTIONS
    more = options_of_run(asked.device, asked.attention, eager=asked.eager)
    if "write" in asked.steps:
        for model, format in dict.fromkeys((model, format) for model, format, _ in cases):
            path = write(asked.directory, model, format, asked.device)
            print(f"{model} {format} {digest(path)}", flush=True)
    if "run" in asked.steps:
        kept.write_text(json.dumps(more))
        options = (asked.seconds, asked.beside, asked.last)
        run(asked.directory, cases, *options, lambda number, case: start(number, case, asked))
    if "compare" not in asked.steps:
        return 0
    more = json.loads(kept.read_text()) if kept.exists() else more
    runs = compare(asked.directory, asked.cards, asked.machine, asked.engine, asked.beside, more)
    if asked.result:
        keep(runs)
    return int(not all(run.passed for run in runs))


if __name__ == "__main__":
    sys.exit(main())
