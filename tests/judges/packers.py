"""The packers of AutoAWQ and ModelOpt as judges: their bytes of a weight are ours, and what they
decode from our bytes is what we meant.

    make test-packers                       # makes .venv-packers with both libraries, then: python tests/judges/packers.py
    python tests/judges/packers.py --write  # also writes their bytes to tests/support/golden, where
    the tests of the formats read them

compressed-tensors is judged by tests/checkpoint/formats/test_compressed.py, being among the test
dependencies.
"""

import argparse
import json
import sys
import types
from importlib.metadata import distribution, version
from pathlib import Path

import torch
from nearest import quantize_fp4, quantize_int
from torch import nn

from quantkit.checkpoint.formats import awq, modelopt
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid

GOLDEN = Path(__file__).parents[1] / "support" / "golden"
BITS = {
    1: ("bits_u8", torch.uint8, 2**8),
    2: ("bits_u16", torch.int16, 2**16),
    4: ("bits_u32", torch.int32, 2**32),
}


def autoawq():
    """AutoAWQ's packing modules. Its package imports every model class there is, which new
    transformers versions no longer have."""
    package = types.ModuleType("awq")
    package.__path__ = [str(Path(str(distribution("autoawq").locate_file("awq"))))]
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    return WQLinear_GEMM, dequantize_gemm


def stored(tensor):
    """Raw bits, as tests/support/golden.py reads them."""
    name, carrier, modulus = BITS[tensor.element_size()]
    bits = [int(value) % modulus for value in tensor.contiguous().view(carrier).flatten().tolist()]
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        name: bits,
    }


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
    vectors = {
        "autoawq": version("autoawq"),
        "group_size": group,
        "codes": stored(weight.codes),
        "scale": stored(weight.scale),
    }
    return told, vectors | {
        "tensors": {name.removeprefix("m."): stored(tensor) for name, tensor in theirs.items()}
    }


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
    vectors = {"nvidia-modelopt": version("nvidia-modelopt"), "input_weight": stored(w)}
    return told, vectors | {
        "tensors": {name.removeprefix("m."): stored(tensor) for name, tensor in theirs.items()}
    }


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the smallest case of each to tests/support/golden",
    )
    write = parser.parse_args().write
    cases = {}
    for rows, columns, group, symmetric in (
        (32, 64, 32, False),
        (96, 512, 128, False),
        (2048, 256, 64, True),
    ):
        cases[f"AutoAWQ [{rows}, {columns}] g{group}{' symmetric' * symmetric}"] = judge_awq(
            rows, columns, group, symmetric
        )
    for rows, columns in ((16, 32), (96, 512)):
        cases[f"ModelOpt NVFP4 [{rows}, {columns}]"] = judge_modelopt(rows, columns)
    cases["ModelOpt hf_quant_config.json"] = judge_description(), {}
    for name, (told, _) in cases.items():
        print(f"{'FAIL' if told else 'ok  '} {name} {told}")
    if write:
        for file, name in (
            ("autoawq_packer", "AutoAWQ [32, 64] g32"),
            ("modelopt_packer", "ModelOpt NVFP4 [16, 32]"),
        ):
            vectors = {
                "made by": "tests/judges/packers.py --write",
                "torch": torch.__version__,
                **cases[name][1],
            }
            (GOLDEN / f"{file}.json").write_text(json.dumps(vectors) + "\n")
    failed = sum(bool(told) for told, _ in cases.values())
    print(f"{len(cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
