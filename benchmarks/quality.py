"""Quality at the same bits: quantkit and llm-compressor on one model, one set of calibration tokens, one evaluator.

    python benchmarks/quality.py --out OUT [--split final|tuning] [--seeds 0,1,2] [--schemes awq-w4a16,...] [--peer-python PYTHON]

The source is tiny-r1's FP8 checkpoint; the peer gets it decoded to BF16. Every output is read back by quantkit, decoded to float32 and
run with float32 activations (rounded to int8 per token where the scheme says so), one document a sequence, so neither side gains by a
kernel. KL(source || output) per token in nats. Intervals are percentile bootstraps over documents, paired; every figure is the mean
over the calibration seeds. Settings are chosen on the tuning split; the final split is looked at once they are fixed.
Seconds are of whole processes, imports included: by the clock, and of all cores together, which a busy machine does not lengthen as much.
A run that OUT holds already, with its seconds, is not repeated.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantkit_kernels import SILU, Gating
from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.data import load_sequences
from quantkit.checkpoint.reader import Checkpoint
from quantkit.hub import find_model
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.weights import ExpertsOp, LinearOp
from quantkit.quant.weights import dequantize
from quantkit.recipe import load_recipe
from quantkit.tokenizer.chat import ChatTokenizer

REPOSITORY = Path(__file__).parents[1]
HELD_OUT = REPOSITORY / "eval/data/tiny-heldout.jsonl"
SPLITS = {"tuning": (51_001, 128), "final": (51_002, 192)}
"""Split -> seed and number of freshly drawn documents; the final split also has the shipped held-out file."""
PEERS = {
    "awq-w4a16": ("w4-awq-gptq", "w4-gptq"),
    "fp4-w4a16": ("fp4-awq-gptq", "fp4-gptq"),
    "int8-a8w8c16": ("int8-smooth-gptq", "int8-gptq"),
}
TOKENS_A_PASS = 4096


@dataclass(frozen=True)
class Scores:
    """Per document, float64 [D]: summed KL, same first choices, predicted tokens; shares of experts chosen alike."""

    kl: np.ndarray
    top1: np.ndarray
    tokens: np.ndarray
    experts: np.ndarray


# --- evaluator -----------------------------------------------------------------------------------------------------------


class Decoded:
    """A checkpoint's weights in float32: the `Weights` of a forward. Inputs of int8 linears are rounded per token."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.int8 = checkpoint.scheme is not None and checkpoint.scheme.activation_bits == 8
        self.chosen: list[Tensor] = []

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.read(name).float()

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def dequantized(self, module: str) -> Tensor:
        return dequantize(self.checkpoint.weight(module))

    def linear(self, module: str) -> LinearOp:
        return self.fused_linear((module,))

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        weight = torch.cat([self.dequantized(module) for module in modules])
        int8 = self.int8 and modules[0] in self.checkpoint.linears
        return lambda x: F.linear(round_rows(x) if int8 else x, weight)

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        assert gating == SILU, gating
        sides = [[self.linear(f"{prefix}.{e}.{side}_proj") for side in ("gate", "up", "down")] for e in range(num_experts)]

        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            self.chosen.append(topk_ids)
            total = torch.zeros_like(x)
            for expert, (gate, up, down) in enumerate(sides):
                tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
                mine = x[tokens]
                total.index_add_(0, tokens, down(F.silu(gate(mine)) * up(mine)) * topk_weights[tokens, slots, None])
            return total

        return run

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        return None

    def mla_prolog(self, *unused: Any) -> None:
        """No operator of a decode step: documents are read whole."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def round_rows(x: Tensor) -> Tensor:
    """Nearest int8 values with one symmetric step per row."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (x / step).round_().mul_(step)


@torch.inference_mode()
def run_model(path: Path, documents: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For every document: log-probabilities [T, vocab], and the experts chosen, sorted, [layers, T, k]."""
    checkpoint = Checkpoint.open(path)
    architecture = find_architecture(checkpoint.config)
    weights = Decoded(checkpoint)
    model = architecture.Model(architecture.Config.from_dict(checkpoint.config), weights)
    found = []
    for part in _passes(documents):
        weights.chosen.clear()
        lengths = [len(ids) for ids in part]
        logs = model.logits(model(torch.cat(part), CausalContext(lengths))).log_softmax(-1)
        chosen = torch.stack(weights.chosen)
        found += zip(logs.split(lengths), chosen.split(lengths, dim=1))
    return found


def _passes(documents: list[Tensor]) -> list[list[Tensor]]:
    parts: list[list[Tensor]] = [[]]
    for ids in documents:
        if sum(map(len, parts[-1])) + len(ids) > TOKENS_A_PASS and parts[-1]:
            parts.append([])
        parts[-1].append(ids)
    return parts


def score(reference: list[tuple[Tensor, Tensor]], output: list[tuple[Tensor, Tensor]]) -> Scores:
    rows = []
    for (base, theirs), (logs, ours) in zip(reference, output, strict=True):
        kl = (base.double().exp() * (base.double() - logs.double()))[:-1].sum()
        same = (base.argmax(-1) == logs.argmax(-1))[:-1].sum()
        alike = (theirs[..., :, None] == ours[..., None, :]).any(-1).float().mean()
        rows.append((float(kl), float(same), len(base) - 1, float(alike)))
    return Scores(*np.array(rows, dtype=np.float64).T)


# --- documents -----------------------------------------------------------------------------------------------------------


def documents(split: str, tokenizer: ChatTokenizer) -> list[Tensor]:
    """Token ids of the split's documents; no problem of one split, or of the shipped files, is in another."""
    sys.path.insert(0, str(REPOSITORY / "tools/tiny_r1"))
    import texts

    shipped = [json.loads(line)["text"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    taken: set[str] = set()
    drawn = {name: list(texts.distinct(random.Random(seed), "eval", 2 * count, taken)) for name, (seed, count) in SPLITS.items()}
    fresh = [text for problem in drawn[split] if (text := texts.conversation(problem)) not in shipped][: SPLITS[split][1]]
    chosen = fresh + (shipped if split == "final" else [])
    return [torch.tensor(tokenizer.encode(text), dtype=torch.int64) for text in chosen]


# --- runs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One output, and the seconds of the process that made it: by the clock, and of all cores."""

    path: Path
    wall: float
    cpu: float


@dataclass(frozen=True)
class Bench:
    out: Path
    source: Path
    peer_python: Path | None
    samples: int

    def ours(self, scheme: str, seed: int) -> Run:
        target = self.out / f"quantkit-{scheme}-{seed}"
        arguments = ["--scheme", scheme, "--out", str(target), "--seed", str(seed), "--samples", str(self.samples), "--overwrite"]
        return timed([sys.executable, "-m", "quantkit", "quantize", str(self.source), *arguments], target)

    def peer(self, recipe: str, seed: int) -> Run:
        target = self.out / f"peer-{recipe}-{seed}"
        plain = self.out / "bf16"
        if not plain.exists():
            timed([sys.executable, "-m", "quantkit", "convert", str(self.source), str(plain), "--dtype", "bf16"], plain)
        tokens = self.out / f"tokens-{seed}.json"
        settings = load_recipe("awq-w4a16")
        data = str(self.source / "calibration.jsonl")
        sequences = load_sequences(
            data,
            ChatTokenizer(self.source),
            samples=self.samples,
            held_out=settings.held_out,
            seq_len=settings.seq_len,
            seed=seed,
        )
        tokens.write_text(json.dumps([ids.tolist() for ids in sequences.calibration]))
        script = Path(__file__).with_name("llm_compressor.py")
        return timed([str(self.peer_python), str(script), str(plain), str(tokens), recipe, str(target)], target)


def timed(command: list[str], target: Path) -> Run:
    """Run the command that makes `target`, unless it was run before."""
    facts = target.with_suffix(".seconds")
    if target.exists() and facts.exists():
        return Run(target, **json.loads(facts.read_text()))
    before, start = os.times(), time.perf_counter()
    with target.with_suffix(".log").open("w") as file:
        subprocess.run(command, check=True, stdout=file, stderr=file)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    seconds = {"wall": time.perf_counter() - start, "cpu": cpu}
    facts.write_text(json.dumps(seconds))
    return Run(target, **seconds)


def peer_environment() -> Path:
    """llm-compressor in an environment of its own, with the torch that the project is tested with; made whole or not at all."""
    home = REPOSITORY / ".venv-llmcompressor"
    done = home / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        wanted = ["llmcompressor==0.14.0.1", "transformers==5.17.0", "torch==2.13.0"]
        subprocess.run([str(home / "bin/pip"), "install", "-q", *wanted], check=True)
        done.touch()
    return home / "bin/python"


# --- table ---------------------------------------------------------------------------------------------------------------


def summary(runs: list[Scores]) -> dict[str, float]:
    kl, top1 = ([getattr(run, name).sum() / run.tokens.sum() for run in runs] for name in ("kl", "top1"))
    experts = [float(run.experts.mean()) for run in runs]
    return {
        "kl": float(np.mean(kl)),
        "kl_seeds": float(np.std(kl, ddof=1)) if len(kl) > 1 else float("nan"),
        "top1": float(np.mean(top1)),
        "experts": float(np.mean(experts)),
    }


def ratio(ours: list[Scores], theirs: list[Scores], resamples: int = 2000) -> tuple[float, float, float]:
    """KL of ours over theirs, and its 95 % interval over documents; seeds are averaged within a document."""
    a, b = (np.mean([run.kl for run in runs], axis=0) for runs in (ours, theirs))
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(a), (resamples, len(a)))
    low, high = np.quantile(a[draws].sum(1) / b[draws].sum(1), [0.025, 0.975])
    return float(a.sum() / b.sum()), float(low), float(high)


def line(row: dict[str, Any]) -> str:
    mean, low, high = row["ratio"]
    kl = f"KL {1e3 * row['kl']:.3f}e-3 (seeds {1e3 * row['kl_seeds']:.3f})"
    seconds = f"{row['wall']:6.1f} s, {row['cpu']:6.1f} s CPU"
    return f"{kl}  top-1 {row['top1']:.4f}  experts {row['experts']:.4f}  {seconds}  ours / this {mean:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", choices=tuple(SPLITS), default="final")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--schemes", default=",".join(PEERS))
    parser.add_argument("--peer-python", type=Path, help="an environment that has llm-compressor; made otherwise")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    source = find_model("tiny-r1")
    bench = Bench(args.out.resolve(), source, args.peer_python or peer_environment(), args.samples)
    ids = documents(args.split, ChatTokenizer(source))
    reference = run_model(source, ids)
    table = {}
    for scheme in args.schemes.split(","):
        rows = {"quantkit": [bench.ours(scheme, seed) for seed in seeds]}
        rows |= {recipe: [bench.peer(recipe, seed) for seed in seeds] for recipe in PEERS[scheme]}
        scores = {name: [score(reference, run_model(run.path, ids)) for run in runs] for name, runs in rows.items()}
        best = min(PEERS[scheme], key=lambda name: summary(scores[name])["kl"])
        table[scheme] = {
            name: summary(runs)
            | {"wall": min(run.wall for run in rows[name]), "cpu": min(run.cpu for run in rows[name])}
            | {"ratio": ratio(scores["quantkit"], runs)}
            for name, runs in scores.items()
        }
        print(f"{scheme}, best peer {best}", flush=True)
        for name, row in table[scheme].items():
            print(f"  {name:18} {line(row)}", flush=True)
    (args.out / "quality.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
