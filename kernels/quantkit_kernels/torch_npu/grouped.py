"""Grouped-query attention over torch_npu's fused operators, pages where they lie, and attention of
prompts. Where an operator's rules exclude the arguments, the plain torch of the reference runs on
the NPU instead."""

from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.codes import KeyValues
from quantkit_kernels.paged import Latents, Norms, PagedKeys, Rotation
from quantkit_kernels.prompts import Prompts
from quantkit_kernels.reference import grouped as reference
from quantkit_kernels.reference import prompts as reference_prompts
from quantkit_kernels.torch_npu.calls import bind, call
from quantkit_kernels.torch_npu.functional import STEPS, absorbed_weights, rotated
from quantkit_kernels.torch_npu.rules import violated

_OPERATOR = "npu_fused_infer_attention_score_v2"


def gqa_prepare(
    qkv: Tensor, norms: Norms | None, rotation: Rotation, cache: KeyValues, slots: Tensor
) -> Tensor:
    return reference.gqa_prepare(qkv, norms, rotation, cache, slots, STEPS)


def gqa_decode(q: Tensor, pages: PagedKeys, scale: float, window: int) -> Tensor:
    """The lengths are the host's: a captured graph receives them before each replay
    (accelerator.py)."""
    keys, values, block_table, seq_lens, lengths, scales = pages
    known = list(seq_lens.tolist() if lengths is None else lengths)
    kwargs: dict[str, Any] = {
        "block_table": block_table.to(torch.int32),
        "actual_seq_kvlen": known,
        "num_query_heads": q.shape[1],
        "num_key_value_heads": keys.shape[2],
        "softmax_scale": scale,
        "input_layout": "BNSD",
        "block_size": keys.shape[1],
    }
    args = (q.unsqueeze(2).contiguous(), keys.flatten(2), values.flatten(2))
    if window or scales is not None or violated(_OPERATOR, bind(_OPERATOR, args, kwargs)):
        return reference.gqa_decode(q, pages, scale, window)
    attended: Tensor = call(_OPERATOR, *args, **kwargs)[0]
    attended = attended.squeeze(2)
    # A row of length 0 attends to nothing: the manual does not say what the operator gives then.
    return attended if all(known) else attended.masked_fill((seq_lens == 0)[:, None, None], 0.0)


def gqa_prefill(q: Tensor, cache: KeyValues, prompts: Prompts, scale: float, window: int) -> Tensor:
    return reference_prompts.gqa_prefill(
        q, cache, prompts, scale, window, own=reference_prompts.attend_at_once
    )


def mla_prefill(
    q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, prompts: Prompts, scale: float
) -> Tensor:
    q_pe = rotated(q[..., -2 * rotation.cos.shape[1] :], rotation)
    absorbed_weights(kv_b, q.shape[2] - q_pe.shape[2])  # what decoding will hold has its memory now
    return reference_prompts.attend_expanded(
        q, q_pe, kv_b, cache, prompts, scale, rotation.interleaved, reference_prompts.attend_at_once
    )
