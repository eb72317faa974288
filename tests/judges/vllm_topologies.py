"""The commands that `quantkit deploy` prints, run on one host: vLLM must give quantkit's tokens in every topology.

    make test-vllm-topologies                    # vLLM on CPU, of .venv-vllm
    python tests/judges/vllm_topologies.py --vllm PYTHON --directory DIR --device cuda --cards 2

A box of `deploy` is as many of this host's cards (on a CPU: processes) as the topology takes; every box has processes of its own, and
addresses are those of loopback. Of the printed commands the program is filled in (PYTHON -m vllm.entrypoints.cli.main), the ports, and
memory, so that several servers run beside each other; --eager adds --enforce-eager, which leaves out compiling and graphs. Where prefill
and decode are apart, `quantkit proxy` stands in front, as the layout says. Tokens are judged as vllm_cuda.py judges them, and a control
must fail: an answer with two prompts' continuations exchanged.

The steps, each with its files in --directory, can run on different machines: write (quantkit), run (vLLM), compare (quantkit on a CPU).
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import vllm_cuda
import vllm_tokens
from dense_models import CONFIGS, random_weights
from make_model import write_dense
from middle_models import MIDDLE, write_middle
from vllm_tokens import INT8_TIE, MAX_TOKENS, TIE, judge

from quantkit.conversion import convert
from quantkit.engines.evidence import LayoutRun, layout_runs
from quantkit.engines.launch import Deployment, deploy
from quantkit.quantization import quantize
from quantkit.recipe import Recipe
from quantkit.schemes import find_scheme

KEY = "key-of-this-run"
CONTEXT = 1024
CACHE = 2**28
FIRST_PORT, PORTS = 20000, 64  # below those that the system gives away
# A server's memory is given, not measured: what its neighbours take meanwhile would count as its own.
Case = tuple[str, ...]  # model, format, topology
DENSE = {f"{name}-dense": CONFIGS[name] for name in ("deepseek_v3", "qwen3")}
MEMORY = {
    "cuda": ("--gpu-memory-utilization", "0.02", "--kv-cache-memory-bytes", str(CACHE)),
    "cpu": ("--kv-cache-memory-bytes", str(CACHE), "--max-num-seqs", "8", "--max-num-batched-tokens", "1024"),
}
# Without compiling. On a CPU the later stages of a pipeline need the warming up that --enforce-eager leaves out: vLLM 0.32.0 stops with
# an AssertionError at the first request (v1/worker/cpu_worker.py, _should_warm_up_model).
EAGER = ("--enforce-eager",)
EAGER_STAGES = ("--compilation-config", '{"mode": 2, "backend": "eager"}')
# A box sees no shared memory of another: vLLM tells by it who is on the same machine.
APART = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "box")
SETTINGS = {
    "cuda": {**vllm_cuda.SETTINGS, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    "cpu": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
}


@dataclass(frozen=True)
class Topology:
    """What `deploy` is asked for. boxes: the host's cards are shared out to so many, or `devices` to each. more: options beside its own."""

    layout: str
    boxes: int = 1
    devices: int | None = None
    guesses: int = 0
    more: tuple[str, ...] = ()


TOPOLOGIES = {
    "tensor": Topology("one-box"),
    "pipeline": Topology("two-boxes", boxes=2),
    "tensor-in-pipeline": Topology("two-boxes", boxes=2, devices=2),
    "experts": Topology("one-box-experts"),
    "experts-over-boxes": Topology("four-boxes", boxes=2),
    "apart": Topology("prefill-decode", boxes=2),
    "mtp": Topology("one-box", guesses=1),
    "copies": Topology(
        "one-box-experts", more=("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 8, "step_interval": 16, "window_size": 16}')
    ),
}
CASES = {
    "cuda": (
        *(("deepseek_v3-middle", "awq", topology) for topology in TOPOLOGIES if topology not in ("tensor-in-pipeline", "copies")),
        ("deepseek_v3-middle", "ct-w4a16-symmetric", "copies"),  # vLLM copies no experts of AWQ
        *(("deepseek_v3-middle", "ct-w8a8", topology) for topology in ("tensor", "pipeline", "experts", "apart", "mtp")),
        *(("deepseek_v3-middle", "ct-nvfp4", topology) for topology in ("tensor", "pipeline", "experts")),
        ("deepseek_v3-middle", "ct-w4a16-symmetric", "tensor"),
        *(("qwen3_moe-middle", "awq", topology) for topology in ("tensor", "pipeline", "experts")),
        *(("qwen3_moe-middle", "ct-w8a8", topology) for topology in ("tensor", "experts")),
    ),
    # vLLM on CPU takes no experts quantized, and shares none out over data-parallel ranks: 0.32.0 stops with a NotImplementedError
    # (device_communicators/base_device_communicator.py, all_gatherv). Of several boxes each may have one rank: it takes a CPU for one
    # device (device_communicators/shm_broadcast.py, create_from_process_group_single_reader).
    "cpu": (
        *(("deepseek_v3", "source", topology) for topology in ("tensor", "pipeline", "apart", "mtp")),
        ("tiny-r1", "plain", "mtp"),  # trained: guesses of its MTP layer are taken
        ("qwen3_moe", "source", "tensor"),
        *(("deepseek_v3-dense", format, "tensor") for format in ("awq", "ct-w4a16-symmetric", "ct-w8a8")),
        ("deepseek_v3-dense", "awq", "pipeline"),
        ("deepseek_v3-dense", "ct-w8a8", "apart"),
        ("qwen3-dense", "awq", "apart"),
        ("qwen3-dense", "ct-w8a8", "pipeline"),
        ("qwen3-dense", "awq", "experts"),
        ("qwen3-dense", "ct-w8a8", "experts-over-boxes"),
    ),
}


class Server:
    """One deployment's processes, and the answers of the first of them."""

    def __init__(
        self, made: Deployment, number: int, cards: Sequence[int], device: str, python: str, logs: Path, more: Sequence[str]
    ) -> None:
        self.logs, self.began = logs, time.monotonic()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ports = iter(range(FIRST_PORT + PORTS * number, FIRST_PORT + PORTS * (number + 1), 4))
        tiny = {"VLLM_MLA_DISABLE": "1"} if logs.name.startswith("tiny-r1") else {}  # its heads are too small for it
        self._told = {**os.environ, **SETTINGS[device], **tiny, "VLLM_API_KEY": KEY}
        meeting, served = {role: next(self._ports) for role in {launch.role for launch in made.launches}}, {}
        cards_per_box = len(cards) // len(made.launches)
        for box, launch in enumerate(made.launches):
            for environment, command in launch.commands:
                if "--port" in command:
                    served[launch.role] = (command[command.index("--host") + 1], next(self._ports))
                filled = _filled(command, python, served[launch.role][1], meeting[launch.role])
                visible = ",".join(map(str, cards[box * cards_per_box : (box + 1) * cards_per_box]))
                apart = APART if len(made.launches) > 1 and _may_be_apart() else ()
                self._start([*apart, *filled, *more], {**environment, "CUDA_VISIBLE_DEVICES": visible}, str(box))
        urls = {role: f"http://{host}:{port}" for role, (host, port) in served.items()}
        self.url = urls.get("server") or f"http://127.0.0.1:{next(self._ports)}"
        if "prefill" in urls:
            asked = ["proxy", "--prefill", urls["prefill"], "--decode", urls["decode"], "--port", self.url[-5:]]
            self._start([sys.executable, "-m", "quantkit", *asked], {}, "proxy")

    def _start(self, command: list[str], environment: dict[str, str], name: str) -> None:
        told = {**self._told, **environment, "VLLM_PORT": str(next(self._ports) + 1)}
        log = (self.logs.parent / f"{self.logs.name}.{name}.log").open("wb")
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        self.processes.append(subprocess.Popen(command, env=told, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))

    def up(self) -> bool:
        """Whether it serves. Raises RuntimeError where a process of it ended."""
        ended = [number for number, process in enumerate(self.processes) if process.poll() is not None]
        if ended:
            raise RuntimeError(f"process {ended[0]} ended with {self.processes[ended[0]].returncode}")
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def answer(self, model: str, prompt: list[int]) -> dict[str, Any]:
        """{"tokens", "logprobs"} as vllm_run.py gives them, of a greedy continuation."""
        asked = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 5, "ignore_eos": True}
        asked |= {"return_tokens_as_token_ids": True}
        reply = httpx.post(f"{self.url}/v1/completions", json=asked, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)
        if reply.status_code != 200:
            raise RuntimeError(f"it answers {reply.status_code}: {reply.text[:300]}")
        found = reply.json()["choices"][0]["logprobs"]
        top = [[[_token(name), value] for name, value in position.items()] for position in found["top_logprobs"]]
        return {"tokens": [_token(name) for name in found["tokens"]], "logprobs": top}

    def guessed(self) -> str:
        """What the server counts of its MTP layer's guesses; empty where it has none."""
        counted = dict(re.findall(r"^vllm:spec_decode_num_(draft_tokens|accepted_tokens)_total{[^}]*} ([0-9.]+)$", self._metrics(), re.M))
        return f"{float(counted['accepted_tokens']):.0f} of {float(counted['draft_tokens']):.0f} guesses taken" if len(counted) == 2 else ""

    def _metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=5).text

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + 10
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.1))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # vLLM's workers too, which a stopped server may leave
            process.wait()


@cache
def _may_be_apart() -> bool:
    """Whether this machine lets a process have mounts of its own."""
    return subprocess.run([*APART, "true"], capture_output=True).returncode == 0


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _filled(command: Sequence[str], python: str, port: int, meeting: int) -> list[str]:
    words = [python, "-m", "vllm.entrypoints.cli.main", *command[1:]] if command[0] == "vllm" else list(command)
    for option, value in (("--port", port), ("--master-port", meeting), ("--data-parallel-rpc-port", meeting)):
        if option in words:
            words[words.index(option) + 1] = str(value)
    return words


def deployment(path: Path, name: str, cards: int) -> Deployment:
    topology = TOPOLOGIES[name]
    devices = topology.devices or cards // topology.boxes
    hosts = [f"127.0.0.{box + 1}" for box in range(topology.boxes)] if topology.boxes > 1 else None
    asked: dict[str, Any] = {"boxes": topology.boxes, "devices": devices, "hosts": hosts, "nic": "lo", "guesses": topology.guesses}
    return deploy(path, "vllm", layout=topology.layout, device="cuda", context=CONTEXT, **asked)


def run(directory: Path, cases: Sequence[Case], seconds: float, beside: int, start: Callable[[int, Case], Server]) -> None:
    """Writes DIRECTORY/topologies.json as answers come: one a case, or {"error": text}. `beside` servers run at a time."""
    path = directory / "topologies.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    waiting, running, ending = list(enumerate(cases)), list[tuple[Case, Server]](), list[threading.Thread]()
    try:
        while waiting or running:
            while waiting and len(running) < beside:
                number, case = waiting.pop(0)
                running.append((case, start(number, case)))
            for case, server in list(running):
                answers = _answers(case, server, seconds)
                if answers is None:
                    continue
                running.remove((case, server))
                told[" ".join(case)] = answers
                path.write_text(json.dumps(told))
                said = answers["error"] if isinstance(answers, dict) else f"answered {server.guessed()}"
                print(f"[{time.monotonic() - server.began:.0f} s] {' '.join(case)}: {said}", flush=True)
                ending.append(threading.Thread(target=server.end))
                ending[-1].start()
            time.sleep(0.5)
    finally:
        for _, server in running:
            server.end()
        for thread in ending:
            thread.join()


def _answers(case: Case, server: Server, seconds: float) -> Any:
    """Of a server that is up, or why there are none; None while it comes up."""
    model, format, _ = case
    try:
        if server.up():
            return [server.answer(format, prompt) for prompt in prompts_of(model)]
        if time.monotonic() - server.began > seconds:
            raise RuntimeError("it did not come up in time")
    except (RuntimeError, OSError, KeyError, httpx.HTTPError) as problem:
        return {"error": f"{type(problem).__name__}: {problem}; see {server.logs}.*.log"}
    return None


def prompts_of(model: str) -> list[list[int]]:
    return vllm_cuda.asked_of(model.partition("-")[0])


def compare(directory: Path, cards: int, machine: str, engine: str) -> list[LayoutRun]:
    """Prints a line a case, and of the first that answered the control, which must fail."""
    told = json.loads((directory / "topologies.json").read_text())
    runs = []
    for name, answers in told.items():
        runs.append(_run(directory, name, answers, cards, machine, engine))
        print(f"{'ok  ' if runs[-1].passed else 'FAIL'} {name}: {runs[-1].said}", flush=True)
    answered = next((name for name, answers in told.items() if not isinstance(answers, dict)), None)
    if answered is not None:
        control = _run(directory, answered, told[answered][::-1], cards, machine, engine)
        print(f"{'FAIL' if control.passed else 'ok  '} control, continuations of other prompts: {control.said}", flush=True)
        if control.passed:
            raise SystemExit("the control passed: this judge cannot tell right from wrong")
    print(f"{engine} on {machine}: {sum(run.passed for run in runs)} of {len(runs)} passed")
    return runs


def _run(directory: Path, name: str, answers: Any, cards: int, machine: str, engine: str) -> LayoutRun:
    model, format, topology = name.split()
    asked = TOPOLOGIES[topology]
    ranks = asked.boxes * asked.devices if asked.devices else cards
    program, release = engine.split()
    about: dict[str, Any] = {"engine": program, "release": release, "machine": machine, "layout": asked.layout, "ranks": ranks}
    about |= {"guesses": asked.guesses, "options": " ".join(asked.more), "model": model, "format": format}
    if isinstance(answers, dict):
        return LayoutRun(**about, passed=False, said=answers["error"].partition("; see ")[0])
    path, prompts = directory / model / format, prompts_of(model)
    ties = None if model in DENSE else vllm_cuda.routing_ties(path, [prompt + each["tokens"] for prompt, each in zip(prompts, answers)])
    found = judge(path, prompts, answers, INT8_TIE if format == "ct-w8a8" else TIE, ties)
    tolerance = 0.2 if format == "ct-w8a8" else vllm_cuda.TOLERANCE
    good = found.compared > 0 and found.equal >= vllm_cuda.SAME * found.compared and found.median < tolerance
    said = f"{found.equal} of {found.compared} tokens, log-probabilities differ by {found.median:.4f}, {found.difference:.4f} in the mean"
    return LayoutRun(**about, compared=found.compared, equal=found.equal, passed=good, said=said)


def keep(runs: Sequence[LayoutRun]) -> None:
    """Into recipes/deploy/run.json, where they replace those of the same machine, engine, layout and checkpoint."""
    replaced = {_key(run) for run in runs}
    kept = sorted([*(run for run in layout_runs() if _key(run) not in replaced), *runs], key=_key)
    lines = ",\n ".join(json.dumps(run.model_dump()) for run in kept)
    (Path(__file__).parents[2] / "recipes/deploy/run.json").write_text(f"[\n {lines}\n]\n")


def _key(run: LayoutRun) -> tuple[str | int, ...]:
    return (run.engine, run.machine, run.release, run.layout, run.guesses, run.options, run.ranks, run.model, run.format)


def write(directory: Path, model: str, formats: Sequence[str], device: str) -> None:
    """The checkpoints that are not there, and the hashes of their tensors: two machines must judge the same."""
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
    text.write_text("".join(json.dumps({"text": " ".join(str(i * j % 97) for j in range(60))}) + "\n" for i in range(12)))
    for format in formats:
        asked = vllm_tokens.FORMATS.get(format)
        if asked is not None and not (directory / format / "config.json").exists():
            scheme, written, engine = asked
            recipe = Recipe(scheme=scheme, calibration=str(text), samples=8, held_out=2, seq_len=64)
            quantize(source, directory / format, find_scheme(scheme), written, recipe, engine=engine, device="cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=sys.executable, help="python of an environment with vLLM")
    parser.add_argument("--directory", type=Path, required=True, help="checkpoints and answers; what is there is not written again")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--steps", default="write,run,compare")
    parser.add_argument("--cases", help="MODEL:FORMAT:TOPOLOGY, comma-separated; those of the device otherwise")
    parser.add_argument("--beside", type=int, default=1, help="servers at a time")
    parser.add_argument("--seconds", type=float, default=420, help="that a server may take to come up")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--engine", default="vllm 0.32.0")
    parser.add_argument("--machine", default="CPU", help="as the result names it: CPU, H200")
    parser.add_argument("--result", action="store_true", help="write recipes/deploy/run.json")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with it
    asked.directory.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = [tuple(case.split(":")) for case in asked.cases.split(",")] if asked.cases else list(CASES[asked.device])
    if "write" in asked.steps:
        for model in dict.fromkeys(model for model, _, _ in cases):
            write(asked.directory, model, list(dict.fromkeys(format for other, format, _ in cases if other == model)), asked.device)
    if "run" in asked.steps:

        def start(number: int, case: Case) -> Server:
            model, format, topology = case
            made = deployment(asked.directory / model / format, topology, asked.cards)
            stages = asked.device == "cpu" and "pipeline" in topology
            compiled = () if asked.device == "cuda" and not asked.eager else EAGER_STAGES if stages else EAGER
            more = [*MEMORY[asked.device], *compiled, *TOPOLOGIES[topology].more]
            return Server(made, number, range(asked.cards), asked.device, asked.vllm, asked.directory / "-".join(case), more)

        run(asked.directory, cases, asked.seconds, asked.beside, start)
    if "compare" not in asked.steps:
        return 0
    runs = compare(asked.directory, asked.cards, asked.machine, asked.engine)
    if asked.result:
        keep(runs)
    return int(not all(run.passed for run in runs))


if __name__ == "__main__":
    sys.exit(main())
