"""npu_mla_prolog_v3: projections, norms, rotation, absorption and the cache's new rows in one
launch, two with int8 weights.

The weights lie in the cube's layout, once: prefill, which wants queries that are not absorbed,
multiplies by the same tensors. The operator turns pairs of neighbours; where a model's pairs lie
half a head apart, the rotary rows of its weights are brought together here, and the outputs that
prefill sees are put back.
"""

import torch
from torch import Tensor

from quantkit_kernels.codes import CodedLatents
from quantkit_kernels.paged import Latents, PagedLatents, Rotation, pairs_apart, pairs_together
from quantkit_kernels.prolog import MlaProlog, MlaSizes, MlaWeights
from quantkit_kernels.torch_npu.attention_rules import (
    PROLOG_HEADS,
    PROLOG_HIDDEN,
    PROLOG_LATENT,
    PROLOG_NOPE,
    PROLOG_Q_LORA,
    PROLOG_ROPE,
)
from quantkit_kernels.torch_npu.calls import mla_prolog as launch
from quantkit_kernels.torch_npu.functional import absorbed_weights, attend, values
from quantkit_kernels.torch_npu.linear import NzLinear, nz_linear
from quantkit_kernels.weights import Dense, Int8, Weight

LIMITS = (
    f"hidden {PROLOG_HIDDEN[0]} to {PROLOG_HIDDEN[-1]}, q_lora_rank "
    f"{' or '.join(map(str, PROLOG_Q_LORA))}, heads of "
    f"{' or '.join(map(str, PROLOG_NOPE))} + {PROLOG_ROPE}, latent {PROLOG_LATENT}, bfloat16, "
    "weights int8 or unquantized"
)


def prolog_refused(sizes: MlaSizes, kinds: tuple[str, str, str]) -> str | None:
    """Why the operator does not take such a layer."""
    if len(set(kinds)) > 1 or kinds[0] not in ("int8", "dense"):
        return (
            "takes weights that are all int8 or all unquantized, not "
            f"{', '.join(dict.fromkeys(kinds))}"
        )
    made_for = (
        PROLOG_HIDDEN,
        PROLOG_Q_LORA,
        (PROLOG_LATENT,),
        PROLOG_HEADS,
        PROLOG_NOPE,
        (PROLOG_ROPE,),
    )
    for name, size, allowed in zip(MlaSizes._fields, sizes, made_for):
        if size not in allowed:
            return f"was not made for {name} = {size}, but {', '.join(map(str, allowed))}"
    return None


class FusedProlog(MlaProlog):
    def __init__(
        self,
        weights: MlaWeights,
        sizes: MlaSizes,
        eps: float,
        interleaved: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(weights.kv_b.to(device), sizes.nope, interleaved, "torch_npu")
        self._heads = sizes.heads
        q_b, kv_a = weights.q_b, weights.kv_a
        if not interleaved:
            q_b, kv_a = _together(q_b, sizes.heads), _together(kv_a, 1)
        self._q_a, self._q_b, self._kv_a = (
            nz_linear(one, dtype, device) for one in (weights.q_a, q_b, kv_a)
        )
        self._w_uk, self._w_uv = absorbed_weights(self.kv_b, sizes.nope)
        self._gains, self._eps = (weights.q_norm.to(device), weights.kv_norm.to(device)), eps

    def query(
        self, x: Tensor, rotation: Rotation, cache: Latents, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert not isinstance(cache, Tensor | CodedLatents), "two tensors, as cache_layout says"
        four = (self._q_a.weight, self._q_b.weight, self._w_uk, self._kv_a.weight)
        return launch(
            x,
            four,
            self._gains,
            rotation.cos,
            rotation.sin,
            cache,
            slots,
            self._eps,
            self._scales(),
        )

    def attend(self, absorbed: Tensor, q_pe: Tensor, pages: PagedLatents, scale: float) -> Tensor:
        return values(attend(absorbed, q_pe, pages, scale), self._w_uv)

    def qkv_a(self, x: Tensor) -> Tensor:
        return torch.cat([self._q_a(x), self._in_model_order(self._kv_a(x), 1)], dim=-1)

    def q_b(self, x: Tensor) -> Tensor:
        return self._in_model_order(self._q_b(x), self._heads)

    def _in_model_order(self, y: Tensor, heads: int) -> Tensor:
        """y [T, heads * (.. + R)] with the rotary channels of each head where the model has
        them."""
        if self.interleaved:
            return y
        y = y.unflatten(-1, (heads, -1))
        return torch.cat(
            [y[..., :-PROLOG_ROPE], pairs_apart(y[..., -PROLOG_ROPE:])], dim=-1
        ).flatten(-2)

    def held(self) -> list[Tensor]:
        return [*self._q_a.held(), *self._q_b.held(), *self._kv_a.held(), self._w_uk, self._w_uv]

    def _scales(self) -> tuple[Tensor, Tensor, Tensor] | None:
        q_a, q_b, kv_a = self._q_a, self._q_b, self._kv_a
        if isinstance(q_a, NzLinear) or isinstance(q_b, NzLinear) or isinstance(kv_a, NzLinear):
            return None
        return q_a.scale, q_b.scale, kv_a.scale


def mla_prolog(
    weights: MlaWeights,
    sizes: MlaSizes,
    eps: float,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> FusedProlog:
    return FusedProlog(weights, sizes, eps, interleaved, dtype, device)


def _together(weight: Weight, heads: int) -> Weight:
    """The weight with the rotary rows, which end each head's, in pairs of neighbours."""
    rows = torch.arange(weight[0].shape[0], device=weight[0].device).unflatten(0, (heads, -1))
    order = torch.cat(
        [rows[:, :-PROLOG_ROPE], pairs_together(rows[:, -PROLOG_ROPE:])], dim=-1
    ).flatten()
    assert isinstance(weight, (Int8, Dense)), "prolog_refused says so"
    return type(weight)._make(tensor[order] for tensor in weight)
