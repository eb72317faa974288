"""compressed-tensors: its own golden bytes, and its own code unpacking ours bit for bit."""

from pathlib import Path

import golden
import make_quantized
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.utils import generate_gparam

from quantkit.checkpoint.formats import (
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    detect_format,
)
from quantkit.grids.base import dequantize
from quantkit.grids.e2m1 import E2M1_VALUES
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import INPUT_HEADROOM, Nvfp4Grid, Nvfp4Weight, input_divisor
from quantkit.models.activation_quant import fake_quantize_nvfp4

_CASES = [
    (compressed_int4.FORMAT, IntGrid(4, 32, True), "W4A16"),
    (compressed_int4.FORMAT, IntGrid(4, 32, False), "W4A16_ASYM"),
    (compressed_int4.FORMAT, IntGrid(4, None, True), "W4A16"),
    (compressed_fp4.FORMAT, Nvfp4Grid(), "NVFP4A16"),
    (compressed_fp4.W4A4, Nvfp4Grid(activation_bits=4), "NVFP4"),
    (compressed_int8.FORMAT, IntGrid(8, None, True), "W8A8"),
]
every_case = pytest.mark.parametrize(
    ("format", "grid", "example"),
    _CASES,
    ids=[f"{f.variant}-{i}" for i, (f, _, _) in enumerate(_CASES)],
)


def _scheme(format, grid):
    config, _ = make_quantized.description(format, grid)
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = parsed.config_groups["group_0"]
    assert isinstance(scheme, QuantizationScheme)
    return scheme


def packed(format, grid):
    """A weight, and its tensors."""
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(3))
    weight = make_quantized.quantize(format, grid, w)
    return weight, format.pack("m", weight)


def theirs(format, grid, tensors):
    """What the library makes of them. A product of scales in float32 is exact to compare; stored as
    bfloat16, their product is rounded to bfloat16."""
    local = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    if isinstance(grid, IntGrid) and format.variant == "pack-quantized":
        local["weight_scale"] = local["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry(format.variant)
    return compressor.decompress(local, _scheme(format, grid))["weight"]


@every_case
def test_their_code_unpacks_ours(format, grid, example):
    weight, tensors = packed(format, grid)
    found = theirs(format, grid, tensors)
    if isinstance(weight, Nvfp4Weight):
        # Their decompression divides by the stored divisor in bfloat16; the codes and scales below
        # it are ours.
        assert torch.equal(found, _their_fp4_arithmetic(tensors))
        torch.testing.assert_close(found.float(), dequantize(weight), rtol=2**-7, atol=0)
    else:
        assert torch.equal(found.float(), dequantize(weight))


@pytest.mark.parametrize(
    "grid",
    [IntGrid(8, 32, True), IntGrid(8, 32, False), IntGrid(8, None, True)],
    ids=["groups", "zeros", "channels"],
)
def test_int8_words_are_those_of_w8a16(grid):
    """Weight-only int8, four codes to a word: what llm-compressor's W8A16 writes."""
    format = compressed_int4.INT8_WORDS
    weight, tensors = packed(format, grid)
    assert torch.equal(theirs(format, grid, tensors).float(), dequantize(weight))
    assert torch.equal(dequantize(format.unpack("m", tensors)), dequantize(weight))
    config, _ = make_quantized.description(format, grid)
    assert detect_format(Path("x"), config, {}) is format


def _their_fp4_arithmetic(tensors):
    weight = compressed_fp4.FORMAT.unpack("m", tensors)
    ones = torch.ones_like(weight.scale.float()).to(torch.float8_e4m3fn)
    unit = Nvfp4Weight(weight.codes, ones, torch.tensor(1.0))
    step = tensors["m.weight_scale"].bfloat16() / tensors["m.weight_global_scale"]
    codes = dequantize(unit, torch.bfloat16).unflatten(1, (-1, 16))
    return (codes * step.unsqueeze(-1)).flatten(1).bfloat16()


@every_case
def test_the_config_block_says_what_theirs_says(format, grid, example):
    ours = make_quantized.description(format, grid)[0]["quantization_config"]
    theirs = golden.load("ct_config_examples").get(example) or _preset(example, ours)
    assert ours["format"] == theirs["format"]
    assert ours["quantization_status"] == theirs["quantization_status"]
    ours_group, theirs_group = ours["config_groups"]["group_0"], theirs["config_groups"]["group_0"]
    assert ours_group["targets"] == theirs_group["targets"]
    for key in ("num_bits", "type", "symmetric", "dynamic"):
        assert ours_group["weights"][key] == theirs_group["weights"][key]
    assert _stripped(ours_group["input_activations"]) == _stripped(
        theirs_group["input_activations"]
    )


def _preset(example, ours):
    """A scheme by compressed-tensors' own name for it, in a description like ours. Observers only
    calibrate, and scale_dtype is of versions that know it."""
    scheme = preset_name_to_scheme(example, ["Linear"]).model_dump(mode="json")
    for args in (scheme["weights"], scheme["input_activations"]):
        for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
            args.pop(key, None)
    return {**ours, "config_groups": {"group_0": scheme}}


def test_their_rounding_of_activations_is_ours():
    """Bit for bit: with zeros, groups that the scale of all makes zero, values beyond what was
    calibrated, and halves between codes."""
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    rng = torch.Generator().manual_seed(11)
    for spread, largest in ((0.1, 1.0), (2.0, 1.0), (6.0, 1.0), (2.0, 0.3)):
        x = torch.randn(24, 160, generator=rng) * (torch.randn(160, generator=rng) * spread).exp()
        x[0], x[1, :16] = 0, 0
        x[2] = torch.tensor(E2M1_VALUES).repeat(10) * 0.75
        module = torch.nn.Module()
        module.quantization_status = QuantizationStatus.INITIALIZED
        limit = x.abs().amax() * largest
        module.input_global_scale = generate_gparam(-limit, limit)
        expected = forward_quantize(module, x, "input", args)
        assert torch.equal(fake_quantize_nvfp4(x, module.input_global_scale.reshape(())), expected)
        # Calibrated by ours, it is theirs but for room for larger values, and for the last bit,
        # which makes it exact as a multiplier, too.
        torch.testing.assert_close(
            INPUT_HEADROOM * input_divisor(limit).reshape(1),
            module.input_global_scale,
            rtol=2**-23,
            atol=0,
        )


def _stripped(args):
    return {key: value for key, value in (args or {}).items() if value is not None}
