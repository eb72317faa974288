"""Quality at the same bits: quantkit next to llm-compressor, AutoRound and ModelOpt on several
models, one set of calibration tokens, one evaluator; on GPUs and many cores, most wanted first,
until time is up.

    python benchmarks/quality.py run FILE.jsonl --judges DIR --out OUT [--seconds 500] [--cards 0,1]
        [--gpu KIND=N,...] [--cpu 4] [--variants FILE]
    python benchmarks/quality.py table FILE.jsonl [--split tuning]

The models are those of judge_models.py in DIR. run: every result is added to FILE at once, KL of
every document on both splits; what FILE has is not run again. All fit the same tokens: --samples
documents of a judge's own text, drawn with the seed. Settings are chosen on the tuning split; the
final split is looked at once they are fixed. --variants: {scheme: {name: {recipe key: value}}}, each
a row next to ours. A worker computes on one of the GPUs, or, where CUDA is hidden from it, on one
core; every judge has one more, on one of the GPUs. Workers on a GPU begin with the kinds that --gpu
names, and import what those need while judges are still trained: a judge's runs begin when its
folder is there. table: KL, its spread over seeds, and its ratio to the best peer with percentile
bootstraps over documents.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import about, numbers, parser, print_about, words

HERE = Path(__file__).parent
PEERS = {
    "awq-w4a16": ("w4-awq-gptq", "w4-200", "w4-gptq", "w4-modelopt", "w4-nearest"),
    "fp4-w4a16": ("fp4-awq-gptq", "fp4-200", "fp4-gptq", "fp4-modelopt", "fp4-nearest"),
    "int8-a8w8c16": ("int8-smooth-gptq", "int8-200", "int8-gptq", "int8-nearest"),
    "nvfp4-w4a4": ("w4a4-awq-gptq", "w4a4-200", "w4a4-gptq", "w4a4-nearest"),
    "mxfp4-w4a4": ("mx4-awq-gptq", "mx4-200", "mx4-gptq", "mx4-nearest"),
    "int4-w4a8-groups": ("w4a8-awq-gptq", "w4a8-200", "w4a8-gptq", "w4a8-nearest"),
}
STRONGEST = {
    "awq-w4a16": ("w4-v2-200", "w4-awq-200", "w4-1000"),
    "fp4-w4a16": ("fp4-v2-200", "fp4-awq-200", "fp4-1000"),
    "int8-a8w8c16": ("int8-1000",),
}
"""AutoRound's second version, its own AWQ first, and five times its iterations: of the first seed
alone."""
ON_CPU = ("quantkit", "gptq", "smooth-gptq", "nearest")
"""Methods that one core finishes in a minute or two."""


@dataclass
class QualityJob:
    judge: str
    scheme: str
    name: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    turn: int = 0
    """Jobs of a turn come before those of the next, but that a worker keeps to its kind for one
    turn more."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.judge, self.scheme, self.name, self.seed

    @property
    def kind(self) -> str:
        if self.name.startswith("quantkit"):
            return "quantkit"
        method = self.name.rpartition("-")[2]
        if method == "modelopt":
            return method
        return "autoround" if method.isdigit() else "llmcompressor"

    @property
    def on_cpu(self) -> bool:
        return self.kind == "quantkit" or self.name.partition("-")[2] in ON_CPU


def jobs(given: argparse.Namespace) -> list[QualityJob]:
    """Most wanted first: the first scheme's longest of AutoRound, which would not end otherwise;
    then for each seed the schemes that have targets, and the other schemes, variants of ours with
    them; then the longest of other schemes. Of a turn the searches of AWQ come first, which take
    longest."""
    variants = json.loads(given.variants.read_text()) if given.variants else {}
    found = []
    for nth, seed in enumerate(given.seeds):
        for scheme in given.schemes:
            turn = 2 * nth + (scheme not in STRONGEST)
            named: list[tuple[int, str, dict[str, Any]]] = [(turn, "quantkit", {})]
            named += [
                (turn, name, {})
                for name in PEERS[scheme]
                if name in given.peers and (nth == 0 or not name.endswith("nearest"))
            ]
            named += [
                (turn, f"quantkit {name}", own) for name, own in variants.get(scheme, {}).items()
            ]
            if nth == 0:
                named += [
                    (-1 if scheme == given.schemes[0] else 99, name, {})
                    for name in STRONGEST.get(scheme, ())
                    if name in given.peers
                ]
            for own_turn, name, settings in named:
                found += [
                    QualityJob(judge, scheme, name, seed, settings, own_turn)
                    for judge in given.models
                ]
    return sorted(found, key=lambda job: (job.turn, not job.name.endswith("awq-gptq")))


def tokens_of(given: argparse.Namespace, judge: str, seed: int) -> Path:
    """The calibration tokens that ours sees with this seed, as a file."""
    from quantkit.calibrate.data import load_sequences
    from quantkit.calibrate.recipe import load_recipe
    from quantkit.tokenizer.chat import ChatTokenizer

    sizes = {
        "samples": given.samples,
        "seq_len": given.seq_len,
        "held_out": load_recipe("awq-w4a16").held_out,
    }
    sequences = load_sequences(
        str(given.judges / "own.jsonl"), ChatTokenizer(given.judges / judge), seed=seed, **sizes
    )
    path = Path(given.out / f"{judge}-tokens-{seed}.json")
    path.write_text(json.dumps([ids.tolist() for ids in sequences.calibration]))
    return path


class Worker:
    """A quality_worker.py of one kind; `ask` raises EOFError where it died."""

    def __init__(self, kind: str, log: Path, python: str, card: str) -> None:
        """card: the number of a GPU; an empty word for none."""
        self.kind = kind
        self.process = subprocess.Popen(
            [python, str(HERE / "quality_worker.py"), kind, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError from error
        line = self.process.stdout.readline()
        if not line:
            raise EOFError
        return dict(json.loads(line))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class QualityMatrix:
    """Slots take jobs; outputs go to the scorer, which writes what they came to."""

    def __init__(self, given: argparse.Namespace) -> None:
        given.out.mkdir(parents=True, exist_ok=True)
        self.given, self.start, self.tokens = (
            given,
            time.perf_counter(),
            dict[tuple[str, int], Path](),
        )
        done = (
            [json.loads(line) for line in given.file.read_text().splitlines()]
            if given.file.exists()
            else []
        )
        had = {(row["judge"], row["scheme"], row["name"], row["seed"]) for row in done}
        self.left = [job for job in jobs(given) if job.key not in had]
        self.lock, self.outputs = (
            threading.Lock(),
            {judge: queue.Queue[dict[str, Any] | None]() for judge in given.models},
        )
        self.workers: dict[str, Worker] = {}

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.start:6.1f} s  {text}", flush=True)

    def take(self, kind: str, *, gpu: bool) -> QualityJob | None:
        """The first job, or, as that spares imports, the first of its turn or the next that is of
        the worker's kind. Waits where only judges are left that are not there yet."""
        while True:
            with self.lock:
                able = [job for job in self.left if gpu or job.on_cpu]
                there = [job for job in able if (self.given.judges / job.judge).is_dir()]
                if there:
                    job = next(
                        (
                            job
                            for job in there
                            if job.turn <= there[0].turn + 1 and job.kind == kind
                        ),
                        there[0],
                    )
                    self.left.remove(job)
                    key = job.judge, job.seed
                    self.tokens[key] = self.tokens.get(key) or tokens_of(self.given, *key)
                    return job
            if not able:
                return None
            time.sleep(0.5)

    def begin(self, name: str, card: str, kind: str) -> None:
        """Another worker for a slot."""
        if name in self.workers:
            self.workers.pop(name).end()
        python = sys.executable if kind == "quantkit" else self.given.peer_python
        self.workers[name] = Worker(kind, self.given.out / f"{name}.log", python, card)

    def slot(self, name: str, card: str, kind: str) -> None:
        """kind: of the first worker; an empty word for that of the first job."""
        if kind:
            self.begin(name, card, kind)
        while (
            job := self.take(
                self.workers[name].kind if name in self.workers else "", gpu=bool(card)
            )
        ) is not None:
            if name not in self.workers or self.workers[name].kind != job.kind:
                self.begin(name, card, job.kind)
            asked = self._asked(job)
            try:
                answer = self.workers[name].ask(asked)
            except EOFError:
                self.workers.pop(name).end()
                answer = {"error": "the worker died"}
            answer["on"] = name
            if "error" in answer:
                self.say(f"{' '.join(map(str, job.key))}: {answer['error']} ({name})")
            else:
                self.outputs[job.judge].put(asked | answer)

    def _asked(self, job: QualityJob) -> dict[str, Any]:
        given = self.given
        sizes = {
            "samples": given.samples,
            "seq_len": given.seq_len,
            "seed": job.seed,
            "calibration": str(given.judges / "own.jsonl"),
        }
        return {
            "judge": job.judge,
            "scheme": job.scheme,
            "name": job.name,
            "seed": job.seed,
            "source": str(given.judges / job.judge),
            "tokens": str(self.tokens[job.judge, job.seed]),
            "recipe": job.name,
            "settings": sizes | job.settings,
            "out": str(given.out / "-".join(map(str, job.key)).replace(" ", "-")),
            "judges": str(given.judges),
            "documents": given.documents,
            "remove": True,
            "headrooms": given.headrooms,
        }

    def score(self, judge: str, card: str) -> None:
        """Outputs of one judge; its worker holds what the source answers."""
        name = f"score-{judge}"
        while (output := self.outputs[judge].get()) is not None:
            if name not in self.workers:
                self.workers[name] = Worker(
                    "score", self.given.out / f"{name}.log", sys.executable, card
                )
            try:
                answer = self.workers[name].ask(output)
            except EOFError:
                self.workers.pop(name).end()
                answer = {"error": "the worker died"}
            self.keep(output, answer)

    def keep(self, output: dict[str, Any], answer: dict[str, Any]) -> None:
        """A line of FILE for an output that was judged."""
        key = {name: output[name] for name in ("judge", "scheme", "name", "seed")}
        label = " ".join(map(str, key.values()))
        if "error" in answer:
            self.say(f"{label}, judging: {answer['error']}")
            return
        made = {name: output[name] for name in ("seconds", "on", "reported") if name in output}
        row = key | made | {name: answer[name] for name in ("scores", "headroom") if name in answer}
        with self.lock, self.given.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        means = [1e3 * sum(own["kl"]) / sum(own["tokens"]) for own in answer["scores"].values()]
        kl = ", ".join(f"{mean:.3f}" for mean in means)
        self.say(
            f"{label}: KL {kl} e-3 (tuning, final); {output['seconds']} s on {output['on']}, "
            f"judged in {answer['seconds']}"
        )

    def run(self) -> None:
        """One job of every GPU comes before a second of any."""
        slots = [
            (f"gpu{card}-{i}", card, kind)
            for i, kind in enumerate(self.given.gpu)
            for card in self.given.cards
        ]
        slots += [(f"cpu{i}", "", "") for i in range(self.given.cpu)]
        cards = self.given.cards or [""]
        judging = [(judge, cards[i % len(cards)]) for i, judge in enumerate(self.given.models)]
        scorers = [threading.Thread(target=self.score, args=one, daemon=True) for one in judging]
        threads = [threading.Thread(target=self.slot, args=one, daemon=True) for one in slots]
        for thread in (*threads, *scorers):
            thread.start()
        until = self.start + self.given.seconds
        for thread in threads:
            thread.join(max(0.0, until - time.perf_counter()))
        for outputs in self.outputs.values():
            outputs.put(None)
        for thread in scorers:
            thread.join(max(0.0, until - time.perf_counter()))
        with self.lock:
            left = len(self.left)
            self.left.clear()
        for worker in list(self.workers.values()):
            worker.end()
        self.say(f"{left} runs were not begun")


def peer_environment() -> Path:
    """The peers in an environment of its own, with the torch that the project is tested with;
    made whole or not at all."""
    home = HERE.parent / ".venv-llmcompressor"
    done = home / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        wanted = ["llmcompressor==0.14.0.1", "nvidia-modelopt==0.47.0"]
        wanted += ["transformers==5.17.0", "torch==2.13.0"]
        subprocess.run([str(home / "bin/pip"), "install", "-q", *wanted], check=True)
        subprocess.run(
            [str(home / "bin/pip"), "install", "-q", "--no-deps", "auto-round==0.16.1"], check=True
        )
        done.touch()
    return home / "bin/python"


def main() -> None:
    def kinds(text: str) -> list[str]:
        """KIND=N,... as N words of each kind, the kinds in turn."""
        counts = {
            kind: int(count) for kind, _, count in (word.partition("=") for word in words(text))
        }
        return [
            kind
            for i in range(max(counts.values(), default=0))
            for kind, count in counts.items()
            if i < count
        ]

    options = parser(__doc__)
    options.add_argument("what", choices=("run", "table"))
    options.add_argument("file", type=Path)
    options.add_argument("--judges", type=Path)
    options.add_argument("--out", type=Path)
    options.add_argument("--models", type=words, default=["dense", "experts", "deepseek"])
    options.add_argument("--schemes", type=words, default=list(PEERS))
    options.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--seq-len", type=int, default=512)
    options.add_argument("--documents", type=int, default=40, help="of each split")
    options.add_argument("--seconds", type=float, default=500)
    options.add_argument(
        "--cards", type=words, default=["0"], help="numbers of the GPUs; an empty word for none"
    )
    options.add_argument(
        "--gpu",
        type=kinds,
        default=kinds("quantkit=3,llmcompressor=3,autoround=3"),
        help="workers on each, by first kind",
    )
    options.add_argument("--cpu", type=int, default=4, help="workers on a core")
    options.add_argument("--variants", type=Path)
    options.add_argument(
        "--headrooms",
        action="store_true",
        help="judge nvfp4-w4a4 under other divisors of its inputs, too",
    )
    options.add_argument(
        "--peers",
        type=words,
        default=[name for table in (PEERS, STRONGEST) for own in table.values() for name in own],
        help="others' recipes next to ours; an empty word for none",
    )
    options.add_argument(
        "--peer-python",
        help="an environment that has the peers; made in .venv-llmcompressor otherwise",
    )
    options.add_argument("--split", choices=("tuning", "final"), default="final")
    given = options.parse_args()
    if given.what == "run":
        print_about(about("cuda" if given.cards else "cpu"))
        if given.peers and not given.peer_python:
            given.peer_python = str(peer_environment())
        QualityMatrix(given).run()
    else:
        from quality_evaluator import table

        table(given.file, given.split)


if __name__ == "__main__":
    main()
