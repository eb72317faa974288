"""A mixture whose routed experts work in a latent space, narrower than the residual stream
(LatentMoE): one linear into it for all experts, one back from their sum, after a norm. The router
and the shared expert read the stream.

Engines compute both linears in 16 bits. Symbols: T tokens, H hidden_size, L width of the space.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from quantkit_kernels import Routing, UnsummedPairs, rms_norm
from torch import Tensor

from quantkit.models.mlp import MixtureNames, MoeMlp, moe_scale_groups
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

_INTO, _NORM, _BACK = "routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj"


@dataclass(frozen=True)
class LatentSizes:
    """eps: of the norm of the experts' sum; None without that norm."""

    width: int
    hidden: int
    eps: float | None


def with_latent_experts(
    rows: Iterable[Parameter], sizes: LatentSizes, module: str
) -> list[Parameter]:
    """The rows of a stack whose experts, in a layer's `module`, read the stream, with experts in
    the latent space."""
    found: list[Parameter] = []
    for row in rows:
        if row.expert is not None:
            if row.expert == 0 and row.projection == "gate":
                found += _around(f"model.layers.{row.layer}.{module}", sizes, row)
            row = replace(row, shape=_narrowed(row, sizes.width))
        found.append(row)
    return found


def _narrowed(row: Parameter, width: int) -> tuple[int, ...]:
    outputs, inputs = row.shape
    return (width, inputs) if row.projection == "down" else (outputs, width)


def _around(prefix: str, sizes: LatentSizes, expert: Parameter) -> list[Parameter]:
    """What surrounds the experts of a layer."""
    into = Parameter(
        f"{prefix}.{_INTO}.weight",
        (sizes.width, sizes.hidden),
        "latent",
        layer=expert.layer,
        mtp=expert.mtp,
        block="router",
    )
    shape = (sizes.hidden, sizes.width)
    back = replace(into, name=f"{prefix}.{_BACK}.weight", shape=shape, after_experts=True)
    norm = replace(back, name=f"{prefix}.{_NORM}.weight", shape=shape[1:], role="norm")
    return [into, *([] if sizes.eps is None else [norm]), back]


def latent_scale_groups(
    prefix: str, norm: str, experts: int, names: MixtureNames
) -> list[ScaleGroup]:
    """As `moe_scale_groups`: the norm to its readers, the linear into the latent space to gate and
    up of all routed experts."""
    first, *others = moe_scale_groups(prefix, norm, experts, names)
    into = f"{prefix}.{_INTO}"
    routed = tuple(one for one in first.consumers if one.startswith(f"{prefix}.experts."))
    readers = tuple(one for one in first.consumers if one not in {*routed})
    outer = replace(first, consumers=(*readers, into), reaches_experts=False)
    inner = replace(
        first,
        name=f"{prefix}.latent",
        producer=into,
        producer_is_norm=False,
        consumers=routed,
        observe=routed[0],
    )
    return [outer, inner, *others]


class LatentMoe(MoeMlp):
    def __init__(
        self,
        routing: Routing,
        prefix: str,
        weights: Weights,
        names: MixtureNames,
        sizes: LatentSizes,
    ) -> None:
        super().__init__(routing, prefix, weights, names)
        self.sizes = sizes
        self.into, self.back = (weights.linear(f"{prefix}.{name}") for name in (_INTO, _BACK))
        self.gain = None if sizes.eps is None else weights.tensor(f"{prefix}.{_NORM}.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, L + H], partial over ranks: the experts' sum in the latent space, and the
        shared expert's output."""
        topk_ids, topk_weights = self.choose(x)
        routed = self.experts(self.into(x), topk_ids, topk_weights)
        assert self.shared is not None, "a latent mixture has a shared expert of its own"
        return torch.cat((routed, self._shared_output(self.shared, x)), dim=-1)

    def unsummed(self, x: Tensor) -> Tensor | UnsummedPairs:
        return self(x)

    def finish(self, both: Tensor) -> Tensor:
        """What `__call__` returns, summed over the ranks, [T, L + H] -> [T, H]."""
        routed, shared = both.split((self.sizes.width, self.sizes.hidden), dim=-1)
        if self.gain is not None and self.sizes.eps is not None:
            routed = rms_norm(routed.contiguous(), self.gain, self.sizes.eps)
        return self.back(routed) + shared
