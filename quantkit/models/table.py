"""The table of a model's parameters: names, shapes and roles of all tensors, and the scales that
can be folded between them."""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueHeads:
    """How the producer's rows map to the columns of o_proj, where not one to one: `heads` value
    heads of `width` values, each read by `readers` adjacent query heads; in the producer, `before`
    rows of each head come first that compute something else."""

    heads: int
    readers: int
    width: int
    before: int = 0

    @property
    def columns(self) -> int:
        """Columns of o_proj."""
        return self.heads * self.readers * self.width

    def tie(self, scale: Tensor) -> Tensor:
        """Scales [..., K] of o_proj's columns -> the nearest scales (geometric means) that are
        equal for all columns that read one value, with mean 1."""
        logs = scale.log().unflatten(-1, (self.heads, self.readers, self.width))
        logs = (logs - logs.mean((-3, -2, -1), keepdim=True)).mean(-2, keepdim=True)
        return logs.exp().expand(*logs.shape[:-2], self.readers, self.width).flatten(-3)

    def producer_scales(self, scale: Tensor) -> Tensor:
        """Divisors of the producer's rows [N] for such scales [K]."""
        values = scale.view(self.heads, self.readers, self.width)[:, 0]
        return torch.cat([values.new_ones(self.heads, self.before), values], dim=1).flatten()


Role = Literal[
    "embedding",
    "head",
    "norm",
    "linear",
    "kv_b",
    "router",
    "router_bias",
    "router_table",
    "bias",
    "indexer",
    "indexer_gate",
    "state",
    "streams",
    "latent",
    "mtp_proj",
    "ngram_table",
    "copied",
]
"""linear: may be quantized. kv_b: MLA's latent up-projection, absorbed at decode and kept in 16
bits. router_table: expert ids of each token id. indexer: a linear of sparse attention, kept in 16
bits; indexer_gate: weights of its heads, in float32. state: of a recurrence, in float32. streams:
of several residual streams, in float32. latent: a linear to the experts' latent space or back, kept
in 16 bits. ngram_table: read row by row, kept as it is stored. copied: of another model in the
checkpoint, not computed. All others are never quantized."""

Split = Literal["replicate", "column", "row", "gathered"]
"""Tensor parallelism: column splits N, row splits K (outputs are partial sums), gathered splits N
where the ranks divide it, and every rank gets all outputs."""


Block = Literal["attention", "mlp", "router", "shared_expert", "expert"]
"""The part of a decoder layer that a tensor belongs to. Norms between blocks, and tensors outside
the layers, have none."""

Projection = Literal["q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "gate", "up", "down"]
"""What a linear computes, whatever its name: in grouped-query attention, in latent attention (q_a
and kv_a down, q_b and kv_b up), in a gated MLP, down(SiLU(gate(x)) * up(x))."""

MLA_PROLOG_PROJECTIONS: tuple[Projection, ...] = ("q_a", "q_b", "kv_a")
"""Linears before latent attention, which an engine may fuse with norms, rotation and cache."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the unquantized model.

    fused: the engine's fused module for siblings that must share type and FP4 global scale (gate
    and up, q_a and kv_a). other_name: a second spelling in checkpoints (`resolve` picks). optional:
    may be absent. layer: None outside the decoder stack; MTP layers have layer >= num_hidden_layers
    and `mtp` set. expert: number of a routed expert, whose three linears have block "expert".
    segments: consecutive groups of rows, each of which is split by itself in column parallelism.
    key_heads: for keys and values, their number of heads; a head is not split, and is replicated
    where there are more ranks. gain_offset: added to a norm's stored gain; 1 in Gemma.
    after_experts: a norm, linear or hyper-connection applied to the experts' sum before it joins
    the residual stream. parallel_to_experts: a linear whose output is read there, too.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    split: Split = "replicate"
    layer: int | None = None
    expert: int | None = None
    fused: str | None = None
    mtp: bool = False
    other_name: str | None = None
    optional: bool = False
    block: Block | None = None
    projection: Projection | None = None
    gain_offset: float = 0.0
    segments: tuple[int, ...] = ()
    key_heads: int = 0
    after_experts: bool = False
    parallel_to_experts: bool = False

    @property
    def module(self) -> str:
        """The tensor's name without `.weight`: the module name in formats and engines."""
        return self.name.removesuffix(".weight")

    @property
    def bias(self) -> str:
        """The name of this linear's bias, if it has one."""
        return f"{self.module}.bias"

    def tp_shards(self, ranks: int) -> int:
        """Number of different parts that `ranks` tensor-parallel ranks hold."""
        return 1 if self.split == "replicate" else min(ranks, self.key_heads or ranks)

    @property
    def output_axis(self) -> int:
        """The dimension that column parallelism splits: the first of more than one."""
        return next((axis for axis, size in enumerate(self.shape) if size > 1), 0)

    @property
    def within_layer(self) -> str:
        """The module's name inside its layer: `self_attn.o_proj` of
        `model.layers.3.self_attn.o_proj`, `attn.wkv` of `mtp.0.attn.wkv`."""
        assert self.layer is not None, self.name
        return re.split(r"\.\d+\.", self.module, maxsplit=1)[1]

    @property
    def part(self) -> str:
        """The part of the model under which reports count its size."""
        if self.mtp:
            return "mtp layer"
        if self.block is not None:
            return {"attention": "attention", "expert": "routed experts"}.get(self.block, "mlp")
        if self.role == "ngram_table":
            return "n-gram tables"
        if self.role == "copied":
            return "outside the text model"
        return "embeddings and head" if self.role in ("embedding", "head") else "norms"


@dataclass(frozen=True)
class ScaleGroup:
    """Per-channel scales s that can be moved between a producer and everything that reads its
    output, without changing the model.

    The producer (a norm's gain, or the output rows of a linear) is divided by s, and the columns of
    every consumer are multiplied by s. Every reader of the producer's output is listed, quantized
    or not: leaving one out changes the function. observe: the module whose input is the scaled
    activation. expert: set where producer and consumer belong to one expert. reaches_experts: the
    routed experts are among the consumers. biased: the producer's bias, `producer`.bias, is divided
    too. heads: set where o_proj's columns are not the producer's rows one by one. head_width: width
    of value heads that reach o_proj as weighted sums over tokens alone, so that a rotation of each
    moves as a scale does; 0 elsewhere.
    """

    name: str
    producer: str
    producer_is_norm: bool
    consumers: tuple[str, ...]
    observe: str
    expert: int | None = None
    reaches_experts: bool = False
    biased: bool = False
    heads: ValueHeads | None = None
    head_width: int = 0


@dataclass(frozen=True)
class GatedMlp:
    """The rows of one gated MLP, routed or shared expert: gate and up [I, H], one row where an
    expert has no gate, down [H, I]; and the names of their biases, if any."""

    gate: Parameter
    up: Parameter
    down: Parameter
    biases: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Parameter]) -> "GatedMlp":
        """From its rows, in any order."""
        rows = list(rows)
        by_projection = {row.projection: row for row in rows}
        up = by_projection["up"]
        linears = (by_projection.get("gate", up), up, by_projection["down"])
        biased = {row.name for row in rows if row.role == "bias"}
        return cls(*linears, tuple(name for row in linears if (name := row.bias) in biased))

    @property
    def rows(self) -> tuple[Parameter, Parameter, Parameter]:
        return self.gate, self.up, self.down

    @property
    def modules(self) -> tuple[str, str, str]:
        return self.gate.module, self.up.module, self.down.module


def routed_experts(rows: Iterable[Parameter], layer: int) -> dict[int, GatedMlp]:
    """The routed experts of one layer by number, in table order; empty for a dense layer."""
    experts: dict[int, list[Parameter]] = {}
    for row in rows:
        if row.layer == layer and row.expert is not None:
            experts.setdefault(row.expert, []).append(row)
    return {number: GatedMlp.of(own) for number, own in experts.items()}


def resolve(rows: list[Parameter], names: Container[str]) -> list[Parameter]:
    """The rows as a checkpoint with these tensor names spells them, without the optional ones that
    it lacks."""
    resolved = []
    for row in rows:
        if row.other_name is not None and row.name not in names and row.other_name in names:
            row = replace(row, name=row.other_name)
        if not row.optional or row.name in names:
            resolved.append(row)
    return resolved
