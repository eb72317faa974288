"""Faults of codes, scales and plain tensors: those that bytes show, and those that only a comparison
with the source does."""

import torch
from packed_model import rounded

from faulty.fault import (
    FP4,
    INT8,
    PACKED,
    always,
    change,
    codes_of,
    has_codes_around_zero,
    has_experts,
    has_four_bits,
    has_groups,
    has_quantized_experts,
    is_quantized,
    layers,
    of_depth,
    of_format,
    part,
    scale_of,
)
from quantkit.grids.base import dequantize

fault, named = of_depth("tensors", is_quantized)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def of(name, edit):
    return lambda c: change(c, name, edit)


def scales(edit, ending="down_proj"):
    return lambda c: change(c, scale_of(c, c.linear(ending)), edit)


def codes(edit):
    """Of the stored words of a linear."""

    def apply(c):
        name = codes_of(c, c.linear())
        c.tensors[name] = edit(c.tensors[name])

    return apply


def ending_with(*endings):
    return lambda c: [name for name in c.tensors if name.endswith(endings)]


def each(names, edit):
    return lambda c: c.tensors.update({name: edit(c.tensors[name]) for name in names(c)})


def filled(index, value):
    return lambda t: t.index_fill(0, torch.tensor([index]), value)


def held(c, module):
    linear = c.linears[module]
    return linear.format.unpack(module, {name: c.tensors[name] for name in linear.tensors})


def recode(c, change):
    """Other codes with the same scales and zero points."""
    module = c.linear()
    weight = held(c, module)
    codes = change(weight.codes).to(torch.int8)
    changed = type(weight)(codes, weight.scale, weight.zero_point, weight.bits)
    c.tensors |= c.linears[module].format.pack(module, changed)


def multiply_codes(factor):
    """Of a linear on an integer grid; what leaves the range is clamped."""

    def apply(c):
        half = 2 ** (c.linears[c.linear()].grid.bits - 1)
        recode(c, lambda codes: (codes.int() * factor).clamp(-half, half - 1))

    return apply


def round_again(c, module, edit):
    """A quantized linear with other values."""
    linear, values = c.linears[module], edit(dequantize(held(c, module)))
    c.tensors |= linear.format.pack(
        module, rounded(values, linear.format, linear.grid, values.abs().max())
    )


EMBEDDING = "model.embed_tokens.weight"
FIRST, SECOND = (f"model.layers.1.{name}_layernorm.weight" for name in ("input", "post_attention"))
fp4, gptq, awq = of_format(*FP4), of_format("gptq"), of_format("awq")
packed, pack_quantized = of_format(*PACKED), of_format("compressed-tensors pack")

# --- plain tensors


def routers(c):
    return ending_with("mlp.gate.weight")(c)


def has_head(c):
    return "lm_head.weight" in c.tensors


def bfloat16(c):
    return [name for name, tensor in c.tensors.items() if tensor.dtype == torch.bfloat16]


def bytes_swapped(t):
    return t.view(torch.uint8).unflatten(0, (-1, 2)).flip(1).flatten().view(t.dtype)


for finds, name, apply in (
    ("values-not-finite", "a_norm_holds_infinity", of(FIRST, filled(5, float("inf")))),
    ("values-absurd", "a_norm_is_all_zeros", of(SECOND, torch.zeros_like)),
    (
        "values-absurd",
        "half_of_the_embedding_is_zero",
        of(EMBEDDING, lambda t: t * (torch.arange(len(t)) < len(t) // 2)[:, None]),
    ),
    (
        "values-absurd",
        "bfloat16_is_read_as_float16",
        each(bfloat16, lambda t: t.view(torch.float16)),
    ),
    (
        "values-absurd",
        "float16_is_read_as_bfloat16",
        each(bfloat16, lambda t: t.half().view(torch.bfloat16)),
    ),
    (
        "values-absurd",
        "norms_have_the_other_order_of_bytes",
        each(ending_with("layernorm.weight"), bytes_swapped),
    ),
):
    fault(finds, name, apply, always)
fault(
    "linears-equal",
    "a_router_is_another_layers",
    lambda c: c.tensors.update({routers(c)[1]: c.tensors[routers(c)[0]]}),
    lambda c: len(routers(c)) > 1,
)
fault(
    "head-ignored config-field",
    "the_head_is_said_to_be_tied",
    lambda c: c.config.update(tie_word_embeddings=True),
    has_head,
)


@named("tensors-unknown")
def a_bias_has_no_place(c):
    module = c.linear("o_proj")
    c.tensors[f"{module}.bias"] = torch.ones(c.linears[module].shape[0], dtype=torch.float16)


# --- codes and scales


@named("values-not-finite")
def a_scale_is_nan(c):
    name = scale_of(c, c.linear())
    tensor = c.tensors[name].float().flatten().clone()
    tensor[3] = float("nan")
    c.tensors[name] = tensor.view(c.tensors[name].shape).to(c.tensors[name].dtype)


@named("scales-absurd")
def a_linears_scales_are_a_thousandfold(c):
    name = scale_of(c, c.linear())
    if c.tensors[name].dtype == torch.float8_e4m3fn:
        name = part(c, c.linear(), *GLOBAL)
        change(c, name, lambda t: t * 200 if name.endswith("_2") else t / 200)
    else:
        change(c, name, lambda t: t * 1000)


GLOBAL = (".weight_scale_2", ".weight_global_scale")
CONSTANT = {torch.uint8: 0x11, torch.int32: 0x11111111}
fault("scales-zero", "scales_are_zero", scales(torch.zeros_like))
fault(
    "scales-zero",
    "scales_of_some_rows_are_zero",
    scales(lambda t: t * (torch.arange(t.numel()).view(t.shape) >= t.numel() // 8)),
)
fault(
    "codes-constant",
    "codes_are_constant",
    codes(lambda t: torch.full_like(t, CONSTANT.get(t.dtype, 17))),
)
fault(
    "linears-equal",
    "an_expert_is_another_ones_copy",
    lambda c: c.tensors.update(
        {
            name: c.tensors[name.replace(c.experts[2], c.experts[1])]
            for name in c.tensors
            if name.startswith(f"{c.experts[2]}.")
        }
    ),
    has_quantized_experts,
)
# Two of their bits are always zero, which is found where channels are wide and few codes reach an
# end.
fault("codes-saturated codes-constant", "codes_are_saturated", multiply_codes(4), packed)
fault("codes-constant", "codes_were_doubled", multiply_codes(2), has_codes_around_zero)
fault(
    "global-scale-inverted",
    "global_scales_are_inverted",
    each(ending_with(*GLOBAL), torch.reciprocal),
    fp4,
)
fault(
    "global-scale-inverted",
    "one_global_scale_is_inverted",
    lambda c: change(c, part(c, c.linear(), *GLOBAL), torch.reciprocal),
    fp4,
)
fault(
    "zero-points-off",
    "gptq_is_said_to_be_the_other_version",
    lambda c: c.block.update(
        checkpoint_format="gptq" if c.block["checkpoint_format"] == "gptq_v2" else "gptq_v2"
    ),
    lambda c: gptq(c) and c.linears[c.linear()].grid.bits == 4,
)
fault(
    "zero-points-off",
    "zero_points_are_one_less",
    each(ending_with(".qzeros"), lambda t: (t.long() - 0x11111111).to(torch.int32)),
    awq,
)


def words(c):
    return [codes_of(c, module) for module in c.linears]


def in_natural_order(words):
    nibbles = [(words >> (4 * bit)) & 15 for bit in range(8)]
    value = sum(
        nibbles[place].long() << (4 * j) for j, place in enumerate((0, 4, 1, 5, 2, 6, 3, 7))
    )
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


fault(
    "codes-shifted zero-points-off",
    "codes_are_in_twos_complement",
    each(words, lambda t: t ^ -0x77777778),
    pack_quantized,
)
fault("packing-order", "awq_words_are_in_natural_order", each(words, in_natural_order), awq)
indexes = ending_with(".g_idx")


@named("act-order-wrong", gptq)
def act_order_is_said_and_not_stored(c):
    c.block["desc_act"] = True
    each(indexes, torch.zeros_like)(c)


@named("act-order-wrong", gptq)
def a_group_is_out_of_range(c):
    c.block["desc_act"] = True
    c.tensors[f"{c.linear()}.g_idx"] = c.tensors[f"{c.linear()}.g_idx"] + 100


fault(
    "act-order-wrong",
    "act_order_is_stored_and_not_said",
    each(indexes, lambda t: t[torch.randperm(len(t), generator=seeded(2))]),
    gptq,
)
fault(
    "description-wrong",
    "gptq_is_said_to_be_symmetric",
    lambda c: c.block.update(sym=True),
    lambda c: gptq(c) and not c.block["sym"],
)
fault(
    "part-malformed",
    "weight_shapes_are_turned",
    each(ending_with(".weight_shape"), lambda t: t.flip(0)),
    pack_quantized,
)


def inputs(scale):
    return lambda c: c.tensors.update(
        {f"{module}.input_scale": torch.full((1,), scale) for module in c.linears}
    )


fault("scales-zero", "scales_of_inputs_are_zero", inputs(0.0))  # as llm-compressor 2117


@named("scales-absurd")
def a_scale_of_inputs_is_inverted(c):
    inputs(0.004)(c)
    c.tensors[f"{c.linear()}.input_scale"] = torch.tensor(250.0)


fault("codes-shifted", "fp4_has_no_negative_values", codes(lambda t: t & 0x77), fp4)
fault(
    "codes-constant",
    "the_lowest_bit_of_codes_is_lost",
    lambda c: codes(
        lambda t: t & (~0x11111111 if c.linears[c.linear()].grid.bits == 4 else ~0x01010101)
    )(c),
    packed,
)
fault(
    "scales-absurd",
    "scales_of_groups_are_all_alike",
    scales(lambda t: torch.full_like(t, 56.0)),
    fp4,
)
fault(
    "codes-constant",
    "columns_are_constant",
    lambda c: recode(c, lambda codes: codes * (torch.arange(codes.shape[1]) * 2 < codes.shape[1])),
    has_codes_around_zero,
)
fault("scales-absurd", "scales_of_fp4_are_negative", scales(torch.negative), fp4)


@named("global-scales-differ", fp4)
def gate_and_up_have_other_global_scales(c):
    name = part(c, c.linear("up_proj"), *GLOBAL)
    change(c, name, lambda scale: scale / 2 if name.endswith("_2") else scale * 2)
    scales(lambda scale: (scale * 2).clamp(max=448), "up_proj")(c)


def one_scaled(scale):
    return scale * filled(5, 256.0)(torch.ones(scale.numel())).view(scale.shape)


fault("scales-absurd", "a_bit_of_a_scale_is_another", scales(one_scaled), of_format(*PACKED, *INT8))
fault(
    "scales-absurd",
    "scales_of_the_cache_are_inverted",
    lambda c: c.tensors.update(
        {
            f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(30.0 + layer)
            for layer in layers(c)
            for side in "kv"
        }
    ),
)

# --- what only the source shows


def unlike(finds, name, apply, suits=is_quantized, **more):
    fault(finds, name, apply, suits, source=True, **more)


def shuffled(seed):
    return lambda t: t[torch.randperm(len(t), generator=seeded(seed))]


def noise(t):
    return torch.randint(-100, 100, t.shape, generator=seeded(0)).to(t.dtype) * 16777619


def nibbles_exchanged(t):
    octets = t.contiguous().view(torch.uint8)
    return (((octets & 15) << 4) | (octets >> 4)).view(t.dtype)


def four_bit_words(c):
    names = {codes_of(c, module): c.linears[module] for module in c.linears}
    return [
        name
        for name, linear in names.items()
        if c.tensors[name].dtype != torch.int32 or linear.grid.bits == 4
    ]


def exchanged(find):
    return lambda c: c.swap(*find(c))


def last_layers(c):
    one, other = (f"model.layers.{c.config['num_hidden_layers'] - n}.self_attn" for n in (1, 2))
    return one, other


def keys_and_values(c):
    return tuple(f"model.layers.1.self_attn.{one}_proj" for one in "kv")


def has_keys(c):
    return is_quantized(c) and keys_and_values(c)[0] in c.linears


def gate_and_up(c):
    gate = c.linear("gate_proj")
    return gate, gate.replace("gate_proj", "up_proj")


for finds, label, apply, suits in (
    (
        "scales-absurd",
        "a_linears_scales_are_tenfold",
        scales(lambda t: t * 10),
        of_format(*PACKED, *INT8),
    ),
    (
        "packing-order",
        "nibbles_are_exchanged",
        each(four_bit_words, nibbles_exchanged),
        has_four_bits,
    ),
    ("gate-up-exchanged", "gate_and_up_are_exchanged", exchanged(gate_and_up), is_quantized),
    ("linears-exchanged", "keys_are_values", exchanged(keys_and_values), has_keys),
    (
        "experts-exchanged",
        "two_experts_are_exchanged",
        exchanged(lambda c: (c.experts[0], c.experts[3])),
        has_quantized_experts,
    ),
    ("layers-exchanged", "two_layers_are_exchanged", exchanged(last_layers), is_quantized),
    (
        "unlike-source",
        "it_is_another_model",
        each(lambda c: [name for name, t in c.tensors.items() if t.dim() == 2], shuffled(1)),
        is_quantized,
    ),
    (
        "error-large",
        "a_linears_sign_is_the_other",
        scales(torch.negative),
        of_format(*PACKED, "modelslim"),
    ),
    ("error-large", "the_embedding_is_another", of(EMBEDDING, lambda t: t.flip(0)), always),
    ("error-large unlike-source", "a_linear_is_noise", codes(noise), is_quantized),
    ("error-large", "scales_of_rows_are_shuffled", scales(shuffled(6)), of_format(*INT8)),
    (
        "error-large",
        "scales_of_groups_are_in_another_order",
        lambda c: scales(
            lambda t: t.roll(1, 0 if ".scales" in scale_of(c, c.linear("o_proj")) else 1), "o_proj"
        )(c),
        lambda c: has_groups(c) and packed(c),
    ),
    (
        "error-large",
        "eight_bits_hold_four",
        codes(lambda t: ((t.float() / 16).round() * 16).clamp(-128, 127).to(torch.int8)),
        of_format(*INT8),
    ),
    (
        "error-large",
        "a_router_has_eight_bits",
        lambda c: change(c, routers(c)[0], lambda t: t.to(torch.float8_e4m3fn).float()),
        has_experts,
    ),
    (
        "folding-broken router-not-compensated",
        "two_norms_change_places",
        exchanged(lambda c: (FIRST.removesuffix(".weight"), SECOND.removesuffix(".weight"))),
        always,
    ),
    (
        "folding-broken",
        "norms_are_squared",
        each(ending_with("input_layernorm.weight"), torch.square),
        is_quantized,
    ),
):
    unlike(finds, label, apply, suits)


def random_factors(count, spread, seed):
    return torch.exp(spread * torch.randn(count, generator=seeded(seed)))


def smoothed(c, module):
    round_again(c, module, lambda t: t * random_factors(t.shape[1], 0.5, 8))


def divide_norm(c, layer, router, experts=True):
    """Fold scales from the norm before the experts into its readers: what peers' AWQ leaves out is
    the router."""
    scale = random_factors(c.config["hidden_size"], 0.8, 3)
    prefix = f"model.layers.{layer}"
    change(c, f"{prefix}.post_attention_layernorm.weight", lambda t: t / scale)
    if router:
        change(c, f"{prefix}.mlp.gate.weight", lambda t: t * scale)
    readers = ending_with("gate_proj.weight", "up_proj.weight")(c)
    for name in [name for name in readers if experts and name.startswith(f"{prefix}.mlp.")]:
        change(c, name, lambda t: t * scale)


unlike(
    "router-not-compensated",
    "the_router_was_not_scaled",
    lambda c: divide_norm(c, int(c.experts[0].split(".")[2]), router=False),
    lambda c: has_experts(c) and not c.linears,
    # as peers.md A3.2: AutoAWQ's deepseek_v3.py
)
unlike(
    "folding-broken",
    "a_norm_was_divided_and_nothing_multiplied",
    lambda c: change(c, FIRST, lambda t: t / random_factors(c.config["hidden_size"], 0.8, 4)),
    always,
)


@named("error-large", has_codes_around_zero, source=True)
def codes_were_cut_and_not_rounded(c):
    lowest = -(2 ** (c.linears[c.linear()].grid.bits - 1))

    def cut(codes):
        odd = torch.arange(codes.numel()).view(codes.shape) % 2
        return (codes.int() - odd).clamp(min=lowest)

    recode(c, cut)


@named("folding-broken", source=True)
def smoothing_was_folded_into_linears_alone(c):
    names = [f"model.layers.1.self_attn.{side}_proj" for side in "qkv"]
    if names[0] not in c.linears:
        names = ["model.layers.1.self_attn.q_a_proj"]
    for module in names:
        smoothed(c, module)


unlike(
    "folding-broken",
    "down_was_multiplied_and_up_was_not_divided",
    lambda c: smoothed(c, c.linear()),
)


def with_adapter(values):
    generator = seeded(12)
    low = torch.randn(len(values), 4, generator=generator)
    low = low @ torch.randn(4, values.shape[1], generator=generator)
    return values + 0.25 * values.norm() / low.norm() * low


unlike(
    "error-large",
    "an_adapter_was_merged",
    lambda c: round_again(c, c.linear("o_proj"), with_adapter),
)
