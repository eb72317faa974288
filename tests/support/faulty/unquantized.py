"""Faults in tensors that are stored plain, which show without a source."""

import torch

from faulty.contents import Contents
from faulty.fault import change, is_quantized, tensor_fault


@tensor_fault("values-not-finite", suits=lambda c: True)
def a_norm_holds_infinity(c: Contents) -> None:
    change(
        c,
        "model.layers.1.input_layernorm.weight",
        lambda t: t.index_fill(0, torch.tensor([5]), float("inf")),
    )


@tensor_fault("values-not-finite", suits=lambda c: True)
def the_embedding_holds_nan(c: Contents) -> None:
    change(
        c, "model.embed_tokens.weight", lambda t: t.index_fill(0, torch.tensor([7]), float("nan"))
    )


@tensor_fault("values-absurd", suits=lambda c: True)
def a_norm_is_all_zeros(c: Contents) -> None:
    change(c, "model.layers.1.post_attention_layernorm.weight", torch.zeros_like)


@tensor_fault(
    "linears-equal", suits=lambda c: sum(name.endswith("mlp.gate.weight") for name in c.tensors) > 1
)
def a_router_is_another_layers(c: Contents) -> None:
    routers = [name for name in c.tensors if name.endswith("mlp.gate.weight")]
    c.tensors[routers[1]] = c.tensors[routers[0]]


@tensor_fault("head-ignored", "config-field", suits=lambda c: "lm_head.weight" in c.tensors)
def the_head_is_said_to_be_tied(c: Contents) -> None:
    c.config["tie_word_embeddings"] = True


@tensor_fault("values-absurd", suits=lambda c: True)
def half_of_the_embedding_is_zero(c: Contents) -> None:
    change(
        c, "model.embed_tokens.weight", lambda t: t * (torch.arange(len(t)) < len(t) // 2)[:, None]
    )


@tensor_fault("values-absurd", suits=lambda c: True)
def the_last_norm_is_negative(c: Contents) -> None:
    change(c, "model.norm.weight", torch.negative)


@tensor_fault("tensors-unknown", suits=is_quantized)
def a_bias_has_no_place(c: Contents) -> None:
    module = c.linear("o_proj")
    c.tensors[f"{module}.bias"] = torch.ones(c.linears[module].shape[0], dtype=torch.float16)


@tensor_fault("values-absurd", suits=lambda c: True)
def bfloat16_is_read_as_float16(c: Contents) -> None:
    c.tensors |= {
        name: tensor.view(torch.float16)
        for name, tensor in c.tensors.items()
        if tensor.dtype == torch.bfloat16
    }


@tensor_fault("values-absurd", suits=lambda c: True)
def float16_is_read_as_bfloat16(c: Contents) -> None:
    c.tensors |= {
        name: tensor.half().view(torch.bfloat16)
        for name, tensor in c.tensors.items()
        if tensor.dtype == torch.bfloat16
    }


@tensor_fault("values-absurd", suits=lambda c: True)
def norms_have_the_other_order_of_bytes(c: Contents) -> None:
    for name in [name for name in c.tensors if name.endswith("layernorm.weight")]:
        c.tensors[name] = (
            c.tensors[name]
            .view(torch.uint8)
            .unflatten(0, (-1, 2))
            .flip(1)
            .flatten()
            .view(c.tensors[name].dtype)
        )
