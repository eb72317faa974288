"""Grouped-query attention over torch_npu's fused operators, pages where they lie, and attention of prompts. Where an operator's rules
exclude the arguments, the plain torch of the reference runs on the NPU instead."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.latents import Latents
from quantkit_kernels.prompts import Prompts
from quantkit_kernels.reference import grouped as plain
from quantkit_kernels.reference import prompts as plain_prompts
from quantkit_kernels.torch_npu.calls import bind, call
from quantkit_kernels.torch_npu.functional import rms_norm, turned
from quantkit_kernels.torch_npu.rules import violated

_OPERATOR = "npu_fused_infer_attention_score"


def gqa_prepare(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    return plain.gqa_prepare(qkv, q_norm, k_norm, cos, sin, keys, values, slots, eps, interleaved, rms_norm, turned)


def gqa_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    lengths: Sequence[int] | None,
) -> Tensor:
    """The lengths are the host's: a captured graph is told them before each replay (accelerator.py)."""
    known = list(seq_lens.tolist() if lengths is None else lengths)
    kwargs: dict[str, Any] = {
        "block_table": block_table.to(torch.int32),
        "actual_seq_lengths_kv": known,
        "num_heads": q.shape[1],
        "num_key_value_heads": keys.shape[2],
        "scale": scale,
        "input_layout": "BNSD",
        "block_size": keys.shape[1],
    }
    args = (q.unsqueeze(2).contiguous(), keys.flatten(2), values.flatten(2))
    if window or violated(_OPERATOR, bind(_OPERATOR, args, kwargs)):
        return plain.gqa_decode(q, keys, values, block_table, seq_lens, scale, window, lengths)
    attended: Tensor = call(_OPERATOR, *args, **kwargs)[0]
    attended = attended.squeeze(2)
    # A row of length 0 attends to nothing: the manual does not say what the operator gives then.
    return attended if all(known) else attended.masked_fill((seq_lens == 0)[:, None, None], 0.0)


def gqa_prefill(q: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, scale: float, window: int) -> Tensor:
    return plain_prompts.gqa_prefill(q, keys, values, prompts, scale, window, plain_prompts.attend_at_once)


def mla_prefill(
    q: Tensor, kv_b: Tensor, cos: Tensor, sin: Tensor, cache: Latents, prompts: Prompts, scale: float, interleaved: bool
) -> Tensor:
    return plain_prompts.mla_prefill(q, kv_b, cos, sin, cache, prompts, scale, interleaved, plain_prompts.attend_at_once, turned)
