"""How gate and up of an MLP become what its down projection reads, where that is not SiLU(gate) *
up alone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Of x, in its dtype. On a CPU by exp: torch's own computes the last elements of a tensor by
    other instructions than those before them, so a row would depend on the others."""
    if x.device.type != "cpu":
        return x.sigmoid()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (1 + (-wide).exp()).reciprocal().to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """As `sigmoid`, of x in float32."""
    if x.device.type != "cpu":
        return torch.nn.functional.softplus(x)
    return torch.where(x > 20, x, x.exp().log1p())


@dataclass(frozen=True)
class Gating:
    """g * sigmoid(alpha * g) * (u + shift) of a gate g of at most `limit` and an up u within -limit
    .. limit.

    limit None: as they are. Without arguments this is SiLU(g) * u; gpt-oss has alpha 1.702, limit 7
    and shift 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    @property
    def is_formula(self) -> bool:
        """Whether alpha, limit and shift say all, so that a kernel can compute it; a subclass calls
        what it likes."""
        return type(self) is Gating

    @property
    def is_linear_in_up(self) -> bool:
        """Whether a scale can move from up's rows to down's columns."""
        return self.limit is None and self.shift == 0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., I] -> [..., I] of their dtype, float32 inside."""
        g, u = gate.float(), up.float()
        if self.limit is not None:
            g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        return (g * sigmoid(self.alpha * g) * (u + self.shift)).to(gate.dtype)


SILU = Gating()


@dataclass(frozen=True)
class SituGating(Gating):
    """beta * tanh(g / beta) * sigmoid(g) * linear * tanh(u / linear): SiLU of a bounded gate, of a
    bounded up (Kimi-K3's SiTU). linear None: up as it is."""

    beta: float = 1.0
    linear: float | None = None

    @property
    def is_linear_in_up(self) -> bool:
        return self.linear is None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.float(), up.float()
        if self.linear is not None:
            u = self.linear * (u / self.linear).tanh()
        return (self.beta * (g / self.beta).tanh() * sigmoid(g) * u).to(gate.dtype)


class ExpertBiases(NamedTuple):
    """Of one expert's linears: gate and up [I], down [H]."""

    gate: Tensor
    up: Tensor
    down: Tensor
