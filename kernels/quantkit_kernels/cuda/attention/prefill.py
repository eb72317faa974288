"""Attention of prompts: the Triton backend's kernel, with this one's rotary embedding."""

from functools import partial

from quantkit_kernels.cuda.operators import rope
from quantkit_kernels.triton.attention import prefill
from quantkit_kernels.triton.attention.prefill import gqa_prefill, takes_selected

__all__ = ["gqa_prefill", "mla_prefill", "takes_selected"]

mla_prefill = partial(prefill.mla_prefill, rope=rope)
