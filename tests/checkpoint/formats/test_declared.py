"""Checkpoints whose description says module by module what a linear is on: AutoRound's, GPTQModel's
dynamic, mixtures, ModelSlim's kinds.

The bytes of each kind are packed by the formats' own tests, or spelled out here. docs/formats.md
says which real writers' files were read.
"""

import json

import pytest
import torch
from nearest import quantize_fp4, quantize_int
from refused import refused
from safetensors.torch import save_file

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
    path.mkdir(exist_ok=True)
    stored = {f"{PLAIN}.weight": torch.zeros(N, K, dtype=torch.bfloat16), **tensors}
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(
        json.dumps({"model_type": "x", **({"quantization_config": block} if block else {})})
    )
    for name, content in (side or {}).items():
        (path / name).write_text(json.dumps(content))
    return Checkpoint.open(path)


def check(checkpoint, expected):
    """Grids, values, and a share of the rows of each linear."""
    assert {module: linear.grid for module, linear in checkpoint.linears.items()} == {
        module: grid for module, (_, grid) in expected.items()
    }
    for module, (meant, _) in expected.items():
        assert torch.equal(dequantize(checkpoint.weight(module)), dequantize(meant)), module
        part, first = checkpoint.weight_slice(module, "N", 8, 16)
        assert torch.equal(dequantize(part)[8 - first : 16 - first], dequantize(meant)[8:16]), (
            module
        )
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    assert ignored(PLAIN)


AUTO = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 64,
    "sym": True,
    "data_type": "int",
    "block_name_to_quantize": "model.layers",
}


def test_autorounds_extra_config_gives_modules_bits_and_groups_of_their_own(tmp_path):
    first = gptq.FORMATS[0]
    extra = {A: {"bits": 8}, r".*layers\.1\.mlp\.up.*": {"group_size": 32}, PLAIN: {"bits": 16}}
    held = {
        A: (weight(first, EIGHT), EIGHT),
        B: (weight(first, FINE), FINE),
        C: (weight(first, FOUR), FOUR),
    }
    tensors = {
        name: tensor
        for module, (one, _) in held.items()
        for name, tensor in first.pack(module, one).items()
    }
    block = {**AUTO, "packing_format": "auto_round:auto_gptq", "extra_config": extra}
    checkpoint = opened(tmp_path / "a", {**tensors, "lm_head.weight": torch.zeros(8, K)}, block)
    check(checkpoint, held)
    assert checkpoint.format.name == "auto-round"
    del block["extra_config"][A]
    with refused(rf"{A} is described as int4-g64, and its tensors are not"):
        opened(tmp_path / "a", tensors, block)


@pytest.mark.parametrize(
    ("packing", "format"), [("auto_awq", awq.FORMAT), ("gptqmodel", gptq.FORMATS[1])]
)
def test_autorounds_packings_are_those_formats_bytes(packing, format, tmp_path):
    grid = IntGrid(4, 64, symmetric=packing != "auto_awq")
    held = {A: (weight(format, grid), grid)}
    block = {
        **AUTO,
        "sym": grid.symmetric,
        "packing_format": f"auto_round:{packing}",
        "extra_config": {PLAIN: {"bits": 16}},
    }
    check(opened(tmp_path / "a", format.pack(A, held[A][0]), block), held)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"bits": 3}, "bits 3"),
        ({"data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}, "data_type mx_fp"),
    ],
)
def test_what_autoround_writes_and_quantkit_does_not_read_is_named(said, told, tmp_path):
    with refused(told):
        opened(tmp_path / "a", {}, {**AUTO, **said})


def test_gptqmodels_dynamic_settings_are_followed(tmp_path):
    first = gptq.FORMATS[0]
    held = {
        A: (weight(first, EIGHT), EIGHT),
        B: (weight(first, FINE), FINE),
        C: (weight(first, FOUR), FOUR),
    }
    tensors = {
        name: tensor
        for module, (one, _) in held.items()
        for name, tensor in first.pack(module, one).items()
    }
    dynamic = {
        r"+:.*\.0\.mlp\.gate": {"bits": 8},
        r".*up_proj": {"group_size": 32},
        r"-:.*\.0\.mlp\.down": {},
    }
    block = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        "dynamic": dynamic,
    }
    check(opened(tmp_path / "a", tensors, block), held)


def test_several_groups_of_one_variant_are_read(tmp_path):
    held = {
        A: (weight(compressed_int4.FORMAT, FOUR), FOUR),
        B: (weight(compressed_int4.INT8_WORDS, EIGHT), EIGHT),
    }
    tensors = compressed_int4.FORMAT.pack(A, held[A][0]) | compressed_int4.INT8_WORDS.pack(
        B, held[B][0]
    )
    args = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, **args}},
        "group_1": {
            "targets": [r"re:.*up_proj$"],
            "weights": {"num_bits": 8, **args},
            "format": "pack-quantized",
        },
    }
    block = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": [PLAIN],
    }
    check(opened(tmp_path / "a", tensors, block), held)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_a_byte_each_are_read_in_groups_and_with_zero_points(bits, tmp_path):
    """As llm-compressor writes W4A8 and W4AFP8."""
    grid = IntGrid(bits, 64, symmetric=False)
    meant = weight(compressed_int8.FORMAT, grid)
    tensors = {
        f"{A}.weight": meant.codes,
        f"{A}.weight_scale": meant.scale,
        f"{A}.weight_zero_point": meant.zero_point,
    }
    args = {
        "num_bits": bits,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 64,
    }
    groups = {"group_0": {"targets": [r"re:.*gate_proj"], "weights": args}}
    block = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
        "ignore": [],
    }
    check(opened(tmp_path / "a", tensors, block), {A: (meant, grid)})


@pytest.mark.parametrize("where", ["side", "config", "groups"])
def test_modelopts_mixture_names_what_each_layer_is(where, tmp_path):
    four = quantize_fp4(torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    codes = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    tensors = {
        **modelopt.FORMAT.pack(A, four),
        f"{B}.weight": codes,
        f"{B}.weight_scale": torch.tensor(0.25),
    }
    layers = {A: {"quant_algo": "NVFP4", "group_size": 16}, B: {"quant_algo": "FP8"}}
    groups = {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": [A]},
        "group_1": {"weights": {"num_bits": 8, "type": "float"}, "targets": [B]},
    }
    said = {
        "quant_algo": "MIXED_PRECISION",
        **({"config_groups": groups} if where == "groups" else {"quantized_layers": layers}),
    }
    if where == "side":
        checkpoint = opened(
            tmp_path / "a", tensors, None, {"hf_quant_config.json": {"quantization": said}}
        )
    else:
        checkpoint = opened(tmp_path / "a", tensors, {"quant_method": "modelopt", **said})
    assert checkpoint.format.variant == "MIXED_PRECISION"
    assert torch.equal(dequantize(checkpoint.weight(A)), dequantize(four))
    assert torch.equal(dequantize(checkpoint.weight(B)), codes.float() * 0.25)
    assert set(checkpoint.linears) == {A, B}


def slim(path, kind, tensors, **said):
    described = {"model_quant_type": kind, f"{PLAIN}.weight": "FLOAT", **said}
    return opened(
        path,
        tensors,
        None,
        {"quant_model_description.json": {**described, **dict.fromkeys(tensors, kind)}},
    )


def pairs(codes, axis):
    """Two codes of an axis to a byte, the even one in the low bits."""
    even, odd = codes.unflatten(axis, (-1, 2)).unbind(axis + 1)
    return ((even & 15) | (odd << 4)).to(torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_modelslims_static_w8a8_has_its_scale_in_deq_scale(dtype, tmp_path):
    meant = weight(compressed_int8.FORMAT, IntGrid(8, None, True))
    deq = (meant.scale * 0.5).flatten()
    stored = deq if dtype == torch.float32 else deq.view(torch.int32).to(torch.int64)
    tensors = {
        f"{A}.weight": meant.codes,
        f"{A}.deq_scale": stored,
        f"{A}.quant_bias": torch.zeros(N, dtype=torch.int32),
    }
    tensors |= {f"{A}.input_scale": torch.tensor([0.5]), f"{A}.input_offset": torch.tensor([3.0])}
    checkpoint = slim(tmp_path / "a", "W8A8", tensors, version="1.0.0", group_size=0)
    check(checkpoint, {A: (meant, IntGrid(8, None, True))})
    assert checkpoint.linears[A].format.member(A).activation_bits == 8


@pytest.mark.parametrize(("packed", "size"), [("", 64), ("N", 64), ("K", None)])
def test_modelslims_w4a16_is_packed_as_its_version_and_groups_say(packed, size, tmp_path):
    grid = IntGrid(4, size, symmetric=False)
    meant = weight(compressed_int8.FORMAT, grid)
    codes = meant.codes if not packed else pairs(meant.codes, "NK".index(packed))
    tensors = {
        f"{A}.weight": codes,
        f"{A}.weight_scale": meant.scale,
        f"{A}.weight_offset": meant.zero_point.float(),
    }
    said = {"version": "1.0.0", "group_size": size or 0} if packed else {}
    checkpoint = slim(tmp_path / "a", "W4A16", tensors, **said)
    check(checkpoint, {A: (meant, grid)})
    assert checkpoint.linears[A].format.member(A).activation_bits == 16


@pytest.mark.parametrize("new", [False, True])
def test_modelslims_w4a8_of_two_stages_multiplies_its_scales(new, tmp_path):
    grid = IntGrid(4, 64, symmetric=True)
    meant = weight(compressed_int8.FORMAT, grid)
    first, second = torch.full((N, 1), 0.25), meant.scale * 4
    tensors = {
        f"{A}.weight": pairs(meant.codes, 0) if new else meant.codes,
        f"{A}.weight_scale": first,
        f"{A}.weight_scale_second": second,
    }
    tensors |= {
        f"{A}.weight_offset": torch.zeros(N, 1),
        f"{A}.weight_offset_second": torch.zeros_like(second),
    }
    tensors |= {f"{A}.scale_bias": torch.zeros(N, 1)} if new else {}
    check(
        slim(tmp_path / "a", "W4A8_DYNAMIC", tensors, **({"version": "1.0.0"} if new else {})),
        {A: (meant, grid)},
    )


@pytest.mark.parametrize(
    ("kind", "scale", "named"),
    [("W4A4_DYNAMIC", (N, 1), "W4A4_DYNAMIC"), ("W8A8", (1,), "one scale for the whole matrix")],
)
def test_what_of_modelslim_is_not_read_is_named(kind, scale, named, tmp_path):
    tensors = {
        f"{A}.weight": torch.zeros(N, K, dtype=torch.int8),
        f"{A}.weight_scale": torch.ones(scale),
    }
    with refused(named):
        slim(tmp_path / "a", kind, tensors, version="1.0.0")
