"""The prolog as the operators it stands for, one after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit_kernels.latents import Latents
from quantkit_kernels.prolog import MlaProlog, MlaSizes, MlaWeights
from quantkit_kernels.reference import functional
from quantkit_kernels.reference.linear import linear


def prolog_refused(sizes: MlaSizes, kinds: tuple[str, str, str]) -> str | None:
    return None


class ChainProlog(MlaProlog):
    def __init__(
        self, weights: MlaWeights, sizes: MlaSizes, eps: float, interleaved: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(weights.kv_b, sizes.nope, "reference")
        self._q_a, self._q_b, self._kv_a = (linear(one, dtype, device) for one in (weights.q_a, weights.q_b, weights.kv_a))
        self._gains, self._heads, self._eps, self._interleaved = (weights.q_norm, weights.kv_norm), sizes.heads, eps, interleaved

    def query(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Latents, slots: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(cache, Tensor), "one tensor, as cache_layout says"
        q_a = functional.mla_prepare(self.qkv_a(x), *self._gains, cos, sin, cache, slots, self._eps, self._interleaved)
        q = self.q_b(q_a).unflatten(-1, (self._heads, -1))
        turned = functional.turned(q[..., self.nope :], cos, sin, self._interleaved)
        return functional.absorbed(q[..., : self.nope], self.kv_b), turned

    def attend(
        self,
        absorbed: Tensor,
        q_pe: Tensor,
        cache: Latents,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        lengths: Sequence[int] | None,
    ) -> Tensor:
        assert isinstance(cache, Tensor), "one tensor, as cache_layout says"
        query = torch.cat([absorbed, q_pe], dim=-1)
        attended = functional.attend(query, cache, block_table, seq_lens, scale, self.kv_b.shape[2])
        return functional.values(attended, self.kv_b, self.nope)

    def qkv_a(self, x: Tensor) -> Tensor:
        return torch.cat([self._q_a(x), self._kv_a(x)], dim=-1)

    def q_b(self, x: Tensor) -> Tensor:
        return self._q_b(x)

    def held(self) -> list[Tensor]:
        return [*self._q_a.held(), *self._q_b.held(), *self._kv_a.held()]


def mla_prolog(
    weights: MlaWeights, sizes: MlaSizes, eps: float, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> ChainProlog:
    return ChainProlog(weights, sizes, eps, interleaved, dtype, device)
