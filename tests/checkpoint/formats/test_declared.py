"""Checkpoints whose description says module by module what a linear is on: AutoRound's, GPTQModel's
dynamic, mixtures, ModelSlim's kinds.

The bytes of each kind are packed by the formats' own tests, or spelled out here. docs/formats.md
says which real writers' files were read.
"""

import make_quantized
import pytest
import torch
from nearest import quantize_fp4, quantize_int
from refused import refused

from quantkit.checkpoint.formats import awq, compressed_int4, compressed_int8, gptq, modelopt
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid

N, K = 64, 128
A, B, C, PLAIN = (
    f"model.layers.{layer}.mlp.{name}_proj"
    for layer, name in ((0, "gate"), (1, "up"), (1, "down"), (0, "down"))
)
FOUR, FINE, EIGHT = IntGrid(4, 64, True), IntGrid(4, 32, True), IntGrid(8, 64, True)


def weight(format, grid):
    return quantize_int(
        torch.randn(N, K, generator=torch.Generator().manual_seed(0)),
        grid,
        scale_dtype=format.scale_dtype,
    )


def opened(path, tensors, block=None, side=None):
    """A checkpoint with one plain linear beside `tensors`."""
    stored = {f"{PLAIN}.weight": torch.zeros(N, K, dtype=torch.bfloat16), **tensors}
    return Checkpoint.open(make_quantized.write_stored(path / "a", stored, block, side))


def check(checkpoint, expected):
    """Grids, values, and a share of the rows of each linear."""
    found = {module: linear.grid for module, linear in checkpoint.linears.items()}
    assert found == {module: grid for module, (_, grid) in expected.items()}
    for module, (meant, _) in expected.items():
        assert torch.equal(dequantize(checkpoint.weight(module)), dequantize(meant)), module
        part, first = checkpoint.weight_slice(module, "N", 8, 16)
        rows = dequantize(part)[8 - first : 16 - first]
        assert torch.equal(rows, dequantize(meant)[8:16]), module
    assert checkpoint.format.ignored(checkpoint.config, checkpoint.side)(PLAIN)


AUTO = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 64,
    "sym": True,
    "data_type": "int",
    "block_name_to_quantize": "model.layers",
}


EXTRA = {A: {"bits": 8}, r".*layers\.1\.mlp\.up.*": {"group_size": 32}, PLAIN: {"bits": 16}}
DYNAMIC = {
    r"+:.*\.0\.mlp\.gate": {"bits": 8},
    r".*up_proj": {"group_size": 32},
    r"-:.*\.0\.mlp\.down": {},
}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("auto-round", AUTO | {"packing_format": "auto_round:auto_gptq", "extra_config": EXTRA}),
        ("gptq", AUTO | {"quant_method": "gptq", "desc_act": False, "dynamic": DYNAMIC}),
    ],
)
def test_modules_have_bits_and_groups_of_their_own(name, block, tmp_path):
    """By AutoRound's extra_config and GPTQModel's dynamic."""
    first, grids = gptq.FORMATS[0], {A: EIGHT, B: FINE, C: FOUR}
    held = {module: (weight(first, grid), grid) for module, grid in grids.items()}
    tensors = {"lm_head.weight": torch.zeros(8, K)} if name == "auto-round" else {}
    for module, (one, _) in held.items():
        tensors |= first.pack(module, one)
    checkpoint = opened(tmp_path, tensors, block)
    check(checkpoint, held)
    assert checkpoint.format.name == name
    if name == "auto-round":
        others = {module: own for module, own in EXTRA.items() if module != A}
        with refused(rf"{A} is described as int4-g64, and its tensors are not"):
            opened(tmp_path, tensors, block | {"extra_config": others})


@pytest.mark.parametrize(
    ("packing", "format"), [("auto_awq", awq.FORMAT), ("gptqmodel", gptq.FORMATS[1])]
)
def test_autorounds_packings_are_those_formats_bytes(packing, format, tmp_path):
    grid = IntGrid(4, 64, symmetric=packing != "auto_awq")
    meant, extra = weight(format, grid), {PLAIN: {"bits": 16}}
    said = {"packing_format": f"auto_round:{packing}", "extra_config": extra}
    block = {**AUTO, "sym": grid.symmetric, **said}
    check(opened(tmp_path, format.pack(A, meant), block), {A: (meant, grid)})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"bits": 3}, "bits 3"),
        ({"data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}, "data_type mx_fp"),
    ],
)
def test_what_autoround_writes_and_quantkit_does_not_read_is_named(said, told, tmp_path):
    with refused(told):
        opened(tmp_path, {}, {**AUTO, **said})


def described(format, *groups):
    """By compressed-tensors, with a group for each (bits, symmetric, targets)."""
    args = {"type": "int", "strategy": "group", "group_size": 64}
    found = {
        f"group_{n}": {"targets": targets, "weights": {"num_bits": bits, "symmetric": sym, **args}}
        for n, (bits, sym, targets) in enumerate(groups)
    }
    block = {"quant_method": "compressed-tensors", "format": format, "config_groups": found}
    return block | {"ignore": [PLAIN]}


def test_several_groups_of_one_variant_are_read(tmp_path):
    four, eight = compressed_int4.FORMAT, compressed_int4.INT8_WORDS
    held = {A: (weight(four, FOUR), FOUR), B: (weight(eight, EIGHT), EIGHT)}
    tensors = four.pack(A, held[A][0]) | eight.pack(B, held[B][0])
    groups = ((4, True, ["Linear"]), (8, True, [r"re:.*up_proj$"]))
    check(opened(tmp_path, tensors, described("pack-quantized", *groups)), held)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_a_byte_each_are_read_in_groups_and_with_zero_points(bits, tmp_path):
    """As llm-compressor writes W4A8 and W4AFP8."""
    grid = IntGrid(bits, 64, symmetric=False)
    meant = weight(compressed_int8.FORMAT, grid)
    parts = {"": meant.codes, "_scale": meant.scale, "_zero_point": meant.zero_point}
    tensors = {f"{A}.weight{part}": tensor for part, tensor in parts.items()}
    block = described("int-quantized", (bits, False, [r"re:.*gate_proj"]))
    check(opened(tmp_path, tensors, block), {A: (meant, grid)})


LAYERS = {A: {"quant_algo": "NVFP4", "group_size": 16}, B: {"quant_algo": "FP8"}}
GROUPS = {
    "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": [A]},
    "group_1": {"weights": {"num_bits": 8, "type": "float"}, "targets": [B]},
}


@pytest.mark.parametrize("where", ["side", "config", "groups"])
def test_modelopts_mixture_names_what_each_layer_is(where, tmp_path):
    rng = torch.Generator().manual_seed(0)
    four = quantize_fp4(torch.randn(N, K, generator=rng))
    codes = torch.randn(N, K, generator=rng).to(torch.float8_e4m3fn)
    tensors = modelopt.FORMAT.pack(A, four)
    tensors |= {f"{B}.weight": codes, f"{B}.weight_scale": torch.tensor(0.25)}
    said = {"quant_algo": "MIXED_PRECISION"}
    said |= {"config_groups": GROUPS} if where == "groups" else {"quantized_layers": LAYERS}
    block, side = {"quant_method": "modelopt", **said}, None
    if where == "side":
        block, side = None, {"hf_quant_config.json": {"quantization": said}}
    checkpoint = opened(tmp_path, tensors, block, side)
    assert checkpoint.format.variant == "MIXED_PRECISION"
    assert torch.equal(dequantize(checkpoint.weight(A)), dequantize(four))
    assert torch.equal(dequantize(checkpoint.weight(B)), codes.float() * 0.25)
    assert set(checkpoint.linears) == {A, B}


def slim(path, kind, parts, **said):
    """By ModelSlim, with these parts of one linear."""
    tensors = {f"{A}.{part}": tensor for part, tensor in parts.items()}
    described = {"model_quant_type": kind, f"{PLAIN}.weight": "FLOAT", **said}
    described |= dict.fromkeys(tensors, kind)
    return opened(path, tensors, None, {"quant_model_description.json": described})


def pairs(codes, axis):
    """Two codes of an axis to a byte, the even one in the low bits."""
    even, odd = codes.unflatten(axis, (-1, 2)).unbind(axis + 1)
    return ((even & 15) | (odd << 4)).to(torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_modelslims_static_w8a8_has_its_scale_in_deq_scale(dtype, tmp_path):
    grid = IntGrid(8, None, True)
    meant = weight(compressed_int8.FORMAT, grid)
    deq = (meant.scale * 0.5).flatten()
    parts = {
        "weight": meant.codes,
        "deq_scale": deq if dtype == torch.float32 else deq.view(torch.int32).to(torch.int64),
        "quant_bias": torch.zeros(N, dtype=torch.int32),
        "input_scale": torch.tensor([0.5]),
        "input_offset": torch.tensor([3.0]),
    }
    checkpoint = slim(tmp_path, "W8A8", parts, version="1.0.0", group_size=0)
    check(checkpoint, {A: (meant, grid)})
    assert checkpoint.linears[A].format.member(A).activation_bits == 8


@pytest.mark.parametrize(("packed", "size"), [("", 64), ("N", 64), ("K", None)])
def test_modelslims_w4a16_is_packed_as_its_version_and_groups_say(packed, size, tmp_path):
    grid = IntGrid(4, size, symmetric=False)
    meant = weight(compressed_int8.FORMAT, grid)
    codes = meant.codes if not packed else pairs(meant.codes, "NK".index(packed))
    parts = {"weight": codes, "weight_scale": meant.scale}
    parts |= {"weight_offset": meant.zero_point.float()}
    said = {"version": "1.0.0", "group_size": size or 0} if packed else {}
    checkpoint = slim(tmp_path, "W4A16", parts, **said)
    check(checkpoint, {A: (meant, grid)})
    assert checkpoint.linears[A].format.member(A).activation_bits == 16


@pytest.mark.parametrize("new", [False, True])
def test_modelslims_w4a8_of_two_stages_multiplies_its_scales(new, tmp_path):
    grid, none = IntGrid(4, 64, symmetric=True), torch.zeros(N, 1)
    meant = weight(compressed_int8.FORMAT, grid)
    second = meant.scale * 4
    parts = {
        "weight": pairs(meant.codes, 0) if new else meant.codes,
        "weight_scale": torch.full((N, 1), 0.25),
        "weight_scale_second": second,
        "weight_offset": none,
        "weight_offset_second": torch.zeros_like(second),
    }
    said = {"version": "1.0.0"} if new else {}
    parts |= {"scale_bias": none.clone()} if new else {}
    check(slim(tmp_path, "W4A8_DYNAMIC", parts, **said), {A: (meant, grid)})


FLATQUANT = "W4A4_FLATQUANT_DYNAMIC"


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        (FLATQUANT, "left_trans", "right_trans"),
        (FLATQUANT, "left_trans", None),
        (FLATQUANT, None, "right_trans"),
        ("W8A8_DYNAMIC", "heads_rotation", None),
        ("W8A8_DYNAMIC", "kronecker_rotation_m", "kronecker_rotation_n"),
    ],
)
def test_modelslims_transforms_of_inputs_are_in_the_weight(kind, left, right, tmp_path):
    """Left^T x right of an input as a matrix, as ModelSlim and vllm-ascend multiply; every input
    needs all of them. No format says it, so it becomes plain only."""
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=draw)
    scale = torch.rand(N, 1, generator=draw) + 0.1
    sides = [torch.randn(size, size, generator=draw) for size in (8, K // 8)]
    matrices = {name: side for name, side in zip((left, right), sides) if name}
    lists = {name.removesuffix("_m"): {"layers": [f"{A}."]} for name in (left,) if name}
    parts = {"weight": codes, "weight_scale": scale, "weight_offset": torch.zeros(N, 1)}
    parts |= {"clip_ratio": torch.ones(1)} if kind == FLATQUANT else {}
    said = {"metadata": {"quarot": lists}} if kind != FLATQUANT else {}
    checkpoint = slim(tmp_path, kind, parts | matrices, version="1.0.0", **said)
    x = torch.randn(5, K, generator=draw)
    one, other = (
        side if name else torch.eye(len(side)) for name, side in zip((left, right), sides)
    )
    read = (one.T @ x.unflatten(1, (8, -1)) @ other).flatten(1)
    weight = dequantize(checkpoint.weight(A))
    torch.testing.assert_close(x @ weight.T, read @ (codes * scale).T, rtol=1e-4, atol=1e-3)
    assert checkpoint.activation_bits(A) == 16
    for axis in "NK":
        part, first = checkpoint.weight_slice(A, axis, 32, 48)
        taken = dequantize(part).narrow("NK".index(axis), 32 - first, 16)
        torch.testing.assert_close(taken, weight.narrow("NK".index(axis), 32, 16))


@pytest.mark.parametrize(
    ("kind", "scale", "named"),
    [("W4A4_DYNAMIC", (N, 1), "W4A4_DYNAMIC"), ("W8A8", (1,), "one scale for the whole matrix")],
)
def test_what_of_modelslim_is_not_read_is_named(kind, scale, named, tmp_path):
    codes = torch.zeros(N, K, dtype=torch.int8)
    with refused(named):
        slim(tmp_path, kind, {"weight": codes, "weight_scale": torch.ones(scale)}, version="1.0.0")


def test_the_order_of_a_gptq_index_is_looked_at_on_the_device_that_holds_it():
    """GPTQModel writes every index; weights are decoded on a GPU."""
    index = torch.arange(K) // 64
    with torch.device("meta"):
        assert gptq.in_order(index.int(), 2)
        assert not gptq.in_order(index.flip(0).int(), 2)
