"""What a model file says about itself: one row per parameter, and the groups that share a scale.

Loader, calibration, converter, planner and executor read these rows; none of them knows an architecture by name.
Symbols: H = hidden_size, N x K = out x in features of a linear.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["embedding", "head", "norm", "linear", "kv_b", "router", "router_bias", "bias", "mtp_proj"]
"""linear: may be quantized. kv_b: MLA's latent up-projection, absorbed at decode and kept in 16 bits. The rest is never quantized."""

Split = Literal["replicate", "column", "row", "vocab"]
"""Tensor parallel: column cuts N, row cuts K (outputs are partial sums), vocab cuts rows of the vocabulary."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the unquantized model.

    `fused` names the engine's fused module for siblings that must share type and FP4 global scale (gate and up, q_a and kv_a).
    `other_name` is a second spelling under which checkpoints hold the tensor (`resolve` picks); `optional` ones may be absent.
    `layer` is None outside the decoder stack; the MTP layer has layer >= num_hidden_layers and `mtp` set.
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

    @property
    def module(self) -> str:
        """The tensor's name without `.weight`: what formats and engines call the module."""
        return self.name.removesuffix(".weight")

    @property
    def part(self) -> str:
        """The part of the model that it belongs to, as reports tell sizes by."""
        if self.mtp:
            return "mtp layer"
        if self.expert is not None:
            return "routed experts"
        if ".self_attn." in self.name:
            return "attention"
        return "mlp" if ".mlp." in self.name else "embeddings and head" if self.role in ("embedding", "head") else "norms"


@dataclass(frozen=True)
class ScaleGroup:
    """Per-channel scales s that can move between a producer and everything that reads it, without changing the model.

    The producer (a norm's gain, or the output rows of a linear) is divided by s; the columns of every consumer are multiplied by s.
    Every reader of the producer's output is listed, quantized or not: leaving one out changes the function.
    `observe` is the module whose input is the scaled activation. `expert` is set where producer and consumer belong to one expert.
    """

    name: str
    producer: str
    producer_is_norm: bool
    consumers: tuple[str, ...]
    observe: str
    expert: int | None = None


def resolve(rows: list[Parameter], names: Container[str]) -> list[Parameter]:
    """The rows as a checkpoint with these tensor names spells them; optional rows it lacks are left out."""
    resolved = []
    for row in rows:
        if row.other_name is not None and row.name not in names and row.other_name in names:
            row = replace(row, name=row.other_name)
        if not row.optional or row.name in names:
            resolved.append(row)
    return resolved
