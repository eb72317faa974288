"""The behaviour depth of a check: both models compute the same text, sublayer by sublayer, to find
the first one that differs, and its linear.

Each sublayer of the checkpoint runs twice: on the source's hidden states, for its own error, and on
its own, for the accumulated error. Memory: one decoder layer of each model without routed experts,
one expert, and the hidden states of TOKENS tokens, three times.
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
from quantkit.calibrate.embed_and_head import TableEmbedAndHead
from quantkit.calibrate.experts import ExpertWeights
from quantkit.calibrate.source_model import ParameterReader
from quantkit.calibrate.sublayer import LayerWeights, Run, run_attention, run_feed_forward
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import CPU
from quantkit.common.assets import calibration_text
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis import Findings
from quantkit.evaluation.distance.documents import read_documents
from quantkit.grids.base import dequantize
from quantkit.models.decoder import DecoderLayer
from quantkit.models.mlp import MoeMlp
from quantkit.models.stored_parameters import Model, read_model
from quantkit.models.table import GatedMlp, Parameter, routed_experts
from quantkit.tokenizer.chat import ChatTokenizer

SEQ_LEN, TOKENS = 128, 1024
_MAX_ERROR = 0.5
"""Relative error of a sublayer's contribution to the residual stream that no rounding causes: 4
bits cause 0.1 to 0.25."""
_MIN_AGREEMENT = 0.9
"""Share of the source's experts that the router must still choose on the source's own hidden
states, where nothing is rounded yet."""
_MAX_KL = 2.0
"""nats per token. With unfamiliar text or an untrained model 4 bits reach 1."""

_SUBLAYERS: tuple[tuple[str, Run], ...] = (
    ("attention", run_attention),
    ("feed-forward", run_feed_forward),
)


@dataclass(frozen=True)
class SublayerError:
    """own: |f'(h) - f(h)| / |f(h)| of the contribution on the source's hidden states h;
    accumulated: the same of the residual stream on its own hidden states. chosen: share of the
    source's experts that it also chooses on h; None without experts. worst: linears and their
    error."""

    name: str
    own: float
    accumulated: float
    chosen: float | None
    worst: list[tuple[str, float]]


class _ModelSide:
    """One of the two models, one decoder layer at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.model = checkpoint, read_model(checkpoint)
        self.embed_and_head = TableEmbedAndHead(
            ParameterReader(checkpoint, CPU), self.model.rows, self.model.config
        )
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
            stored=self.checkpoint,
        )
        return model.architecture.DecoderLayer(model.config, number, weights), weights

    def value(self, row: Parameter) -> Tensor:
        """The float32 weight."""
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
                block = self.checkpoint.input_rotation(experts[number].down.module)
                one = ExpertWeights(
                    gate,
                    up,
                    down,
                    self.model.config.gating.rotated(block),
                    ExpertBiases(*biases) if biases else None,
                )
                out.index_add_(0, tokens, one(x[tokens]) * topk_weights[tokens, slots, None])
            return out

        return run

    def _observe(self, module: str, x: Tensor) -> None:
        self.inputs[module] = x

    def within(self, documents: list[Tensor]) -> list[Tensor]:
        """The beginnings for which a layer is computed without the one before it."""
        return [one[: self.model.config.max_independent_tokens] for one in documents]

    def by_role(self, role: str) -> Parameter | None:
        return next(
            (row for row in self.model.rows if row.role == role and row.layer is None), None
        )


def read_compared(source: Path, text: Path | None) -> list[Tensor]:
    """Token ids of the text for both models: a .txt or .jsonl file; by default the calibration text
    shipped with the source, or quantkit's own. Raises QuantkitError if it cannot be read."""
    shipped = source / SHIPPED_TEXT
    chosen = text or (shipped if shipped.is_file() else calibration_text())
    return read_documents(chosen, ChatTokenizer(source), seq_len=SEQ_LEN, limit=TOKENS // SEQ_LEN)[
        : TOKENS // SEQ_LEN
    ]


@torch.inference_mode()
def compare_behaviour(
    checkpoint: Checkpoint, source: Checkpoint, documents: list[Tensor], findings: Findings
) -> tuple[list[SublayerError], float]:
    """The errors of all sublayers, and the mean KL of the next token in nats. documents: from
    `read_compared`.

    Raises QuantkitError if quantkit does not compute one of the models, or if their sizes differ.
    """
    ours, theirs = _ModelSide(checkpoint), _ModelSide(source)
    _check_sizes(ours, theirs)
    documents = theirs.within(documents)
    lengths = [len(one) for one in documents]
    hidden, source_hidden = (side.embed_and_head.embed(documents) for side in (ours, theirs))
    errors: list[SublayerError] = []
    layers = theirs.model.config.num_hidden_layers
    for number in range(layers):
        layer, weights = ours.layer(number)
        original, original_weights = theirs.layer(number)
        for kind, run in _SUBLAYERS:
            name = f"model.layers.{number} {kind}"
            hidden, source_hidden, error = _compare_sublayer(
                name,
                run,
                (ours, layer, weights),
                (theirs, original, original_weights),
                hidden,
                source_hidden,
                lengths,
            )
            errors.append(error)
    kl = _next_token_kl(ours, theirs, hidden, source_hidden)
    _report(errors, kl, findings)
    return errors, kl


@torch.inference_mode()
def cross_entropy(checkpoint: Checkpoint, documents: list[Tensor]) -> float:
    """Mean cross entropy of the next token in nats, one decoder layer in memory at a time.
    documents: token ids int64 [T] each. Raises QuantkitError if quantkit does not compute it."""
    side = _ModelSide(checkpoint)
    documents = side.within(documents)
    hidden, lengths = side.embed_and_head.embed(documents), [len(one) for one in documents]
    for number in range(side.model.config.num_hidden_layers):
        layer, _ = side.layer(number)
        for _, run in _SUBLAYERS:
            hidden = run(layer, hidden, lengths)
    losses = [
        F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        for logits, ids in zip(_next_tokens(side, hidden).split(lengths), documents)
    ]
    return float(torch.stack(losses).sum() / (sum(lengths) - len(lengths)))


def _next_tokens(side: _ModelSide, hidden: Tensor) -> Tensor:
    """Log-probabilities [T, V] of the next token from the last hidden states."""
    head = side.by_role("head") or side.by_role("embedding")
    assert head is not None, f"{side.checkpoint.path} has no head"
    return F.linear(side.embed_and_head.final_norm(hidden), side.value(head)).log_softmax(-1)


def _check_sizes(ours: _ModelSide, theirs: _ModelSide) -> None:
    wanted = {row.name: row.shape for row in theirs.model.rows if not row.mtp}
    own = {row.name: row.shape for row in ours.model.rows if not row.mtp}
    name = next((name for name in [*own, *wanted] if own.get(name) != wanted.get(name)), None)
    if name is not None:
        sizes = [list(rows[name]) if name in rows else "not there" for rows in (own, wanted)]
        evidence = (
            f"{name} is {sizes[0]} in {ours.checkpoint.path} and {sizes[1]} in "
            f"{theirs.checkpoint.path}: their behaviour is not compared"
        )
        raise QuantkitError(evidence, "give the source that it was made from")


_LoadedLayer = tuple[_ModelSide, DecoderLayer, LayerWeights]


def _compare_sublayer(
    name: str,
    run: Run,
    ours: _LoadedLayer,
    theirs: _LoadedLayer,
    hidden: Tensor,
    source_hidden: Tensor,
    lengths: list[int],
) -> tuple[Tensor, Tensor, SublayerError]:
    for side, _, _ in (ours, theirs):
        side.inputs.clear()
        side.chosen = None
    after = run(theirs[1], source_hidden, lengths)
    own = run(ours[1], source_hidden, lengths)
    chosen = _agreement(ours[0], theirs[0]) if isinstance(ours[1].mlp, MoeMlp) else None
    worst = _linear_errors(ours, theirs)
    hidden = run(ours[1], hidden, lengths)
    error = SublayerError(
        name,
        _distance(own - source_hidden, after - source_hidden),
        _distance(hidden, after),
        chosen,
        worst,
    )
    return hidden, after, error


def _distance(one: Tensor, other: Tensor) -> float:
    error = float((one - other).norm() / other.norm().clamp(min=1e-20))
    return error if math.isfinite(error) else math.inf


def _agreement(ours: _ModelSide, theirs: _ModelSide) -> float | None:
    if ours.chosen is None or theirs.chosen is None:
        return None
    return float((theirs.chosen[:, :, None] == ours.chosen[:, None, :]).any(-1).float().mean())


def _linear_errors(ours: _LoadedLayer, theirs: _LoadedLayer) -> list[tuple[str, float]]:
    """Linears of a sublayer in the order of computation, and the error of their outputs after
    fitting row scales, which folding may have changed."""
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


def _next_token_kl(
    ours: _ModelSide, theirs: _ModelSide, hidden: Tensor, source_hidden: Tensor
) -> float:
    one, other = _next_tokens(ours, hidden), _next_tokens(theirs, source_hidden)
    kl = float((other.exp() * (other - one)).sum(-1).mean())
    return kl if math.isfinite(kl) else math.inf


def _report(errors: list[SublayerError], kl: float, findings: Findings) -> None:
    """Report the first sublayer with a large own error and its first such linear, and routers that
    choose other experts."""
    off = [error for error in errors if not error.own <= _MAX_ERROR]
    routers = [
        error for error in errors if error.chosen is not None and error.chosen < _MIN_AGREEMENT
    ]
    if routers:
        first = routers[0]
        evidence = (
            f"on the source's hidden states it chooses {first.chosen:.0%} of the source's "
            "experts: its norm was scaled, and it was not"
        )
        findings.add("router-strays", [error.name for error in routers], evidence)
    if off:
        linears = [
            f"{module} ({error:.2f})" for module, error in off[0].worst if not error <= _MAX_ERROR
        ]
        evidence = (
            f"its contribution has error {off[0].own:.2f} on the source's hidden states, as "
            f"have {len(off)} of {len(errors)} sublayers"
        )
        evidence += f"; it begins at {linears[0]}" if linears else ""
        findings.add("sublayer-off", [error.name for error in off], evidence)
    if not kl <= _MAX_KL:
        last = errors[-1].accumulated
        findings.add(
            "tokens-differ",
            "the next token",
            f"KL {kl:.2f} nats per token from the source; the residual stream is {last:.2f} off",
        )
