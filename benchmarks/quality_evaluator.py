"""One evaluator for all checkpoints: decoded to float32, float32 activations, documents alone,
KL(source || output) in nats; and the table of what runs came to.

Activations are rounded to int8, a step a token, to MXFP4, or to NVFP4 under the stored scale, where
the scheme says so; no side gains by a kernel. A checkpoint of decoded values says it in
activations.json (quality_peers.py); its NVFP4 inputs have the scale that a pass of its own asks for.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantkit_kernels import SILU, Gating, add_rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.models import find_architecture
from quantkit.models.activation_quant import ActivationQuant
from quantkit.models.context import CausalContext
from quantkit.models.weights import ExpertsOp, LinearOp
from quantkit.tokenizer.chat import ChatTokenizer

TOKENS_A_PASS = 32768
"""All documents of a split at once: choosing an expert's tokens waits for the device."""
JUDGED_TOKENS = 256
"""Of a document of a judge's held-out text: even documents tune, odd ones are final."""


@dataclass(frozen=True)
class Scores:
    """Per document, float64 [D]: summed KL, same first choices, predicted tokens; shares of experts
    chosen alike."""

    kl: np.ndarray
    top1: np.ndarray
    tokens: np.ndarray
    experts: np.ndarray


class Decoded:
    """A checkpoint's weights in float32: the `Weights` of a forward. Inputs of int8 linears are
    rounded per token."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.chosen: list[Tensor] = []
        note = checkpoint.path / "activations.json"
        self.decoded: dict[str, Any] = (
            json.loads(note.read_text()) if note.is_file() else {"bits": 16, "kept": [], "grid": ""}
        )
        self.noted_grid = Mxfp4Grid(activation_bits=4) if self.decoded["grid"] == "mxfp4" else None

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.read(name).float().to(self.device)

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def dequantized(self, module: str) -> Tensor:
        return dequantize(self.checkpoint.weight(module, self.device))

    def input_rotation(self, module: str) -> int:
        return self.checkpoint.input_rotation(module)

    def linear(self, module: str) -> LinearOp:
        return self.fused_linear((module,))

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        weights = [self.checkpoint.weight(module, self.device) for module in modules]
        dense = torch.cat([dequantize(weight) for weight in weights])
        bits = self.activation_bits(modules[0])
        linear = self.checkpoint.linears.get(modules[0])
        grid = self.noted_grid if linear is None else linear.grid
        if bits == 4 or (grid is not None and not grid.is_integer):
            reading = ActivationQuant.of(weights[0], bits, grid)
            return lambda x: F.linear(reading(x) if len(x) else x, dense)
        return lambda x: F.linear(round_rows(x) if bits == 8 else x, dense)

    def activation_bits(self, module: str) -> int:
        """Of what the linear reads; siblings are alike."""
        if module in self.checkpoint.linears:
            return self.checkpoint.activation_bits(module)
        return 16 if module.endswith(tuple(self.decoded["kept"])) else int(self.decoded["bits"])

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        assert gating == SILU, gating
        gating = gating.rotated(self.input_rotation(f"{prefix}.0.down_proj"))
        sides = [
            [self.linear(f"{prefix}.{e}.{side}_proj") for side in ("gate", "up", "down")]
            for e in range(num_experts)
        ]

        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            self.chosen.append(topk_ids)
            total = torch.zeros_like(x)
            for expert, (gate, up, down) in enumerate(sides):
                tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
                mine = x[tokens]
                total.index_add_(
                    0,
                    tokens,
                    down(gating(gate(mine), up(mine))) * topk_weights[tokens, slots, None],
                )
            return total

        return run

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        return None

    def mla_prolog(self, *unused: Any) -> None:
        """No operator of a decode step: documents are read whole."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, gain, eps)


def round_rows(x: Tensor) -> Tensor:
    """Nearest int8 values with one symmetric step per row."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (x / step).round_().mul_(step)


def documents_of(folder: Path, judge: str, split: str, count: int) -> list[tuple[str, Tensor]]:
    """(kind, token ids) of the split's held-out documents, at most `count` of a kind; no chats for a
    model without a chat template."""
    tokenizer = ChatTokenizer(folder / judge)
    lines = (folder / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[Tensor]] = defaultdict(list)
    for record in map(json.loads, lines[split == "final" :: 2]):
        own = found[record.get("kind", "")]
        messages = record.get("messages")
        if len(own) < count and (messages is None or tokenizer.templates):
            ids = tokenizer.encode_chat(messages) if messages else tokenizer.encode(record["text"])
            own.append(torch.tensor(ids[:JUDGED_TOKENS], dtype=torch.int64))
    return [(kind, ids) for kind, own in found.items() for ids in own]


@torch.inference_mode()
def run_model(
    path: Path, documents: Sequence[Tensor], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """For every document: log-probabilities [T, vocab], and the experts chosen, [layers, T, k], of
    no layer in a dense model."""
    checkpoint = Checkpoint.open(path)
    architecture = find_architecture(checkpoint.config)
    weights = Decoded(checkpoint, device)
    model = architecture.Model(architecture.Config.from_dict(checkpoint.config), weights)
    found = []
    for part in _passes(documents):
        weights.chosen.clear()
        lengths = [len(ids) for ids in part]
        logs = model.logits(
            model(torch.cat(part).to(device), CausalContext(lengths, device))
        ).log_softmax(-1)
        chosen = torch.stack(weights.chosen) if weights.chosen else torch.zeros(0, sum(lengths), 1)
        found += zip(logs.split(lengths), chosen.split(lengths, dim=1))
    return found


def _passes(documents: Sequence[Tensor]) -> list[list[Tensor]]:
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
        alike = (
            (theirs[..., :, None] == ours[..., None, :]).any(-1).double().mean()
            if len(theirs)
            else torch.ones_like(kl)
        )
        rows.append(torch.stack((kl, same.double(), torch.full_like(kl, len(base) - 1), alike)))
    return Scores(*torch.stack(rows).T.cpu().numpy())


# --- table

Rows = dict[tuple[str, str, str], list[dict[str, Any]]]


def read_rows(path: Path, split: str) -> Rows:
    """(judge, scheme, name) -> its seeds' figures per document. Documents of a kind are a judge of
    their own, and NVFP4's headrooms rows of their own."""
    found: Rows = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        named = {row["name"]: row["scores"]}
        for headroom, own in row.get("headroom", {}).items():
            named[f"{row['name']}, headroom {headroom}"] = own
        for name, own in named.items():
            for judge, figures in by_kind(row["judge"], own[split]).items():
                found[judge, row["scheme"], name].append(figures | {"seed": row["seed"]})
    return found


def by_kind(judge: str, figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    kinds = figures.pop("kinds", [""])
    if set(kinds) == {""}:
        return {judge: figures}
    return {
        f"{judge}, {kind}": {
            name: [x for x, own in zip(values, kinds, strict=True) if own == kind]
            for name, values in figures.items()
        }
        for kind in dict.fromkeys(kinds)
    }


def per_document(runs: list[dict[str, Any]]) -> np.ndarray:
    return np.mean([run["kl"] for run in runs], axis=0)


def kl(runs: list[dict[str, Any]]) -> float:
    """Nats a token, the mean over seeds."""
    return float(np.mean([sum(run["kl"]) / sum(run["tokens"]) for run in runs]))


def is_peer(name: str) -> bool:
    return not name.startswith("quantkit") and not name.endswith("nearest")


def interval(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], resamples: int = 2000
) -> tuple[float, float]:
    """95 % of the ratio of summed KL over documents drawn again, paired."""
    a, b = per_document(ours), per_document(theirs)
    draws = np.random.default_rng(0).integers(0, len(a), (resamples, len(a)))
    low, high = np.quantile(a[draws].sum(1) / b[draws].sum(1), [0.025, 0.975])
    return float(low), float(high)


def table(path: Path, split: str) -> None:
    rows = read_rows(path, split)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for scheme in dict.fromkeys(scheme for _, scheme, _ in rows):
        for judge in dict.fromkeys(judge for judge, own, _ in rows if own == scheme):
            own = {name: runs for (j, s, name), runs in rows.items() if (j, s) == (judge, scheme)}
            peers = {name: kl(runs) for name, runs in own.items() if is_peer(name)}
            best = min(peers, key=lambda name: peers[name]) if peers else None
            print(f"{scheme} on {judge}, {split}; best peer {best}")
            for name, runs in sorted(own.items(), key=lambda pair: kl(pair[1])):
                top1 = np.mean([sum(run["top1"]) / sum(run["tokens"]) for run in runs])
                spread = (
                    np.std([sum(run["kl"]) / sum(run["tokens"]) for run in runs], ddof=1)
                    if len(runs) > 1
                    else math.nan
                )
                line = (
                    f"  {name:28} KL {1e3 * kl(runs):8.3f}e-3 ({1e3 * spread:.3f})  top-1 "
                    f"{top1:.4f}  seeds {len(runs)}"
                )
                if name.startswith("quantkit") and best is not None:
                    # of the seeds that both have
                    theirs = [
                        run for run in own[best] if run["seed"] in {one["seed"] for one in runs}
                    ]
                    mine = [run for run in runs if run["seed"] in {one["seed"] for one in theirs}]
                    if mine:
                        low, high = interval(mine, theirs)
                        ratios[scheme, name].append(kl(mine) / kl(theirs))
                        line += (
                            f"  {ratios[scheme, name][-1]:.3f} [{low:.3f}, {high:.3f}] of the "
                            "best peer"
                        )
                print(line)
    for (scheme, name), own_ratios in ratios.items():
        mean = math.exp(float(np.mean(np.log(own_ratios))))
        print(
            f"{scheme}, {name}: {mean:.3f} of the best peer, mean of {len(own_ratios)}, worst "
            f"{max(own_ratios):.3f}"
        )
