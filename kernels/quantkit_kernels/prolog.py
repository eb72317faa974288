"""Latent attention of a decode step over prepared weights: everything before attention as one
operator, then attention.

What `mla_prepare`, `mla_decode` and the projections around them compute launch by launch; the
reference does just that.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import check_compute_dtype, check_tensor, require
from quantkit_kernels.paged import Latents, PagedLatents, Rotation
from quantkit_kernels.weights import Weight, check_weight, kind, shape


class MlaWeights(NamedTuple):
    """q_a [q_lora, H], q_b [heads * (N + R), q_lora] and kv_a [kv_lora + R, H], packed or not; kv_b
    float [heads, N + V, kv_lora], of each head W_UK, then W_UV; q_norm [q_lora] and kv_norm
    [kv_lora] float: gains."""

    q_a: Weight
    q_b: Weight
    kv_a: Weight
    kv_b: Tensor
    q_norm: Tensor
    kv_norm: Tensor


class MlaSizes(NamedTuple):
    """Of `MlaWeights`: hidden size, ranks of the query's and the keys' projections, heads, and a
    head's N and R."""

    hidden: int
    q_lora: int
    kv_lora: int
    heads: int
    nope: int
    rope_dim: int


class MlaProlog(ABC):
    """One layer's. backend: who runs it; nope: N of `MlaWeights`; interleaved: as its rotations
    must be."""

    def __init__(self, kv_b: Tensor, nope: int, interleaved: bool, backend: str) -> None:
        self.kv_b, self.nope, self.interleaved, self.backend = kv_b, nope, interleaved, backend

    def __call__(
        self, x: Tensor, rotation: Rotation, slots: Tensor, pages: PagedLatents, *, scale: float
    ) -> Tensor:
        """x [T, H] -> what the heads attended to [T, heads, V]; the other arguments are those of
        `mla_prepare` and `mla_decode`."""
        fits = rotation.interleaved == self.interleaved
        require(
            fits,
            f"rotation: interleaved {rotation.interleaved}, the weights are laid out for "
            f"{self.interleaved}",
        )
        absorbed, q_pe = self.query(x, rotation, pages.cache, slots)
        return self.attend(absorbed, q_pe, pages, scale)

    @abstractmethod
    def query(
        self, x: Tensor, rotation: Rotation, cache: Latents, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Caches what is to be kept of x [T, H]; returns the queries, absorbed [T, heads, kv_lora],
        and their rotary part, rotated [T, heads, R] and in the order that the cache has."""

    @abstractmethod
    def attend(self, absorbed: Tensor, q_pe: Tensor, pages: PagedLatents, scale: float) -> Tensor:
        """What `query` returns -> [T, heads, V]."""

    @abstractmethod
    def qkv_a(self, x: Tensor) -> Tensor:
        """The projections of q_a and kv_a side by side, [T, q_lora + kv_lora + R]: the same
        weights, for passes that want keys and values."""

    @abstractmethod
    def q_b(self, x: Tensor) -> Tensor:
        """The projection of q_b, [T, heads * (N + R)]: the same weights."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """The tensors kept between calls, kv_b not among them."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.held())


def why_no_prolog(
    weights: MlaWeights, rope_dim: int, backend: str, dtype: torch.dtype, device: torch.device
) -> str | None:
    """None where `backend` has one operator for such a layer, else the reason in a few words."""
    reason = backends.why_unusable("mla_prolog", backend, device, dtype)
    if reason is None:
        kinds = (kind(weights.q_a), kind(weights.q_b), kind(weights.kv_a))
        reason = backends.module(backend).prolog_refused(sizes_of(weights, rope_dim), kinds)
    return reason


def prepare_mla_prolog(
    weights: MlaWeights,
    rope_dim: int,
    *,
    eps: float,
    interleaved: bool = True,
    backend: str = "reference",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> MlaProlog:
    """Lay a layer's weights out for a backend. eps: of both norms. Raises ValueError for tensors
    that do not fit each other, and with the reason where the backend has no such operator."""
    for weight in (weights.q_a, weights.q_b, weights.kv_a):
        check_weight(weight)
    check_compute_dtype(dtype)
    sizes = sizes_of(weights, rope_dim)
    require(
        shape(weights.q_b) == (sizes.heads * (sizes.nope + rope_dim), sizes.q_lora),
        f"q_b: {list(shape(weights.q_b))} does not fit",
    )
    require(
        shape(weights.kv_a) == (sizes.kv_lora + rope_dim, sizes.hidden),
        f"kv_a: {list(shape(weights.kv_a))} does not fit",
    )
    check_tensor("kv_b", weights.kv_b, (sizes.heads, None, sizes.kv_lora), (dtype,))
    check_tensor("q_norm", weights.q_norm, (sizes.q_lora,), (dtype,))
    check_tensor("kv_norm", weights.kv_norm, (sizes.kv_lora,), (dtype,))
    target = weights.kv_b.device if device is None else torch.device(device)
    reason = why_no_prolog(weights, rope_dim, backend, dtype, target)
    require(reason is None, f"backend: {backend} has no prolog here: {reason}")
    prolog: MlaProlog = backends.module(backend).mla_prolog(
        weights, sizes, eps, interleaved, dtype, target
    )
    return prolog


def sizes_of(weights: MlaWeights, rope_dim: int) -> MlaSizes:
    q_lora, hidden = shape(weights.q_a)
    heads, _, kv_lora = weights.kv_b.shape
    return MlaSizes(
        hidden, q_lora, kv_lora, heads, shape(weights.q_b)[0] // heads - rope_dim, rope_dim
    )
