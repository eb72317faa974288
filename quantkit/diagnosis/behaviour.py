"""The third depth: both models compute the same text, sublayer by sublayer, and the first that
differs is named, with its linear.

Each sublayer of the checkpoint runs twice: on the source's hidden states, which tells its own
error, and on its own, which tells what has
come together. Memory: one decoder layer of each model without routed experts, one expert, and the
hidden states of TOKENS tokens, thrice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from quantkit_kernels import ExpertBiases
from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.data import SHIPPED_TEXT
from quantkit.calibrate.embed_and_head import TableEnds
from quantkit.calibrate.experts import ExpertWeights
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.source_model import ParameterReader
from quantkit.calibrate.sublayer import Run, run_attention, run_feed_forward
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import CPU
from quantkit.common.assets import calibration_text
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.evaluation.distance.documents import read_documents
from quantkit.grids.weights import dequantize
from quantkit.models.decoder import DecoderLayer
from quantkit.models.mlp import MoeMlp
from quantkit.models.stored_parameters import Model, read_model
from quantkit.models.table import GatedMlp, Parameter, routed_experts
from quantkit.tokenizer.chat import ChatTokenizer

SEQ_LEN, TOKENS = 128, 1024
_SUBLAYER = 0.5
"""Of what a sublayer adds to the residual stream, the error that no rounding of today leaves: 4
bits leave 0.1 to 0.25."""
_CHOICES = 0.9
"""Share of the source's experts that the router must still choose on the source's own hidden
states: nothing before it is rounded."""
_KL = 2.0
"""nats a token. Text that a model was not made for, or a model that was not trained, brings 4 bits
to 1."""

_HALVES: tuple[tuple[str, Run], ...] = (
    ("attention", run_attention),
    ("feed-forward", run_feed_forward),
)


@dataclass(frozen=True)
class SublayerError:
    """own: |f'(h) - f(h)| / |f(h)| of what it adds, on the source's hidden states h; together: the same of the residual stream on its own
    hidden states. chosen: share of the source's experts that it chooses too, on h; None without
    experts. worst: linears and their error."""

    name: str
    own: float
    together: float
    chosen: float | None
    worst: list[tuple[str, float]]


class _Side:
    """One of the two models, a decoder layer at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.model = checkpoint, read_model(checkpoint)
        self.ends = TableEnds(ParameterReader(checkpoint, CPU), self.model.rows, self.model.config)
        self.inputs: dict[str, Tensor] = {}
        self.chosen: Tensor | None = None

    def layer(self, number: int) -> tuple[DecoderLayer, LayerWeights]:
        model: Model = self.model
        outside = ("embedding", "head", "mtp_proj")
        rows = [
            row
            for row in model.rows
            if row.layer == number and row.expert is None and row.role not in outside
        ]
        experts = routed_experts(model.rows, number)
        weights = LayerWeights(
            {row.name: self.value(row) for row in rows},
            self._experts(experts) if experts else None,
            self._observe,
        )
        return model.architecture.DecoderLayer(model.config, number, weights), weights

    def value(self, row: Parameter) -> Tensor:
        """float32."""
        packed = row.module in self.checkpoint.linears
        return (
            dequantize(self.checkpoint.weight(row.module))
            if packed
            else self.checkpoint.read(row.name).float()
        )

    def _experts(self, experts: dict[int, GatedMlp]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            self.chosen, out = topk_ids, torch.zeros_like(x)
            for number in topk_ids.unique().tolist():
                tokens, slots = (topk_ids == number).nonzero(as_tuple=True)
                gate, up, down = (self.value(row) for row in experts[number].rows)
                biases = [self.checkpoint.read(name).float() for name in experts[number].biases]
                one = ExpertWeights(
                    gate,
                    up,
                    down,
                    self.model.config.gating,
                    ExpertBiases(*biases) if biases else None,
                )
                out.index_add_(0, tokens, one(x[tokens]) * topk_weights[tokens, slots, None])
            return out

        return run

    def _observe(self, module: str, x: Tensor) -> None:
        self.inputs[module] = x

    def by_role(self, role: str) -> Parameter | None:
        return next(
            (row for row in self.model.rows if row.role == role and row.layer is None), None
        )


def read_compared(source: Path, text: Path | None) -> list[Tensor]:
    """Token ids of what both models are to compute: a text, .txt or .jsonl; without, what the
    source ships for calibration, or quantkit's own. Raises QuantkitError where it cannot be
    read."""
    shipped = source / SHIPPED_TEXT
    chosen = text or (shipped if shipped.is_file() else calibration_text())
    return read_documents(chosen, ChatTokenizer(source), seq_len=SEQ_LEN, limit=TOKENS // SEQ_LEN)[
        : TOKENS // SEQ_LEN
    ]


@torch.inference_mode()
def compare_behaviour(
    checkpoint: Checkpoint, source: Checkpoint, documents: list[Tensor], findings: DiagnosisFindings
) -> tuple[list[SublayerError], float]:
    """The errors of all sublayers, and the mean KL of the next token in nats. documents: of
    `read_compared`.

    Raises QuantkitError where one of the two is not computed here, and where they are of different
    sizes.
    """
    ours, theirs = _Side(checkpoint), _Side(source)
    _check_sizes(ours, theirs)
    lengths = [len(one) for one in documents]
    mine, right = (side.ends.embedded(documents) for side in (ours, theirs))
    errors: list[SublayerError] = []
    layers = theirs.model.config.num_hidden_layers
    for number in range(layers):
        layer, weights = ours.layer(number)
        original, original_weights = theirs.layer(number)
        for half, run in _HALVES:
            name = f"model.layers.{number} {half}"
            mine, right, error = _half(
                name,
                run,
                (ours, layer, weights),
                (theirs, original, original_weights),
                mine,
                right,
                lengths,
            )
            errors.append(error)
    kl = _next_token_kl(ours, theirs, mine, right)
    _judge(errors, kl, findings)
    return errors, kl


def _check_sizes(ours: _Side, theirs: _Side) -> None:
    wanted = {row.name: row.shape for row in theirs.model.rows if not row.mtp}
    own = {row.name: row.shape for row in ours.model.rows if not row.mtp}
    name = next((name for name in [*own, *wanted] if own.get(name) != wanted.get(name)), None)
    if name is not None:
        sizes = [list(rows[name]) if name in rows else "not there" for rows in (own, wanted)]
        told = (
            f"{name} is {sizes[0]} in {ours.checkpoint.path} and {sizes[1]} in "
            f"{theirs.checkpoint.path}: their behaviour is not compared"
        )
        raise QuantkitError(told, "give the source that it was made from")


_Loaded = tuple[_Side, DecoderLayer, LayerWeights]


def _half(
    name: str,
    run: Run,
    ours: _Loaded,
    theirs: _Loaded,
    mine: Tensor,
    right: Tensor,
    lengths: list[int],
) -> tuple[Tensor, Tensor, SublayerError]:
    for side, _, _ in (ours, theirs):
        side.inputs.clear()
        side.chosen = None
    after = run(theirs[1], right, lengths)
    own = run(ours[1], right, lengths)
    chosen = _agreement(ours[0], theirs[0]) if isinstance(ours[1].mlp, MoeMlp) else None
    worst = _linears(ours, theirs)
    mine = run(ours[1], mine, lengths)
    error = SublayerError(
        name, _distance(own - right, after - right), _distance(mine, after), chosen, worst
    )
    return mine, after, error


def _distance(one: Tensor, other: Tensor) -> float:
    error = float((one - other).norm() / other.norm().clamp(min=1e-20))
    return error if math.isfinite(error) else math.inf


def _agreement(ours: _Side, theirs: _Side) -> float | None:
    if ours.chosen is None or theirs.chosen is None:
        return None
    return float((theirs.chosen[:, :, None] == ours.chosen[:, None, :]).any(-1).float().mean())


def _linears(ours: _Loaded, theirs: _Loaded) -> list[tuple[str, float]]:
    """Linears of a half in the order they are computed, and how far their outputs are; rows may
    have been scaled, as folding does."""
    found = []
    for site, modules in theirs[2].sites.items():
        x, y = ours[0].inputs.get(site), theirs[0].inputs.get(site)
        if x is None or y is None:
            continue
        for module in modules:
            name = f"{module}.weight"
            one, other = F.linear(x, ours[2].tensors[name]), F.linear(y, theirs[2].tensors[name])
            scale = (one * other).sum(0) / other.square().sum(0).clamp(min=1e-20)
            found.append((module, _distance(one, other * scale)))
    return found


def _next_token_kl(ours: _Side, theirs: _Side, mine: Tensor, right: Tensor) -> float:
    logs = []
    for side, hidden in ((ours, mine), (theirs, right)):
        head = side.by_role("head") or side.by_role("embedding")
        assert head is not None, f"{side.checkpoint.path} has no head"
        logs.append(F.linear(side.ends.normed(hidden), side.value(head)).log_softmax(-1))
    one, other = logs
    kl = float((other.exp() * (other - one)).sum(-1).mean())
    return kl if math.isfinite(kl) else math.inf


def _judge(errors: list[SublayerError], kl: float, findings: DiagnosisFindings) -> None:
    """The first sublayer that is off by itself, and its first linear that is; a router that chooses
    others."""
    off = [error for error in errors if not error.own <= _SUBLAYER]
    strayed = [error for error in errors if error.chosen is not None and error.chosen < _CHOICES]
    if strayed:
        first = strayed[0]
        told = (
            f"on the source's hidden states it chooses {first.chosen:.0%} of the source's "
            "experts: its norm was scaled without it"
        )
        findings.add("router-strays", [error.name for error in strayed], told)
    if off:
        linears = [
            f"{module} ({error:.2f})" for module, error in off[0].worst if not error <= _SUBLAYER
        ]
        told = (
            f"error {off[0].own:.2f} of what it adds, on the source's hidden states; "
            f"{len(off)} of {len(errors)} sublayers are so"
        )
        told += f"; it begins at {linears[0]}" if linears else ""
        findings.add("sublayer-off", [error.name for error in off], told)
    if not kl <= _KL:
        last = errors[-1].together
        findings.add(
            "tokens-differ",
            "the next token",
            f"KL {kl:.2f} nats a token from the source; the residual stream is {last:.2f} off",
        )
