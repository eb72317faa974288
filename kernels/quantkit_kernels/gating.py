"""How gate and up of an MLP become what its down projection reads, where that is not SiLU(gate) *
up alone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.hadamard import block_hadamard


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

    limit None: as they are. bound: the factor g, not that in the sigmoid, is bound * tanh(g /
    bound), and up_bound u likewise, as in Kimi-K3's SiTU; None: as they are. Without arguments this
    is SiLU(g) * u; gpt-oss has alpha 1.702, limit 7 and shift 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    bound: float | None = None
    up_bound: float | None = None

    @property
    def is_formula(self) -> bool:
        """Whether the fields say all, so that a kernel can compute it; a subclass calls what it
        likes."""
        return type(self) is Gating

    @property
    def is_silu(self) -> bool:
        """Whether this is SiLU(g) * u, of clamped g and u or not."""
        return self == Gating(limit=self.limit)

    @property
    def is_linear_in_up(self) -> bool:
        """Whether a scale can move from up's rows to down's columns."""
        return self.limit is None and self.shift == 0 and self.up_bound is None

    def rotated(self, block: int) -> "Gating":
        """This one, then the rotation of `gate_and_rotate`; block 0: none."""
        return RotatedGating(gating=self, block=block) if block else self

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., I] -> [..., I] of their dtype, float32 inside."""
        g, u = gate.float(), up.float()
        if self.limit is not None:
            g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        weight = sigmoid(self.alpha * g)
        if self.bound is not None:
            g = self.bound * (g / self.bound).tanh()
        if self.up_bound is not None:
            u = self.up_bound * (u / self.up_bound).tanh()
        return (g * weight * (u + self.shift)).to(gate.dtype)


SILU = Gating()


@dataclass(frozen=True)
class RotatedGating(Gating):
    """What `gating` gives, multiplied by Hadamard matrices as `block_hadamard` does."""

    gating: Gating = SILU
    block: int = 1

    @property
    def is_linear_in_up(self) -> bool:
        """No scale passes through a rotation."""
        return False

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        between = self.gating(gate.float(), up.float())
        return block_hadamard(between, self.block).to(gate.dtype)


class ExpertBiases(NamedTuple):
    """Of one expert's linears: gate and up [I], down [H]."""

    gate: Tensor
    up: Tensor
    down: Tensor
