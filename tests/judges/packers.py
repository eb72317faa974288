"""The packers of AutoAWQ and ModelOpt as judges: their bytes of a weight are ours, and what they
decode from our bytes is what we meant.

    make test-packers   # makes .venv-packers with both libraries, then: python tests/judges/packers.py

compressed-tensors is judged by tests/checkpoint/formats/test_compressed.py, being among the test
dependencies.
"""

import json
import sys
import types
from importlib.metadata import distribution
from pathlib import Path

import torch
from nearest import quantize_fp4, quantize_int
from torch import nn

from quantkit.checkpoint.formats import awq, modelopt
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid


def autoawq():
    """AutoAWQ's packing modules. Its package imports every model class there is, which new
    transformers versions no longer have."""
    package = types.ModuleType("awq")
    package.__path__ = [str(Path(str(distribution("autoawq").locate_file("awq"))))]
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    return WQLinear_GEMM, dequantize_gemm


def same(ours, theirs):
    """Empty where both are the same names, shapes, dtypes and bytes."""
    if ours.keys() != theirs.keys():
        return f"{sorted(ours)} and {sorted(theirs)}"
    for name, tensor in ours.items():
        other = theirs[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return (
                f"{name}: {tensor.dtype} {list(tensor.shape)} and {other.dtype} {list(other.shape)}"
            )
        if not torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8),
            other.contiguous().view(-1).view(torch.uint8),
        ):
            return f"{name}: other bytes"
    return ""


def judge_awq(rows, columns, group, symmetric):
    """AutoAWQ packs the values that our codes stand for, with our scales and zero points."""
    packer, decode = autoawq()
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    weight = quantize_int(w, IntGrid(4, group, symmetric), scale_dtype=torch.float16)
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.data = dequantize(
        weight
    )  # float32: FP16 would round the product before AutoAWQ divides it again
    zero_point = (
        torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point.float()
    )
    made = packer.from_linear(
        linear, 4, group, scales=weight.scale.T.contiguous(), zeros=(zero_point + 8).T.contiguous()
    )
    theirs = {f"m.{name}": getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    ours = awq.FORMAT.pack("m", weight)
    told = same(ours, theirs)
    if not told and not torch.equal(
        decode(ours["m.qweight"], ours["m.qzeros"], ours["m.scales"], 4, group).T,
        dequantize(weight).half(),
    ):
        told = "AutoAWQ decodes other values from our bytes"
    again = awq.FORMAT.unpack("m", theirs)
    if not told and not (
        torch.equal(again.codes, weight.codes) and torch.equal(again.scale, weight.scale)
    ):
        told = "we decode other codes from AutoAWQ's bytes"
    return told


def judge_modelopt(rows, columns):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    made, scale, global_scale = NVFP4QTensor.quantize(w, 16)
    theirs = {
        "m.weight": made._quantized_data,
        "m.weight_scale": scale,
        "m.weight_scale_2": global_scale,
    }
    weight = quantize_fp4(
        w, global_scale=global_scale
    )  # our own may be a unit in the last place off, to have an exact reciprocal
    ours = modelopt.FORMAT.pack("m", weight)
    told = same(ours, theirs)
    if not told and not torch.allclose(
        quantize_fp4(w).global_scale, global_scale, rtol=2**-23, atol=0
    ):
        told = "another global scale"
    decoded = NVFP4QTensor(w.shape, torch.float32, ours["m.weight"]).dequantize(
        scale=ours["m.weight_scale"], double_scale=ours["m.weight_scale_2"], block_sizes={-1: 16}
    )
    if not told and not torch.equal(decoded, dequantize(weight)):
        told = (
            "ModelOpt decodes other values from our bytes, by up to "
            f"{float((decoded - dequantize(weight)).abs().max()):.1e}"
        )
    again = modelopt.FORMAT.unpack("m", theirs)
    if not told and not torch.equal(dequantize(again), dequantize(weight)):
        told = "we decode other values from ModelOpt's bytes"
    return told


def judge_description():
    """ModelOpt turns our hf_quant_config.json into its newer form, which we must write alike and
    read as the same."""
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    files = modelopt.FORMAT.extra_files(
        Nvfp4Grid(), {"model.layers.0.mlp.up_proj": Nvfp4Grid()}, []
    )
    side = json.loads(files["hf_quant_config.json"])
    flat = {"quantization_config": convert_hf_quant_config_format(side)}
    ours = modelopt.FORMAT.config_block(
        Nvfp4Grid(), {"model.layers.0.mlp.up_proj": Nvfp4Grid()}, []
    )
    different = [
        key for key, value in flat["quantization_config"].items() if ours.get(key) != value
    ]
    if different:
        return f"config.json has another {', '.join(different)}"
    if not modelopt.FORMAT.detect(flat, {}):
        return f"not recognised: {flat}"
    before, after = (
        modelopt.FORMAT.ignored({}, {"hf_quant_config.json": side}),
        modelopt.FORMAT.ignored(flat, {}),
    )
    if modelopt.FORMAT.grid(flat, {}) != Nvfp4Grid():
        return "another grid"
    return "" if before("lm_head") == after("lm_head") else "another list of unquantized modules"


def main():
    cases = {"ModelOpt hf_quant_config.json": judge_description()}
    for size in ((32, 64, 32, False), (96, 512, 128, False), (2048, 256, 64, True)):
        cases[f"AutoAWQ, rows, columns, group size, symmetric: {size}"] = judge_awq(*size)
    for size in ((16, 32), (96, 512)):
        cases[f"ModelOpt NVFP4, rows, columns: {size}"] = judge_modelopt(*size)
    for name, told in cases.items():
        print(f"{'FAIL' if told else 'ok  '} {name} {told}")
    failed = sum(map(bool, cases.values()))
    print(f"{len(cases) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
