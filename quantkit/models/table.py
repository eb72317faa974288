"""Which rows of what makes values the columns of o_proj read, where they are not one by one."""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueHeads:
    """How the rows of what makes values lie over the columns of o: `heads` heads of `width` values,
    each read by `readers` query heads in a row; of each head's rows in the producer, `before` come
    first that make something else."""

    heads: int
    readers: int
    width: int
    before: int = 0

    @property
    def columns(self) -> int:
        """Of o."""
        return self.heads * self.readers * self.width

    def tie(self, scale: Tensor) -> Tensor:
        """Scales [..., K] of o's columns -> the nearest (geometric means) that are the same for all
        that read one value, of mean 1."""
        logs = scale.log().unflatten(-1, (self.heads, self.readers, self.width))
        logs = (logs - logs.mean((-3, -2, -1), keepdim=True)).mean(-2, keepdim=True)
        return logs.exp().expand(*logs.shape[:-2], self.readers, self.width).flatten(-3)

    def producer_scales(self, scale: Tensor) -> Tensor:
        """By what the producer's rows [N] are divided, for such a scale [K]."""
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
    "mtp_proj",
    "copied",
]
"""linear: may be quantized. router_table: ids of the experts of each token id. kv_b: MLA's latent
up-projection, absorbed at decode and
kept in 16 bits. indexer: a linear of sparse attention's, kept in 16 bits; indexer_gate: what weighs
its heads, in float32. state: of a
recurrence, in float32. streams: of hyper-connections, in float32. copied: of another model beside
the one that is computed. The rest is never quantized."""

Split = Literal["replicate", "column", "row", "gathered"]
"""Tensor parallel: column cuts N, row cuts K (outputs are partial sums), gathered cuts N where that
divides, and every rank gets all outputs."""


Block = Literal["attention", "mlp", "router", "shared_expert", "expert"]
"""What of a decoder layer a tensor is part of. The norms between blocks, and tensors outside the
layers, are part of none."""

Projection = Literal["q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "gate", "up", "down"]
"""What a linear computes, whatever its name: of grouped-query attention, of latent attention (q_a
and kv_a down, q_b and kv_b up again), of a gated MLP, down(SiLU(gate(x)) * up(x))."""

MLA_PROLOG_PROJECTIONS: tuple[Projection, ...] = ("q_a", "q_b", "kv_a")
"""Linears of latent attention that come before it, and that an engine may compute in one operator
with norms, rotation and cache."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the unquantized model.

    `fused` names the engine's fused module for siblings that must share type and FP4 global scale
    (gate and up, q_a and kv_a).
    `other_name` is a second spelling under which checkpoints hold the tensor (`resolve` picks);
    `optional` ones may be absent.
    `layer` is None outside the decoder stack; the MTP layer has layer >= num_hidden_layers and
    `mtp` set.
    `expert` is the number of a routed expert, whose three linears have block "expert".
    `segments`: rows that lie one after the other, each of which is cut by itself where ranks cut
    columns.
    `key_heads`: of keys and values, the heads that they are of. A head is not cut: where there are
    more ranks, several hold the same one.
    `gain_offset` is what a norm adds to its stored gain before it multiplies by it: 1 in Gemma's.
    `after_experts`: of what a layer's experts make together, before it joins the residual stream:
    a norm, a hyper-connection.
    `parallel_to_experts`: of a linear whose output is read there, too, beside what the experts make.
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
        """The tensor's name without `.weight`: what formats and engines call the module."""
        return self.name.removesuffix(".weight")

    @property
    def bias(self) -> str:
        """The name that the bias of this linear has, if it has one."""
        return f"{self.module}.bias"

    def tp_shards(self, ranks: int) -> int:
        """Different parts that `ranks` tensor-parallel ranks hold the tensor in."""
        return 1 if self.split == "replicate" else min(ranks, self.key_heads or ranks)

    @property
    def within_layer(self) -> str:
        """The module's name inside its layer: `self_attn.o_proj` of
        `model.layers.3.self_attn.o_proj`, `attn.wkv` of `mtp.0.attn.wkv`."""
        assert self.layer is not None, self.name
        return re.split(r"\.\d+\.", self.module, maxsplit=1)[1]

    @property
    def part(self) -> str:
        """The part of the model that it belongs to, as reports tell sizes by."""
        if self.mtp:
            return "mtp layer"
        if self.block is not None:
            return {"attention": "attention", "expert": "routed experts"}.get(self.block, "mlp")
        if self.role == "copied":
            return "beside the text model"
        return "embeddings and head" if self.role in ("embedding", "head") else "norms"


@dataclass(frozen=True)
class ScaleGroup:
    """Per-channel scales s that can move between a producer and everything that reads it, without
    changing the model.

    The producer (a norm's gain, or the output rows of a linear) is divided by s; the columns of
    every consumer are multiplied by s. Every reader of the producer's output is listed, quantized
    or not: leaving one out changes the function.
    `observe` is the module whose input is the scaled activation. `expert` is set where producer and
    consumer belong to one expert;
    `reaches_experts` where the routed experts are among the consumers. `biased`: the producer's
    bias, `producer`.bias, is divided too.
    `heads`: where o's columns are not the producer's rows one by one.
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


@dataclass(frozen=True)
class GatedMlp:
    """The rows of one gated MLP, routed expert or shared: gate and up [I, H], down [H, I]; the
    names of their biases, if they have some."""

    gate: Parameter
    up: Parameter
    down: Parameter
    biases: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Parameter]) -> "GatedMlp":
        """From its rows, in any order."""
        rows = list(rows)
        by_projection = {row.projection: row for row in rows}
        linears = (by_projection["gate"], by_projection["up"], by_projection["down"])
        biased = {row.name for row in rows if row.role == "bias"}
        return cls(*linears, tuple(name for row in linears if (name := row.bias) in biased))

    @property
    def rows(self) -> tuple[Parameter, Parameter, Parameter]:
        return self.gate, self.up, self.down

    @property
    def modules(self) -> tuple[str, str, str]:
        return self.gate.module, self.up.module, self.down.module


def routed_experts(rows: Iterable[Parameter], layer: int) -> dict[int, GatedMlp]:
    """The routed experts of one layer by number, in the order of the table; empty for a layer
    without."""
    experts: dict[int, list[Parameter]] = {}
    for row in rows:
        if row.layer == layer and row.expert is not None:
            experts.setdefault(row.expert, []).append(row)
    return {number: GatedMlp.of(own) for number, own in experts.items()}


def resolve(rows: list[Parameter], names: Container[str]) -> list[Parameter]:
    """The rows as a checkpoint with these tensor names spells them; optional rows it lacks are left
    out."""
    resolved = []
    for row in rows:
        if row.other_name is not None and row.name not in names and row.other_name in names:
            row = replace(row, name=row.other_name)
        if not row.optional or row.name in names:
            resolved.append(row)
    return resolved
