"""The commands that `quantkit deploy` prints, run on one host: vLLM must give quantkit's tokens in
every topology.

    make test-vllm-topologies                    # vLLM on CPU, of .venv-vllm
    python tests/judges/vllm_topologies.py --vllm PYTHON --directory DIR --device cuda --cards 4
    --beside 8 --eager

A box of `deploy` is as many of this host's cards (on a CPU: processes) as the topology takes.
vllm_server.py starts the commands; memory is given, so that several servers run beside each other
on the same cards. --eager adds --enforce-eager, which leaves out compiling and graphs; the result
of a run on cards without it says "compiled". Tokens are judged as vllm_cuda.py judges them, of at
least HALF of the positions, and a control must fail: an answer with two prompts' continuations
exchanged.

The steps, each with its files in --directory, can run on different machines: write (quantkit), run
(vLLM), compare (quantkit on a CPU).
"""

import argparse
import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import httpx
import vllm_cuda
import vllm_tokens
from dense_models import CONFIGS, random_weights
from make_model import write_dense
from middle_models import MIDDLE, write_middle
from vllm_server import Server
from vllm_tokens import INT8_TIE, MAX_TOKENS, TIE, judge

from quantkit.calibrate.recipe import Recipe
from quantkit.common.errors import QuantkitError
from quantkit.deploy.launch import Deployment, deploy
from quantkit.engines.layouts import LayoutRun, layout_runs
from quantkit.grids.schemes import find_scheme
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert

CONTEXT = 1024
CACHE = 2**28
HALF = 0.5  # of the positions must be counted: of a few it says nothing that they are equal
OPTIONS = "options.json"
"""How the servers ran, kept for those who compare later, on another machine."""
Case = tuple[str, ...]  # model, format, topology
DENSE = {f"{name}-dense": CONFIGS[name] for name in ("deepseek_v3", "qwen3")}
# A server's memory is given, not measured: what its neighbours take meanwhile would count as its
# own.
FEW = (
    "--kv-cache-memory-bytes",
    str(CACHE),
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "1024",
)
MEMORY = {"cuda": ("--gpu-memory-utilization", "0.02", *FEW), "cpu": FEW}
# Without compiling. On a CPU the later stages of a pipeline need the warming up that
# --enforce-eager leaves out: vLLM 0.32.0 stops with an AssertionError at the first request
# (v1/worker/cpu_worker.py, _should_warm_up_model).
EAGER = ("--enforce-eager",)
EAGER_STAGES = ("--compilation-config", '{"mode": 2, "backend": "eager"}')


class JudgedServer(Protocol):
    """What is asked of a server, whatever engine it is of."""

    began: float

    def wait(self, seconds: float) -> None: ...

    def answer(self, model: str, prompt: list[int]) -> dict[str, Any]: ...

    def guessed(self) -> str: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Topology:
    """What `deploy` is asked for. boxes: the host's cards are shared out to so many, or `devices`
    to each. times: the commands are run so often, each on its share of the cards, with one proxy in
    front of all. more: options beside the layout's own."""

    layout: str
    boxes: int = 1
    devices: int | None = None
    guesses: int = 0
    times: int = 1
    more: tuple[str, ...] = ()

    def ranks(self, cards: int) -> int:
        return self.devices * self.boxes * self.times if self.devices else cards

    @property
    def options(self) -> str:
        """What a result tells of it beside its layout."""
        return " ".join([*([f"{self.times}-of-each"] if self.times > 1 else []), *self.more])


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
    "copies": Topology(
        "one-box-experts",
        # By NIXL, its default where that is installed, the copies of plain weights were wrong on
        # four H200.
        more=(
            "--enable-eplb",
            "--eplb-config",
            '{"num_redundant_experts": 8, "step_interval": 16, "window_size": 16, "communicator": '
            '"torch_gloo"}',
        ),
    ),
}
CASES = {
    "cuda": (  # the most wanted first
        *(
            ("deepseek_v3-middle", "awq", topology)
            for topology in ("tensor", "pipeline", "experts", "apart", "apart-twice", "mtp")
        ),
        ("deepseek_v3-middle", "awq", "experts-over-boxes"),
        *(
            ("deepseek_v3-middle", "ct-w8a8", topology)
            for topology in ("tensor", "pipeline", "experts", "apart", "apart-twice", "mtp")
        ),
        *(
            ("deepseek_v3-middle", "ct-nvfp4", topology)
            for topology in ("tensor", "pipeline", "experts", "apart", "mtp")
        ),
        *(
            ("deepseek_v3-middle", "ct-w4a16-symmetric", topology)
            for topology in ("tensor", "pipeline", "experts", "apart", "mtp")
        ),
        *(
            ("qwen3_moe-middle", format, topology)
            for format in ("awq", "ct-w8a8")
            for topology in ("tensor", "pipeline", "experts")
        ),
        *(("qwen3_moe-middle", format, "experts") for format in ("ct-nvfp4", "ct-w4a16-symmetric")),
        # Trained, so that guesses of its MTP layer are taken; vLLM's kernels take none of its
        # linears cut for four cards.
        *(
            ("tiny-r1", format, "mtp-alone")
            for format in ("ct-w4a16-symmetric", "ct-w8a8", "ct-nvfp4")
        ),
        ("tiny-r1", "ct-w8a8", "experts"),
        ("deepseek_v3-middle", "awq", "mtp-experts"),
        ("deepseek_v3-middle", "ct-w8a8", "experts-over-boxes"),
        ("qwen3_moe-middle", "awq", "apart-twice"),
        # vLLM copies no experts of AWQ, of int8, or of int4 where Marlin multiplies by them.
        ("deepseek_v3-middle", "modelopt", "copies"),
        ("deepseek_v3-middle", "source", "copies"),
    ),
    # vLLM on CPU takes no experts quantized, and shares none out over data-parallel ranks: 0.32.0
    # stops with a NotImplementedError (device_communicators/base_device_communicator.py,
    # all_gatherv). Of several boxes each may
    # have one rank: it takes a CPU for one device (device_communicators/shm_broadcast.py,
    # create_from_process_group_single_reader).
    "cpu": (
        *(
            ("deepseek_v3", "source", topology)
            for topology in ("tensor", "pipeline", "apart", "mtp")
        ),
        ("tiny-r1", "plain", "mtp"),  # trained: guesses of its MTP layer are taken
        ("qwen3_moe", "source", "tensor"),
        *(
            ("deepseek_v3-dense", format, "tensor")
            for format in ("awq", "ct-w4a16-symmetric", "ct-w8a8")
        ),
        ("deepseek_v3-dense", "awq", "pipeline"),
        ("deepseek_v3-dense", "ct-w8a8", "apart"),
        ("qwen3-dense", "awq", "apart"),
        ("qwen3-dense", "ct-w8a8", "pipeline"),
        ("qwen3-dense", "awq", "experts"),
        ("qwen3-dense", "ct-w8a8", "experts-over-boxes"),
    ),
}


def attention(backend: str, guesses: int) -> list[str]:
    """vLLM's options for it. An MTP layer does not take the model's, but that of its own options,
    which are given anew: the last count."""
    if not backend:
        return []
    said = {"method": "mtp", "num_speculative_tokens": guesses, "attention_backend": backend}
    return [
        "--attention-backend",
        backend,
        *(["--speculative-config", json.dumps(said)] if guesses else []),
    ]


def deployments(path: Path, name: str, cards: int) -> list[Deployment]:
    """What is printed for a topology, as often as it is run. Each box has an address of its own."""
    topology = TOPOLOGIES[name]
    devices = topology.devices or cards // topology.boxes // topology.times
    made = []
    for turn in range(topology.times):
        hosts = (
            [f"127.0.0.{turn * topology.boxes + box + 1}" for box in range(topology.boxes)]
            if topology.boxes > 1
            else None
        )
        asked: dict[str, Any] = {
            "boxes": topology.boxes,
            "devices": devices,
            "hosts": hosts,
            "nic": "lo",
            "draft_length": topology.guesses,
        }
        made.append(
            deploy(path, "vllm", layout=topology.layout, device="cuda", context=CONTEXT, **asked)
        )
    return made


def run(
    directory: Path,
    cases: Sequence[Case],
    seconds: float,
    beside: int,
    last: float,
    start: Callable[[int, Case], JudgedServer],
) -> None:
    """Writes DIRECTORY/topologies.json as answers come: one a case, or {"error": text}. `beside`
    servers run at a time, and none is started after `last` seconds."""
    path, lock, stopped = directory / "topologies.json", threading.Lock(), threading.Event()
    told = json.loads(path.read_text()) if path.exists() else {}
    servers: list[JudgedServer] = []
    began = time.monotonic()

    def one(number: int, case: Case) -> None:
        answers: Any
        if time.monotonic() - began > last:
            print(f"{' '.join(case)}: not started, no time is left", flush=True)
            return
        with ExitStack() as ending:
            try:
                server = start(number, case)
                servers.append(server)
                ending.callback(server.end)
                answers, said = _answers(case, server, seconds)
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


def _answers(case: Case, server: JudgedServer, seconds: float) -> tuple[Any, str]:
    """Of a server once it is up, and a word about it. Raises RuntimeError, OSError, KeyError or
    httpx.HTTPError where there are none."""
    model, format, _ = case
    server.wait(seconds)
    up = time.monotonic() - server.began
    answers = [server.answer(format, prompt) for prompt in prompts_of(model)]
    return answers, f"up after {up:.0f} s; {server.guessed()}"


def options_of_run(device: str, attention_asked: str, *, eager: bool) -> str:
    """What results tell of how their servers ran."""
    return " ".join(
        [*(["compiled"] if device == "cuda" and not eager else []), *attention(attention_asked, 0)]
    )


def prompts_of(model: str) -> list[list[int]]:
    return vllm_cuda.asked_of(model.partition("-")[0])


def compare(
    directory: Path, cards: int, machine: str, engine: str, beside: int, more: str = ""
) -> list[LayoutRun]:
    """Prints a line a case, and of the first that answered the control, which must fail. `beside`
    cases are judged at a time. more: what a result tells of how its server ran, beside the layout's
    options."""
    told = json.loads((directory / "topologies.json").read_text())
    runs = []
    with ProcessPoolExecutor(beside, get_context("spawn")) as pool:
        judged = [
            pool.submit(_run, directory, name, answers, cards, machine, engine, more)
            for name, answers in told.items()
        ]
        for name, waited in zip(told, judged):
            runs.append(waited.result())
            print(f"{'ok  ' if runs[-1].passed else 'FAIL'} {name}: {runs[-1].said}", flush=True)
    answered = next((name for name, answers in told.items() if not isinstance(answers, dict)), None)
    if answered is not None:
        control = _run(directory, answered, told[answered][::-1], cards, machine, engine, more)
        print(
            f"{'FAIL' if control.passed else 'ok  '} control, continuations of other prompts: "
            f"{control.said}",
            flush=True,
        )
        if control.passed:
            raise SystemExit("the control passed: this judge cannot tell right from wrong")
    print(f"{engine} on {machine}: {sum(run.passed for run in runs)} of {len(runs)} passed")
    return runs


def _run(
    directory: Path, name: str, answers: Any, cards: int, machine: str, engine: str, more: str
) -> LayoutRun:
    model, format, topology = name.split()
    asked = TOPOLOGIES[topology]
    program, release = engine.split()
    about: dict[str, Any] = {
        "engine": program,
        "release": release,
        "machine": machine,
        "layout": asked.layout,
        "ranks": asked.ranks(cards),
    }
    about |= {
        "guesses": asked.guesses,
        "options": f"{asked.options} {more}".strip(),
        "model": model,
        "format": format,
    }
    if isinstance(answers, dict):
        return LayoutRun(**about, passed=False, said=answers["error"].partition("; see ")[0])
    path, prompts = directory / model / format, prompts_of(model)
    ties = (
        None
        if model in DENSE
        else vllm_cuda.routing_ties(
            path, [prompt + each["tokens"] for prompt, each in zip(prompts, answers)]
        )
    )
    found = judge(path, prompts, answers, INT8_TIE if format == "ct-w8a8" else TIE, ties)
    tolerance = 0.2 if format == "ct-w8a8" else vllm_cuda.TOLERANCE
    enough = found.compared >= HALF * MAX_TOKENS * len(prompts)
    good = enough and found.equal >= vllm_cuda.SAME * found.compared and found.median < tolerance
    said = (
        f"{found.equal} of {found.compared} tokens, log-probabilities differ by "
        f"{found.median:.4f}, {found.difference:.4f} in the mean"
    )
    return LayoutRun(**about, compared=found.compared, equal=found.equal, passed=good, said=said)


def keep(runs: Sequence[LayoutRun]) -> None:
    """Into recipes/deploy/run.json, where they replace those of the same machine, engine, layout
    and checkpoint."""
    replaced = {_key(run) for run in runs}
    kept = sorted([*(run for run in layout_runs() if _key(run) not in replaced), *runs], key=_key)
    lines = ",\n ".join(json.dumps(run.model_dump()) for run in kept)
    (Path(__file__).parents[2] / "recipes/deploy/run.json").write_text(f"[\n {lines}\n]\n")


def _key(run: LayoutRun) -> tuple[str | int, ...]:
    return (
        run.engine,
        run.device,
        run.machine,
        run.release,
        run.layout,
        run.guesses,
        run.options,
        run.ranks,
        run.model,
        run.format,
    )


def write(directory: Path, model: str, formats: Sequence[str], device: str) -> None:
    """The checkpoints that are not there, and the hashes of their tensors: two machines must judge
    the same."""
    if model in MIDDLE:
        write_middle(directory, model, formats, device)
    elif formats == ["plain"]:
        if not (directory / model / "plain").exists():
            convert(vllm_cuda.TINY_R1, directory / model / "plain", dtype="bfloat16")
    elif model in DENSE:
        _write_dense(directory / model, DENSE[model], formats)
    else:
        vllm_cuda.write(directory, model, formats)
    for format in formats:
        digest = hashlib.sha256()
        for shard in sorted((directory / model / format).glob("*.safetensors")):
            digest.update(shard.read_bytes())
        print(f"{model} {format} {digest.hexdigest()[:16]}", flush=True)


def _write_dense(directory: Path, config: dict[str, Any], formats: Sequence[str]) -> None:
    source = directory / "source"
    if not source.exists():
        write_dense(source, config, random_weights(config))
    text = directory / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": " ".join(str(i * j % 97) for j in range(60))}) + "\n"
            for i in range(12)
        )
    )
    for format in formats:
        asked = vllm_tokens.FORMATS.get(format)
        if asked is not None and not (directory / format / "config.json").exists():
            scheme, written, engine = asked
            recipe = Recipe(scheme=scheme, calibration=str(text), samples=8, held_out=2, seq_len=64)
            quantize(
                source,
                directory / format,
                find_scheme(scheme),
                written,
                recipe,
                engine=engine,
                device="cpu",
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default=sys.executable, help="python of an environment with vLLM")
    parser.add_argument(
        "--directory",
        type=Path,
        required=True,
        help="checkpoints and answers; what is there is not written again",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--steps", default="write,run,compare")
    parser.add_argument(
        "--cases", help="MODEL:FORMAT:TOPOLOGY, comma-separated; those of the device otherwise"
    )
    parser.add_argument("--beside", type=int, default=1, help="servers, and judgements, at a time")
    parser.add_argument(
        "--seconds", type=float, default=420, help="that a server may take to come up"
    )
    parser.add_argument(
        "--last",
        type=float,
        default=float("inf"),
        help="seconds after which no further server is started",
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--attention",
        default="",
        help="vLLM's backend of it, such as TRITON_ATTN, for MTP layers too",
    )
    parser.add_argument("--engine", default="vllm 0.32.0")
    parser.add_argument("--machine", default="CPU", help="as the result names it: CPU, H200")
    parser.add_argument("--result", action="store_true", help="write recipes/deploy/run.json")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with it
    asked.directory.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = (
        [tuple(case.split(":")) for case in asked.cases.split(",")]
        if asked.cases
        else list(CASES[asked.device])
    )
    kept, more = (
        asked.directory / OPTIONS,
        options_of_run(asked.device, asked.attention, eager=asked.eager),
    )
    if "write" in asked.steps:
        for model in dict.fromkeys(model for model, _, _ in cases):
            write(
                asked.directory,
                model,
                list(dict.fromkeys(format for other, format, _ in cases if other == model)),
                asked.device,
            )
    if "run" in asked.steps:

        def start(number: int, case: Case) -> Server:
            model, format, topology = case
            made = deployments(asked.directory / model / format, topology, asked.cards)
            stages = asked.device == "cpu" and "pipeline" in topology
            compiled = (
                ()
                if asked.device == "cuda" and not asked.eager
                else EAGER_STAGES
                if stages
                else EAGER
            )
            given = [*MEMORY[asked.device], *compiled, *TOPOLOGIES[topology].more]
            given += attention(asked.attention, TOPOLOGIES[topology].guesses)
            ranks = TOPOLOGIES[topology].ranks(asked.cards)
            cards = (
                [(number * ranks + rank) % asked.cards for rank in range(ranks)]
                if asked.device == "cuda"
                else range(asked.cards)
            )
            return Server(
                made,
                number,
                cards,
                asked.device,
                asked.vllm,
                asked.directory / "-".join(case),
                given,
            )

        kept.write_text(json.dumps(more))
        run(asked.directory, cases, asked.seconds, asked.beside, asked.last, start)
    if "compare" not in asked.steps:
        return 0
    more = json.loads(kept.read_text()) if kept.exists() else more
    runs = compare(asked.directory, asked.cards, asked.machine, asked.engine, asked.beside, more)
    if asked.result:
        keep(runs)
    return int(not all(run.passed for run in runs))


if __name__ == "__main__":
    sys.exit(main())
