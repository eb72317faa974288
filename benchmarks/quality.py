"""Quality at the same bits: quantkit beside llm-compressor and AutoRound, on several models, one
set of calibration tokens, one evaluator.

    python benchmarks/quality.py --out OUT [--judges DIR] [--models tiny-r1,deepseek,dense,experts]
    [--schemes awq-w4a16,...]
        [--split final|tuning] [--seeds 0,1,2] [--samples 128] [--seq-len 512] [--peers NAME,...]
        [--variants FILE.json] [--jobs 1]

tiny-r1 is the built-in FP8 checkpoint; peers get it decoded to BF16. The others are those of
judge_models.py in DIR. Every output is read
back and judged by quality_evaluator.py. KL(source || output) per token in nats. Intervals are percentile bootstraps over documents, paired;
every figure is the mean over the calibration seeds. Settings are chosen on the tuning split; the
final split is looked at once they are fixed. --variants: {scheme: {name: {recipe key: value}}},
each a row beside ours; "mixture": {"bits": 4.5} is such a value, too. Last: for each scheme the
ratio to the best peer, mean over models. Seconds are of whole processes, imports included: by the
clock, and of all cores together, which a busy machine does not lengthen as much. A run that OUT
holds already, with its seconds, is not repeated.
"""

import argparse
import itertools
import json
import math
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_evaluator import Scores, ratio, run_model, score
from torch import Tensor

from quantkit.calibrate.data import load_sequences
from quantkit.calibrate.recipe import load_recipe
from quantkit.checkpoint.hub import find_model
from quantkit.common.errors import QuantkitError
from quantkit.tokenizer.chat import ChatTokenizer

REPOSITORY = Path(__file__).parents[1]
HELD_OUT = REPOSITORY / "eval/data/tiny-heldout.jsonl"
SPLITS = {"tuning": (51_001, 128), "final": (51_002, 192)}
"""Split -> seed and number of freshly drawn documents of tiny-r1; its final split also has the
shipped held-out file."""
JUDGED_DOCUMENTS, JUDGED_TOKENS = 40, 256
"""Of the held-out text of a trained judge: even ones tune, odd ones are final."""
PEERS = {
    "awq-w4a16": ("w4-200", "w4-awq-gptq", "w4-gptq", "w4-nearest"),
    "fp4-w4a16": ("fp4-200", "fp4-awq-gptq", "fp4-gptq", "fp4-nearest"),
    "nvfp4-w4a4": ("w4a4-awq-gptq", "w4a4-gptq", "w4a4-nearest"),
    "int4-w4a8-groups": ("w4a8-200", "w4a8-awq-gptq", "w4a8-gptq", "w4a8-nearest"),
    "int8-a8w8c16": ("int8-smooth-gptq", "int8-gptq", "int8-nearest"),
}
"""A number is AutoRound's iterations; nearest is plain rounding, which does not count as a peer."""


@dataclass(frozen=True)
class Judge:
    """A model that outputs are held against. calibration: its own text."""

    name: str
    source: Path
    calibration: Path
    documents: list[Tensor]


def find_judge(name: str, folder: Path | None, split: str) -> Judge:
    if name == "tiny-r1":
        source = find_model(name)
        return Judge(
            name, source, source / "calibration.jsonl", tiny_documents(split, ChatTokenizer(source))
        )
    assert folder is not None, f"give --judges, where {name} is"
    tokenizer = ChatTokenizer(folder / name)
    lines = (
        (folder / "held-out.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()[split == "final" :: 2][:JUDGED_DOCUMENTS]
    )
    ids = [tokenizer.encode(json.loads(line)["text"])[:JUDGED_TOKENS] for line in lines]
    return Judge(
        name,
        folder / name,
        folder / "own.jsonl",
        [torch.tensor(one, dtype=torch.int64) for one in ids],
    )


def tiny_documents(split: str, tokenizer: ChatTokenizer) -> list[Tensor]:
    """Token ids of the split's documents; no problem of one split, or of the shipped files, is in
    another."""
    sys.path.insert(0, str(REPOSITORY / "tools/tiny_r1"))
    import texts

    shipped = [
        json.loads(line)["text"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()
    ]
    taken: set[str] = set()
    drawn = {
        name: list(texts.distinct(random.Random(seed), "eval", 2 * count, taken))
        for name, (seed, count) in SPLITS.items()
    }
    fresh = [
        text for problem in drawn[split] if (text := texts.conversation(problem)) not in shipped
    ][: SPLITS[split][1]]
    chosen = fresh + (shipped if split == "final" else [])
    return [torch.tensor(tokenizer.encode(text), dtype=torch.int64) for text in chosen]


# --- runs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedRun:
    """One output, and the seconds of the process that made it: by the clock, and of all cores."""

    path: Path
    wall: float
    cpu: float


@dataclass(frozen=True)
class Bench:
    out: Path
    device: str
    peer_python: Path
    samples: int
    seq_len: int
    lock: threading.Lock

    def ours(
        self, judge: Judge, scheme: str, seed: int, name: str, settings: dict[str, Any]
    ) -> TimedRun:
        target = self.out / f"{judge.name}-{name}-{scheme}-{seed}"
        sizes = {
            "samples": self.samples,
            "seq_len": self.seq_len,
            "seed": seed,
            "calibration": str(judge.calibration),
        }
        file = target.with_name(f"{target.name}.settings.json")
        file.write_text(json.dumps(sizes | settings))
        script = Path(__file__).with_name("quality_ours.py")
        return timed(
            [
                sys.executable,
                str(script),
                str(judge.source),
                str(target),
                scheme,
                self.device,
                str(file),
            ],
            target,
        )

    def peer(self, judge: Judge, recipe: str, seed: int) -> TimedRun:
        target = self.out / f"{judge.name}-peer-{recipe}-{seed}"
        with self.lock:
            plain, tokens = self._plain(judge), self._tokens(judge, seed)
        script = (
            "quality_auto_round.py" if recipe.rpartition("-")[2].isdigit() else "llm_compressor.py"
        )
        return timed(
            [
                str(self.peer_python),
                str(Path(__file__).with_name(script)),
                str(plain),
                str(tokens),
                recipe,
                str(target),
            ],
            target,
        )

    def _plain(self, judge: Judge) -> Path:
        """The source in BF16."""
        if judge.name != "tiny-r1":
            return judge.source
        plain = self.out / "bf16"
        if not plain.exists():
            timed(
                [
                    sys.executable,
                    "-m",
                    "quantkit",
                    "convert",
                    str(judge.source),
                    str(plain),
                    "--dtype",
                    "bf16",
                ],
                plain,
            )
        return plain

    def _tokens(self, judge: Judge, seed: int) -> Path:
        """The calibration tokens that ours sees with this seed, as a file."""
        held_out = load_recipe("awq-w4a16").held_out
        sizes = {
            "samples": self.samples,
            "seq_len": self.seq_len,
            "seed": seed,
            "held_out": held_out,
        }
        sequences = load_sequences(str(judge.calibration), ChatTokenizer(judge.source), **sizes)
        path = self.out / f"{judge.name}-tokens-{seed}.json"
        path.write_text(json.dumps([ids.tolist() for ids in sequences.calibration]))
        return path


def timed(command: list[str], target: Path) -> TimedRun:
    """Run the command that makes `target`, unless it was run before."""
    facts = target.with_name(f"{target.name}.seconds")
    if target.exists() and facts.exists():
        return TimedRun(target, **json.loads(facts.read_text()))
    start = time.perf_counter()
    with target.with_name(f"{target.name}.log").open("w") as file:
        wrapped = [sys.executable, __file__, "--time", f"{facts}.cpu", *command]
        subprocess.run(wrapped, check=True, stdout=file, stderr=file)
    seconds = {"wall": time.perf_counter() - start, "cpu": float(Path(f"{facts}.cpu").read_text())}
    facts.write_text(json.dumps(seconds))
    return TimedRun(target, **seconds)


def write_cpu_seconds(path: Path, command: list[str]) -> int:
    """Run a command alone in this process, so that what its children took is its own."""
    code = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    path.write_text(str(used.ru_utime + used.ru_stime))
    return code


def peer_environment() -> Path:
    """llm-compressor in an environment of its own, with the torch that the project is tested with;
    made whole or not at all."""
    home = REPOSITORY / ".venv-llmcompressor"
    done = home / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        wanted = ["llmcompressor==0.14.0.1", "transformers==5.17.0", "torch==2.13.0"]
        subprocess.run([str(home / "bin/pip"), "install", "-q", *wanted], check=True)
        subprocess.run(
            [str(home / "bin/pip"), "install", "-q", "--no-deps", "auto-round==0.16.1"], check=True
        )
        done.touch()
    return home / "bin/python"


# --- table
# ---------------------------------------------------------------------------------------------------------------


def summary(runs: list[Scores]) -> dict[str, float]:
    kl, top1 = (
        [getattr(run, name).sum() / run.tokens.sum() for run in runs] for name in ("kl", "top1")
    )
    experts = [float(run.experts.mean()) for run in runs]
    return {
        "kl": float(np.mean(kl)),
        "kl_seeds": float(np.std(kl, ddof=1)) if len(kl) > 1 else float("nan"),
        "top1": float(np.mean(top1)),
        "experts": float(np.mean(experts)),
    }


def line(row: dict[str, Any]) -> str:
    mean, low, high = row["ratio"]
    kl = f"KL {1e3 * row['kl']:.3f}e-3 (seeds {1e3 * row['kl_seeds']:.3f})"
    seconds = f"{row['wall']:6.1f} s, {row['cpu']:6.1f} s CPU"
    return (
        f"{kl}  top-1 {row['top1']:.4f}  experts {row['experts']:.4f}  {seconds}  ours / this "
        f"{mean:.3f} [{low:.3f}, {high:.3f}]"
    )


def is_peer(name: str) -> bool:
    return not name.startswith("quantkit") and not name.endswith("nearest")


def means_over_models(tables: dict[str, dict[str, Any]], scheme: str) -> dict[str, float]:
    """For each row of ours: geometric mean over the models of its KL by that of the model's best
    peer."""
    ratios: dict[str, list[float]] = {}
    for table in tables.values():
        rows = table.get(scheme, {})
        peers = [row["kl"] for name, row in rows.items() if is_peer(name)]
        for name, row in rows.items() if peers else ():
            if name.startswith("quantkit"):
                ratios.setdefault(name, []).append(row["kl"] / min(peers))
    return {name: math.exp(float(np.mean(np.log(found)))) for name, found in ratios.items()}


@dataclass(frozen=True)
class Row:
    """One way to quantize one judge by one scheme: a run for each seed, done or to come."""

    judge: Judge
    scheme: str
    name: str
    runs: list[Future[TimedRun]]


def started(
    bench: Bench, judges: list[Judge], pool: ThreadPoolExecutor, given: argparse.Namespace
) -> list[Row]:
    """Scheme by scheme, the peers first, which take longest."""
    rows = []
    for scheme in given.schemes:
        peers = [recipe for recipe in PEERS[scheme] if given.peers is None or recipe in given.peers]
        for recipe, judge in itertools.product(peers, judges):
            rows.append(
                Row(
                    judge,
                    scheme,
                    recipe,
                    [pool.submit(bench.peer, judge, recipe, seed) for seed in given.seeds],
                )
            )
        ours = {"quantkit": {}} | {
            f"quantkit {name}": settings
            for name, settings in given.variants.get(scheme, {}).items()
        }
        for (name, settings), judge in itertools.product(ours.items(), judges):
            label = name.replace(" ", "-")
            rows.append(
                Row(
                    judge,
                    scheme,
                    name,
                    [
                        pool.submit(bench.ours, judge, scheme, seed, label, settings)
                        for seed in given.seeds
                    ],
                )
            )
    return rows


def as_finished(rows: list[Row]) -> Iterator[Row]:
    """Rows as their last runs end."""
    left = {id(row): len(row.runs) for row in rows}
    of = {future: row for row in rows for future in row.runs}
    for future in as_completed(of):
        row = of[future]
        left[id(row)] -= 1
        if not left[id(row)]:
            yield row


class JudgeTable:
    """What the runs of one judge by one scheme came to. reference: the source's own answers."""

    def __init__(
        self, judge: Judge, device: torch.device, reference: list[tuple[Tensor, Tensor]]
    ) -> None:
        self.judge, self.device, self.reference = judge, device, reference
        self.scores: dict[str, list[Scores]] = {}
        self.seconds: dict[str, dict[str, float]] = {}

    def take(self, row: Row) -> None:
        """Judge the outputs of a row; one whose run failed, or whose output is none, is told and
        left out."""
        try:
            runs = [future.result() for future in row.runs]
            self.scores[row.name] = [
                score(self.reference, run_model(run.path, self.judge.documents, self.device))
                for run in runs
            ]
        except (subprocess.CalledProcessError, QuantkitError) as error:
            print(f"{row.scheme} on {row.judge.name}, {row.name}: {error}", flush=True)
            return
        self.seconds[row.name] = {
            "wall": min(run.wall for run in runs),
            "cpu": min(run.cpu for run in runs),
        }
        kl = " ".join(
            f"{1e3 * one.kl.sum() / one.tokens.sum():.3f}e-3" for one in self.scores[row.name]
        )
        print(f"{row.scheme} on {row.judge.name}, {row.name}: KL {kl}", flush=True)

    def figures(self) -> dict[str, dict[str, Any]]:
        first = self.scores.get("quantkit")
        return {
            name: summary(runs)
            | self.seconds[name]
            | {"ratio": ratio(first, runs) if first else (math.nan,) * 3}
            for name, runs in self.scores.items()
        }


def run(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    python = given.peer_python or (
        peer_environment() if given.peers != [] else Path(sys.executable)
    )
    bench = Bench(
        given.out.resolve(), given.device, python, given.samples, given.seq_len, threading.Lock()
    )
    device = torch.device(given.device)
    judges = [find_judge(name, given.judges, given.split) for name in given.models]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = started(bench, judges, pool, given)
        references = {
            judge.name: run_model(judge.source, judge.documents, device) for judge in judges
        }
        tables = {
            judge.name: {
                scheme: JudgeTable(judge, device, references[judge.name])
                for scheme in given.schemes
            }
            for judge in judges
        }
        for row in as_finished(rows):
            tables[row.judge.name][row.scheme].take(row)
            (given.out / "quality.json").write_text(json.dumps(figures_of(tables), indent=1))
    show(figures_of(tables), given.schemes)


def figures_of(tables: dict[str, dict[str, JudgeTable]]) -> dict[str, dict[str, Any]]:
    return {
        name: {scheme: table.figures() for scheme, table in own.items()}
        for name, own in tables.items()
    }


def show(figures: dict[str, dict[str, Any]], schemes: list[str]) -> None:
    for scheme, name in itertools.product(schemes, figures):
        print(f"{scheme} on {name}", flush=True)
        for label, row in figures[name][scheme].items():
            print(f"  {label:18} {line(row)}", flush=True)
    for scheme in schemes:
        for name, mean in means_over_models(figures, scheme).items():
            print(
                f"{scheme}, {name}: {mean:.3f} of the best peer, mean of {', '.join(figures)}",
                flush=True,
            )


def main() -> None:
    if sys.argv[1:2] == ["--time"]:
        sys.exit(write_cpu_seconds(Path(sys.argv[2]), sys.argv[3:]))

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--judges", type=Path, help="folder of judge_models.py")
    parser.add_argument("--models", type=words, default=["tiny-r1"])
    parser.add_argument("--split", choices=tuple(SPLITS), default="final")
    parser.add_argument(
        "--seeds", type=lambda text: [int(seed) for seed in words(text)], default=[0, 1, 2]
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--schemes", type=words, default=list(PEERS))
    parser.add_argument("--peers", type=words, help="some of them only; an empty word for none")
    parser.add_argument(
        "--peer-python", type=Path, help="an environment that has the peers; made otherwise"
    )
    parser.add_argument(
        "--variants", type=lambda path: json.loads(Path(path).read_text()), default={}
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
