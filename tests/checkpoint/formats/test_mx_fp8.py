"""MXFP4, MXFP8 and FP8 of every layout, against compressed-tensors, which writes them, and by their
definition elsewhere."""

import json

import make_quantized
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from refused import refused

from quantkit.checkpoint.formats import compressed_mxfp4, fp8
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize, round_to_nearest
from quantkit.grids.fp8_block import FP8_CHANNEL, Fp8BlockGrid
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.mxfp8 import Mxfp8Grid
from quantkit.models.activation_quant import ActivationQuant

ROWS, COLUMNS = 160, 320  # blocks of 128 are partial at both edges
MODULE = "model.layers.0.self_attn.q_proj"
CASES = {
    "mxfp4": ("MXFP4A16", MXFP4PackedCompressor, "mxfp4-pack-quantized"),
    "mxfp4-w4a4": ("MXFP4", MXFP4PackedCompressor, "mxfp4-pack-quantized"),
    "mxfp8-a16": ("MXFP8A16", MXFP8QuantizationCompressor, "mxfp8-quantized"),
    "mxfp8": ("MXFP8", MXFP8QuantizationCompressor, "mxfp8-quantized"),
    "tensor": ("FP8", FloatQuantizationCompressor, "float-quantized"),
    "channel": ("FP8_DYNAMIC", FloatQuantizationCompressor, "float-quantized"),
    "block": ("FP8_BLOCK", FloatQuantizationCompressor, "naive-quantized"),
}


def random_weight():
    return (
        torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
        * torch.logspace(-3, 3, ROWS)[:, None]
    )


def scale_of(w, scheme):
    args = scheme.weights
    if args.strategy == "group":
        amax = w.unflatten(1, (-1, args.group_size)).abs().amax(-1)
        return 2.0 ** (amax.log2().floor() - (2 if args.num_bits == 4 else 8))
    if args.strategy == "block":
        return torch.rand(2, 3) + 0.5
    return (
        w.abs().amax().reshape(1) / 448
        if args.strategy == "tensor"
        else w.abs().amax(1, keepdim=True) / 448
    )


def stored(path, tensors, block, side=None):
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    beside = side and {"hf_quant_config.json": side}
    return Checkpoint.open(make_quantized.write_stored(path / "c", named, block, beside))


@pytest.mark.parametrize("case", CASES)
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(tmp_path, case):
    preset, compressor, variant = CASES[case]
    scheme, w = preset_name_to_scheme(preset, ["Linear"]), random_weight()
    packed = compressor.compress({"weight": w, "weight_scale": scale_of(w, scheme)}, scheme)
    expected = compressor.decompress(packed, scheme)["weight"].float()
    group = json.loads(scheme.model_dump_json())
    block = {
        "quant_method": "compressed-tensors",
        "format": variant,
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    checkpoint = stored(tmp_path, packed, block)
    assert checkpoint.shape(MODULE) == (ROWS, COLUMNS)
    assert torch.equal(dequantize(checkpoint.weight(MODULE)), expected)
    reads = {"mxfp4-w4a4": 4, "mxfp8": 8}
    assert checkpoint.activation_bits(MODULE) == reads.get(case, 16)
    part, first = checkpoint.weight_slice(MODULE, "N", 40, 120)
    assert torch.equal(dequantize(part)[40 - first : 120 - first], expected[40:120])
    part, first = checkpoint.weight_slice(MODULE, "K", 160, 320)
    assert torch.equal(dequantize(part)[:, 160 - first :], expected[:, 160:])


@pytest.mark.parametrize(
    ("case", "format", "grid", "most"),
    [
        ("mxfp4", compressed_mxfp4.FORMAT, Mxfp4Grid(), 0.2),
        ("mxfp4-w4a4", compressed_mxfp4.W4A4, Mxfp4Grid(activation_bits=4), 0.2),
        ("mxfp8", fp8.COMPRESSED_MX, Mxfp8Grid(), 0.03),
        ("channel", fp8.COMPRESSED_CHANNEL, FP8_CHANNEL, 0.03),
        ("block", fp8.COMPRESSED_BLOCK, Fp8BlockGrid(), 0.03),
    ],
)
def test_what_is_rounded_is_what_compressed_tensors_reads(case, format, grid, most):
    """Blocks are partial at the outputs' end. A fit is closer, of blocks the same."""
    w = random_weight()[:, :256]
    scheme = preset_name_to_scheme(CASES[case][0], ["Linear"])
    fitted, nearest = (grid.quantizer(w.abs().amax(), torch.float32, points) for points in (8, 0))
    values, scales = round_to_nearest(w, fitted)
    packed = format.pack(MODULE, fitted.encode(values, scales))
    named = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in packed.items()}
    read = CASES[case][1].decompress(named, scheme)["weight"]
    assert torch.equal(read.float(), values)
    error, plain = (values - w).norm(), (round_to_nearest(w, nearest)[0] - w).norm()
    assert plain < most * w.norm()
    assert error == plain if case in ("block", "mxfp8") else error < plain
    written = format.config_block(grid, {MODULE: grid}, ())["config_groups"]["group_0"]
    described = json.loads(scheme.model_dump_json())
    for part in ("weights", "input_activations") if case != "mxfp4" else ():
        said = {key: described[part][key] for key in written[part]}
        assert written[part] == said, "as llm-compressor describes it"


@pytest.mark.parametrize("grid", [Mxfp4Grid(activation_bits=4), Mxfp8Grid()])
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(grid):
    x = torch.randn(7, 256) * torch.logspace(-3, 3, 7)[:, None]
    x[3, :64] = torch.tensor([0.0, 448.0]).repeat_interleave(32)
    scheme = preset_name_to_scheme(CASES[grid.label][0], ["Linear"])
    module = torch.nn.Module()
    module.quantization_status = QuantizationStatus.INITIALIZED
    expected = forward_quantize(module, x, "input", scheme.input_activations)
    assert torch.equal(ActivationQuant(grid.activation_bits, grid=grid)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_deepseek_blocks_may_have_scales_in_fewer_bits(tmp_path, dtype):
    codes = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scale = torch.randint(-9, 3, (2, 3)).float().exp2()
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    parts = {"weight": codes, "weight_scale_inv": scale.to(dtype)}
    checkpoint = stored(tmp_path, parts, block)
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:ROWS, :COLUMNS]
    assert torch.equal(dequantize(checkpoint.weight(MODULE)), codes.float() * full)


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"])
def test_modelopt_fp8(tmp_path, algorithm):
    codes = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    if algorithm == "MXFP8":
        scale = torch.randint(110, 130, (ROWS, COLUMNS // 32), dtype=torch.uint8)
        full = (scale.float() - 127).exp2().repeat_interleave(32, 1)
    else:
        scale = torch.tensor(0.03) if algorithm == "FP8" else torch.rand(ROWS) + 0.1
        full = scale.view(-1, 1)
    said = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    parts = {"weight": codes, "weight_scale": scale}
    parts |= {"input_scale": torch.tensor(1.0)} if algorithm == "FP8" else {}
    side = {"producer": {"name": "modelopt"}, "quantization": said}
    checkpoint = stored(tmp_path, parts, None, side)
    assert torch.equal(dequantize(checkpoint.weight(MODULE)), codes.float() * full)


def test_fp8_that_is_not_read_is_refused_by_name(tmp_path):
    codes = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    args = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}
    block = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    block["config_groups"] = {"g": {"weights": args}}
    for described, said in ((block, "float-quantized"), ({"quant_method": "fp8"}, "weight_scale")):
        with refused(said):
            stored(tmp_path, {"weight": codes, "weight_scale": torch.ones(ROWS, 5)}, described)
