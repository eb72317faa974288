"""Faults in values that only a comparison with the source shows."""

import torch
from packed_model import rounded

from faulty.codes import has_codes_around_zero, recode
from faulty.contents import Contents
from faulty.fault import (
    change,
    codes_of,
    has_experts,
    has_four_bits,
    has_groups,
    has_quantized_experts,
    of_format,
    scale_of,
    tensor_fault,
)
from quantkit.grids.base import dequantize


@tensor_fault(
    "scales-absurd",
    suits=of_format(
        "awq", "gptq", "compressed-tensors pack", "compressed-tensors int", "modelslim"
    ),
    source=True,
)
def a_linears_scales_are_tenfold(c: Contents) -> None:
    change(c, scale_of(c, c.linear()), lambda t: t * 10)


@tensor_fault("packing-order", suits=has_four_bits, source=True)
def nibbles_are_exchanged(c: Contents) -> None:
    for module in c.linears:
        name = codes_of(c, module)
        if c.tensors[name].dtype == torch.int32 and c.linears[module].grid.bits != 4:
            continue
        octets = c.tensors[name].contiguous().view(torch.uint8)
        c.tensors[name] = (((octets & 15) << 4) | (octets >> 4)).view(c.tensors[name].dtype)


@tensor_fault("gate-up-exchanged", source=True)
def gate_and_up_are_exchanged(c: Contents) -> None:
    prefix = c.linear("gate_proj").rpartition(".")[0]
    c.swap(f"{prefix}.gate_proj", f"{prefix}.up_proj")


@tensor_fault("experts-exchanged", suits=has_quantized_experts, source=True, replays="vllm 45212")
def two_experts_are_exchanged(c: Contents) -> None:
    c.swap(c.experts[0], c.experts[3])


@tensor_fault("layers-exchanged", source=True)
def two_layers_are_exchanged(c: Contents) -> None:
    one, other = (f"model.layers.{c.config['num_hidden_layers'] - n}.self_attn" for n in (1, 2))
    c.swap(one, other)


@tensor_fault("error-large", "unlike-source", source=True)
def a_linear_is_noise(c: Contents) -> None:
    module = c.linear()
    generator = torch.Generator().manual_seed(0)
    change(
        c,
        codes_of(c, module),
        lambda t: torch.randint(-100, 100, t.shape, generator=generator).to(t.dtype) * 16777619,
    )


@tensor_fault("unlike-source", source=True)
def it_is_another_model(c: Contents) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in c.tensors.items():
        if tensor.dim() == 2:
            c.tensors[name] = tensor[torch.randperm(len(tensor), generator=generator)]


@tensor_fault("error-large", suits=lambda c: True, source=True)
def the_embedding_is_another(c: Contents) -> None:
    change(c, "model.embed_tokens.weight", lambda t: t.flip(0))


def divide_norm(c: Contents, layer: int, router: bool, experts: bool) -> None:
    """Fold scales from the norm before the experts into some of its readers: what peers' AWQ leaves
    out is the router."""
    hidden = c.config["hidden_size"]
    scale = torch.exp(0.8 * torch.randn(hidden, generator=torch.Generator().manual_seed(3)))
    prefix = f"model.layers.{layer}"
    change(c, f"{prefix}.post_attention_layernorm.weight", lambda t: t / scale)
    if router:
        change(c, f"{prefix}.mlp.gate.weight", lambda t: t * scale)
    for name in [
        name
        for name in c.tensors
        if name.startswith(f"{prefix}.mlp.")
        and name.endswith(("gate_proj.weight", "up_proj.weight"))
    ]:
        if experts:
            change(c, name, lambda t: t * scale)


@tensor_fault(
    "router-not-compensated",
    suits=lambda c: has_experts(c) and not c.linears,
    source=True,
    replays="peers.md A3.2: AutoAWQ's deepseek_v3.py",
)
def the_router_was_not_scaled(c: Contents) -> None:
    divide_norm(c, int(c.experts[0].split(".")[2]), router=False, experts=True)


@tensor_fault("folding-broken", suits=lambda c: True, source=True)
def a_norm_was_divided_and_nothing_multiplied(c: Contents) -> None:
    scale = torch.exp(
        0.8 * torch.randn(c.config["hidden_size"], generator=torch.Generator().manual_seed(4))
    )
    change(c, "model.layers.1.input_layernorm.weight", lambda t: t / scale)


@tensor_fault(
    "error-large",
    suits=of_format("awq", "gptq", "compressed-tensors pack", "modelslim"),
    source=True,
)
def a_linears_sign_is_the_other(c: Contents) -> None:
    change(c, scale_of(c, c.linear()), torch.negative)


@tensor_fault("error-large", suits=of_format("compressed-tensors int", "modelslim"), source=True)
def scales_of_rows_are_shuffled(c: Contents) -> None:
    generator = torch.Generator().manual_seed(6)
    change(c, scale_of(c, c.linear()), lambda t: t[torch.randperm(len(t), generator=generator)])


@tensor_fault(
    "scales-absurd",
    suits=of_format("awq", "gptq", "compressed-tensors pack", "compressed-tensors int"),
    source=True,
)
def a_linear_is_twice_as_large(c: Contents) -> None:
    change(c, scale_of(c, c.linear("o_proj")), lambda t: t * 2)


@tensor_fault(
    "error-large",
    suits=lambda c: has_groups(c) and of_format("awq", "gptq", "compressed-tensors pack")(c),
    source=True,
)
def scales_of_groups_are_in_another_order(c: Contents) -> None:
    module = c.linear("o_proj")
    change(
        c,
        scale_of(c, module),
        lambda t: t.roll(1, 0 if scale_of(c, module).endswith(".scales") else 1),
    )


@tensor_fault("error-large", suits=of_format("compressed-tensors int", "modelslim"), source=True)
def eight_bits_hold_four(c: Contents) -> None:
    name = codes_of(c, c.linear())
    c.tensors[name] = ((c.tensors[name].float() / 16).round() * 16).clamp(-128, 127).to(torch.int8)


@tensor_fault("error-large", suits=has_experts, source=True)
def a_router_has_eight_bits(c: Contents) -> None:
    name = next(name for name in c.tensors if name.endswith("mlp.gate.weight"))
    change(c, name, lambda t: t.to(torch.float8_e4m3fn).float())


@tensor_fault("folding-broken", "router-not-compensated", suits=lambda c: True, source=True)
def two_norms_change_places(c: Contents) -> None:
    c.swap("model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm")


@tensor_fault("folding-broken", source=True)
def norms_are_squared(c: Contents) -> None:
    for name in [name for name in c.tensors if name.endswith("input_layernorm.weight")]:
        change(c, name, torch.square)


@tensor_fault("error-large", suits=has_codes_around_zero, source=True)
def codes_were_cut_and_not_rounded(c: Contents) -> None:
    lowest = -(2 ** (c.linears[c.linear()].grid.bits - 1))
    recode(
        c,
        lambda codes: (codes.int() - torch.arange(codes.numel()).view(codes.shape) % 2).clamp(
            min=lowest
        ),
    )


def multiply_columns(c: Contents, module: str, factors: torch.Tensor) -> None:
    """Round a quantized linear again, with other factors of its inputs."""
    linear = c.linears[module]
    values = (
        dequantize(linear.format.unpack(module, {name: c.tensors[name] for name in linear.tensors}))
        * factors
    )
    c.tensors |= linear.format.pack(
        module, rounded(values, linear.format, linear.grid, values.abs().max())
    )


def uneven(count: int) -> torch.Tensor:
    return torch.exp(0.5 * torch.randn(count, generator=torch.Generator().manual_seed(8)))


@tensor_fault("folding-broken", source=True)
def smoothing_was_folded_into_linears_alone(c: Contents) -> None:
    for side in "qkv":
        module = f"model.layers.1.self_attn.{side}_proj"
        if module in c.linears:
            multiply_columns(c, module, uneven(c.config["hidden_size"]))
    if "model.layers.1.self_attn.q_proj" not in c.linears:
        multiply_columns(c, "model.layers.1.self_attn.q_a_proj", uneven(c.config["hidden_size"]))


@tensor_fault("folding-broken", source=True)
def down_was_multiplied_and_up_was_not_divided(c: Contents) -> None:
    multiply_columns(c, c.linear(), uneven(c.linears[c.linear()].shape[1]))


@tensor_fault("error-large", source=True)
def an_adapter_was_merged(c: Contents) -> None:
    module, generator = c.linear("o_proj"), torch.Generator().manual_seed(12)
    linear = c.linears[module]
    values = dequantize(
        linear.format.unpack(module, {name: c.tensors[name] for name in linear.tensors})
    )
    low = torch.randn(len(values), 4, generator=generator) @ torch.randn(
        4, values.shape[1], generator=generator
    )
    values = values + 0.25 * values.norm() / low.norm() * low
    c.tensors |= linear.format.pack(
        module, rounded(values, linear.format, linear.grid, values.abs().max())
    )
