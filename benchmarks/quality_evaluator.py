"""One evaluator for everybody's checkpoints: decoded to float32, float32 activations, documents alone, KL(source || output) in nats.

Activations are rounded to int8, a step a token, or to NVFP4 under the stored scale, where the
scheme says so; no side gains by a kernel. A checkpoint of decoded values says it in
activations.json (quality_auto_round.py).
"""

import json
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
from quantkit.models import find_architecture
from quantkit.models.activation_quant import ActivationQuant
from quantkit.models.context import CausalContext
from quantkit.models.weights import ExpertsOp, LinearOp

TOKENS_A_PASS = 4096


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
        told = checkpoint.path / "activations.json"
        self.decoded: dict[str, Any] = (
            json.loads(told.read_text()) if told.is_file() else {"bits": 16, "kept": []}
        )

    def tensor(self, name: str) -> Tensor:
        return self.checkpoint.read(name).float().to(self.device)

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def dequantized(self, module: str) -> Tensor:
        return dequantize(self.checkpoint.weight(module, self.device))

    def linear(self, module: str) -> LinearOp:
        return self.fused_linear((module,))

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        weights = [self.checkpoint.weight(module, self.device) for module in modules]
        dense = torch.cat([dequantize(weight) for weight in weights])
        bits = self.activation_bits(modules[0])
        if bits == 4:
            reading = ActivationQuant.of(weights[0], bits)
            return lambda x: F.linear(reading(x), dense)
        return lambda x: F.linear(round_rows(x) if bits == 8 else x, dense)

    def activation_bits(self, module: str) -> int:
        """Of what the linear reads; siblings are alike."""
        if module in self.checkpoint.linears:
            return self.checkpoint.activation_bits(module)
        return 16 if module.endswith(tuple(self.decoded["kept"])) else int(self.decoded["bits"])

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        assert gating == SILU, gating
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
                    down(F.silu(gate(mine)) * up(mine)) * topk_weights[tokens, slots, None],
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


@torch.inference_mode()
def run_model(
    path: Path, documents: list[Tensor], device: torch.device
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
        alike = (
            (theirs[..., :, None] == ours[..., None, :]).any(-1).float().mean()
            if len(theirs)
            else 1.0
        )
        rows.append((float(kl), float(same), len(base) - 1, float(alike)))
    return Scores(*np.array(rows, dtype=np.float64).T)


def ratio(
    ours: list[Scores], theirs: list[Scores], resamples: int = 2000
) -> tuple[float, float, float]:
    """KL of ours over theirs, and its 95 % interval over documents; seeds are averaged within a
    document."""
    a, b = (np.mean([run.kl for run in runs], axis=0) for runs in (ours, theirs))
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(a), (resamples, len(a)))
    low, high = np.quantile(a[draws].sum(1) / b[draws].sum(1), [0.025, 0.975])
    return float(a.sum() / b.sum()), float(low), float(high)
