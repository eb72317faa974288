"""Attention of prompts: the Triton backend's kernel, with this one's rotary embedding."""

from torch import Tensor

from quantkit_kernels.cuda.operators import rope
from quantkit_kernels.indexer import TopTokens
from quantkit_kernels.paged import Latents, Rotation
from quantkit_kernels.prompts import Prompts
from quantkit_kernels.triton.attention import prefill
from quantkit_kernels.triton.attention.prefill import gqa_prefill, takes_selected

__all__ = ["gqa_prefill", "mla_prefill", "takes_selected"]


def mla_prefill(
    q: Tensor,
    kv_b: Tensor,
    rotation: Rotation,
    cache: Latents,
    prompts: Prompts,
    scale: float,
    selected: TopTokens | None = None,
) -> Tensor:
    return prefill.mla_prefill(q, kv_b, rotation, cache, prompts, scale, selected, rope)
