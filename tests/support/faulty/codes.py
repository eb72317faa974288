"""Faults in codes and scales that show without a source."""

from collections.abc import Callable

import torch
from torch import Tensor

from faulty.contents import Contents
from faulty.fault import (
    change,
    codes_of,
    has_quantized_experts,
    of_format,
    part,
    scale_of,
    tensor_fault,
)


@tensor_fault("values-not-finite")
def a_scale_is_nan(c: Contents) -> None:
    name = scale_of(c, c.linear())
    tensor = c.tensors[name].float().flatten().clone()
    tensor[3] = float("nan")
    c.tensors[name] = tensor.view(c.tensors[name].shape).to(c.tensors[name].dtype)


@tensor_fault("scales-zero")
def scales_are_zero(c: Contents) -> None:
    change(c, scale_of(c, c.linear()), torch.zeros_like)


@tensor_fault("scales-absurd")
def a_linears_scales_are_a_thousandfold(c: Contents) -> None:
    name = scale_of(c, c.linear())
    if c.tensors[name].dtype == torch.float8_e4m3fn:
        name = part(c, c.linear(), ".weight_scale_2", ".weight_global_scale")
        change(c, name, lambda t: t * 200 if name.endswith("_2") else t / 200)
    else:
        change(c, name, lambda t: t * 1000)


@tensor_fault("codes-constant")
def codes_are_constant(c: Contents) -> None:
    change(
        c,
        codes_of(c, c.linear()),
        lambda t: torch.full_like(
            t, 0x11 if t.dtype == torch.uint8 else 0x11111111 if t.dtype == torch.int32 else 17
        ),
    )


@tensor_fault("linears-equal", suits=has_quantized_experts)
def an_expert_is_another_ones_copy(c: Contents) -> None:
    for name in [name for name in c.tensors if name.startswith(f"{c.experts[2]}.")]:
        c.tensors[name] = c.tensors[name.replace(c.experts[2], c.experts[1])]


def multiply_codes(c: Contents, factor: int) -> None:
    """Of a linear on an integer grid; what leaves the range is clamped."""
    half = 2 ** (c.linears[c.linear()].grid.bits - 1)
    recode(c, lambda codes: (codes.int() * factor).clamp(-half, half - 1))


def recode(c: Contents, change: Callable[[Tensor], Tensor]) -> None:
    """Other codes with the same scales and zero points."""
    module = c.linear()
    linear = c.linears[module]
    weight = linear.format.unpack(module, {name: c.tensors[name] for name in linear.tensors})
    codes = change(weight.codes).to(torch.int8)
    c.tensors |= linear.format.pack(
        module, type(weight)(codes, weight.scale, weight.zero_point, weight.bits)
    )


def has_codes_around_zero(c: Contents) -> bool:
    return (
        of_format("compressed-tensors int", "compressed-tensors pack")(c)
        and c.linears[c.linear()].grid.symmetric
    )


@tensor_fault(
    "codes-saturated", "codes-constant", suits=of_format("awq", "gptq", "compressed-tensors pack")
)
def codes_are_saturated(c: Contents) -> None:
    """Two of their bits are always zero, which is found where channels are wide and few codes reach
    an end."""
    multiply_codes(c, 4)


@tensor_fault("global-scale-inverted", suits=of_format("modelopt", "compressed-tensors nvfp4"))
def global_scales_are_inverted(c: Contents) -> None:
    for name in c.tensors:
        if name.endswith((".weight_scale_2", ".weight_global_scale")):
            change(c, name, torch.reciprocal)


@tensor_fault("global-scale-inverted", suits=of_format("modelopt", "compressed-tensors nvfp4"))
def one_global_scale_is_inverted(c: Contents) -> None:
    name = part(c, c.linear(), ".weight_scale_2", ".weight_global_scale")
    change(c, name, torch.reciprocal)


@tensor_fault(
    "zero-points-off", suits=lambda c: of_format("gptq")(c) and c.linears[c.linear()].grid.bits == 4
)
def gptq_is_said_to_be_the_other_version(c: Contents) -> None:
    c.block["checkpoint_format"] = (
        "gptq" if c.block["checkpoint_format"] == "gptq_v2" else "gptq_v2"
    )


@tensor_fault("zero-points-off", suits=of_format("awq"))
def zero_points_are_one_less(c: Contents) -> None:
    for name in c.tensors:
        if name.endswith(".qzeros"):
            c.tensors[name] = (c.tensors[name].long() - 0x11111111).to(torch.int32)


@tensor_fault("codes-shifted", "zero-points-off", suits=of_format("compressed-tensors pack"))
def codes_are_in_twos_complement(c: Contents) -> None:
    for module in c.linears:
        c.tensors[codes_of(c, module)] = c.tensors[codes_of(c, module)] ^ -0x77777778


@tensor_fault("packing-order", suits=of_format("awq"))
def awq_words_are_in_natural_order(c: Contents) -> None:
    """Codes alone: zero points as they were."""
    for module in c.linears:
        words = c.tensors[codes_of(c, module)]
        nibbles = [(words >> (4 * bit)) & 15 for bit in range(8)]
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        value = sum(nibbles[order[j]].long() << (4 * j) for j in range(8))
        c.tensors[codes_of(c, module)] = torch.where(value >= 2**31, value - 2**32, value).to(
            torch.int32
        )


@tensor_fault("act-order-wrong", suits=of_format("gptq"))
def act_order_is_said_and_not_stored(c: Contents) -> None:
    c.block["desc_act"] = True
    for name in c.tensors:
        if name.endswith(".g_idx"):
            c.tensors[name] = torch.zeros_like(c.tensors[name])


@tensor_fault("act-order-wrong", suits=of_format("gptq"))
def act_order_is_stored_and_not_said(c: Contents) -> None:
    generator = torch.Generator().manual_seed(2)
    for name in c.tensors:
        if name.endswith(".g_idx"):
            c.tensors[name] = c.tensors[name][
                torch.randperm(len(c.tensors[name]), generator=generator)
            ]


@tensor_fault("act-order-wrong", suits=of_format("gptq"))
def a_group_is_out_of_range(c: Contents) -> None:
    c.block["desc_act"] = True
    name = f"{c.linear()}.g_idx"
    c.tensors[name] = c.tensors[name] + 100


@tensor_fault("description-wrong", suits=lambda c: of_format("gptq")(c) and not c.block["sym"])
def gptq_is_said_to_be_symmetric(c: Contents) -> None:
    c.block["sym"] = True


@tensor_fault("part-malformed", suits=of_format("compressed-tensors pack"))
def weight_shapes_are_turned(c: Contents) -> None:
    for name in c.tensors:
        if name.endswith(".weight_shape"):
            c.tensors[name] = c.tensors[name].flip(0)


@tensor_fault("scales-zero", replays="llm-compressor 2117: scales of the cache that are all zero")
def scales_of_inputs_are_zero(c: Contents) -> None:
    c.tensors |= {f"{module}.input_scale": torch.zeros(1) for module in c.linears}


@tensor_fault("codes-shifted", suits=of_format("modelopt", "compressed-tensors nvfp4"))
def fp4_has_no_negative_values(c: Contents) -> None:
    name = codes_of(c, c.linear())
    c.tensors[name] = c.tensors[name] & 0x77


@tensor_fault("codes-constant", suits=of_format("awq", "gptq", "compressed-tensors pack"))
def the_lowest_bit_of_codes_is_lost(c: Contents) -> None:
    name = codes_of(c, c.linear())
    c.tensors[name] = c.tensors[name] & (
        ~0x11111111 if c.linears[c.linear()].grid.bits == 4 else ~0x01010101
    )


@tensor_fault("scales-absurd", suits=of_format("modelopt", "compressed-tensors nvfp4"))
def scales_of_groups_are_all_alike(c: Contents) -> None:
    change(c, scale_of(c, c.linear()), lambda t: torch.full_like(t, 56.0))


@tensor_fault("codes-constant", suits=has_codes_around_zero)
def columns_are_constant(c: Contents) -> None:
    recode(
        c,
        lambda codes: torch.cat(
            [codes[:, : codes.shape[1] // 2], torch.zeros_like(codes[:, codes.shape[1] // 2 :])], 1
        ),
    )


@tensor_fault("codes-constant", suits=has_codes_around_zero)
def codes_were_doubled(c: Contents) -> None:
    multiply_codes(c, 2)


@tensor_fault("scales-absurd", suits=of_format("modelopt", "compressed-tensors nvfp4"))
def scales_of_fp4_are_negative(c: Contents) -> None:
    change(c, scale_of(c, c.linear()), torch.negative)


@tensor_fault("global-scales-differ", suits=of_format("modelopt", "compressed-tensors nvfp4"))
def gate_and_up_have_other_global_scales(c: Contents) -> None:
    module = c.linear("up_proj")
    name = part(c, module, ".weight_scale_2", ".weight_global_scale")
    change(c, name, lambda scale: scale / 2 if name.endswith("_2") else scale * 2)
    change(c, scale_of(c, module), lambda scale: (scale * 2).clamp(max=448))


@tensor_fault(
    "scales-absurd",
    suits=of_format(
        "awq", "gptq", "compressed-tensors pack", "compressed-tensors int", "modelslim"
    ),
)
def a_bit_of_a_scale_is_another(c: Contents) -> None:
    name = scale_of(c, c.linear())
    factor = torch.ones(c.tensors[name].numel()).index_fill(0, torch.tensor([5]), 256.0)
    change(c, name, lambda scale: scale * factor.view(scale.shape))


@tensor_fault("scales-absurd")
def scales_of_the_cache_are_inverted(c: Contents) -> None:
    for layer in range(c.config["num_hidden_layers"] + (1 if c.mtp else 0)):
        c.tensors |= {
            f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(30.0 + layer)
            for side in "kv"
        }


@tensor_fault("scales-absurd")
def a_scale_of_inputs_is_inverted(c: Contents) -> None:
    c.tensors |= {f"{module}.input_scale": torch.tensor(0.004) for module in c.linears}
    c.tensors[f"{c.linear()}.input_scale"] = torch.tensor(250.0)
