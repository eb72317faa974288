"""The prolog as the operators that it fuses, one after the other."""

import torch
from torch import Tensor

from quantkit_kernels.paged import Latents, Norms, PagedLatents, Rotation
from quantkit_kernels.prolog import MlaProlog, MlaSizes, MlaWeights
from quantkit_kernels.reference import functional
from quantkit_kernels.reference.linear import linear


def prolog_refused(sizes: MlaSizes, kinds: tuple[str, str, str]) -> str | None:
    return None


class ChainProlog(MlaProlog):
    def __init__(
        self,
        weights: MlaWeights,
        sizes: MlaSizes,
        eps: float,
        interleaved: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(weights.kv_b, sizes.nope, interleaved, "reference")
        self._q_a, self._q_b, self._kv_a = (
            linear(one, dtype, device) for one in (weights.q_a, weights.q_b, weights.kv_a)
        )
        self._norms, self._heads = Norms(weights.q_norm, weights.kv_norm, eps), sizes.heads

    def query(
        self, x: Tensor, rotation: Rotation, cache: Latents, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(cache, Tensor), "one tensor, as cache_layout says"
        q_a = functional.mla_prepare(self.qkv_a(x), self._norms, rotation, cache, slots)
        q = self.q_b(q_a).unflatten(-1, (self._heads, -1))
        return functional.absorbed(q[..., : self.nope], self.kv_b), functional.rotated(
            q[..., self.nope :], rotation
        )

    def attend(self, absorbed: Tensor, q_pe: Tensor, pages: PagedLatents, scale: float) -> Tensor:
        attended = functional.attend(
            torch.cat([absorbed, q_pe], dim=-1), pages, scale, self.kv_b.shape[2]
        )
        return functional.values(attended, self.kv_b, self.nope)

    def qkv_a(self, x: Tensor) -> Tensor:
        return torch.cat([self._q_a(x), self._kv_a(x)], dim=-1)

    def q_b(self, x: Tensor) -> Tensor:
        return self._q_b(x)

    def held(self) -> list[Tensor]:
        return [*self._q_a.held(), *self._q_b.held(), *self._kv_a.held()]


def mla_prolog(
    weights: MlaWeights,
    sizes: MlaSizes,
    eps: float,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> ChainProlog:
    return ChainProlog(weights, sizes, eps, interleaved, dtype, device)
