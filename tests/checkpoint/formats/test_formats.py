"""What every format keeps: pack and unpack are exact inverses, and a checkpoint says of itself what
it is."""

import json

import make_quantized
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_names import module_names
from refused import refused

from quantkit.checkpoint.formats import FORMATS, detect_format
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.fp8_block import FP8_CHANNEL, Fp8BlockGrid, Fp8BlockWeight
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.grids.mx import MxWeight
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.mxfp8 import Mxfp8Grid
from quantkit.grids.nvfp4 import Nvfp4Grid, Nvfp4Weight

_GRIDS = (
    IntGrid(4, 32, False),
    IntGrid(4, 64, True),
    IntGrid(4, None, True),
    IntGrid(4, None, False),
    IntGrid(8, None, True),
    Nvfp4Grid(),
    FP8_CHANNEL,
    Fp8BlockGrid(),
    Mxfp4Grid(),
    Mxfp4Grid(activation_bits=4),
    Mxfp8Grid(),
)
CASES = [(format, grid) for format in FORMATS for grid in _GRIDS if format.holds(grid)]
CASES += [(format, None) for format in FORMATS if format.name == "dense"]
_IDS = [f"{format.name}-{format.variant}-{index}" for index, (format, _) in enumerate(CASES)]
every_case = pytest.mark.parametrize(("format", "grid"), CASES, ids=_IDS)


def _fields(weight):
    match weight:
        case IntWeight():
            zero_point = (
                torch.zeros_like(weight.scale, dtype=torch.int8)
                if weight.zero_point is None
                else weight.zero_point
            )
            return [weight.codes, weight.scale, zero_point]
        case Nvfp4Weight(input_divisor=divisor):
            return [
                weight.codes,
                weight.scale.float(),
                weight.global_scale,
                *([] if divisor is None else [divisor]),
            ]
        case Fp8BlockWeight():
            return [weight.codes.float(), weight.scale]
        case MxWeight():
            return [weight.codes.float(), weight.exponent]
        case _:
            return [weight]


@every_case
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31), eights=st.integers(1, 3), groups=st.integers(1, 3))
def test_unpack_inverts_pack(format, grid, seed, eights, groups):
    w = torch.randn(8 * eights, 64 * groups, generator=torch.Generator().manual_seed(seed))
    weight = make_quantized.quantize(format, grid, w)
    again = format.unpack("m.up_proj", format.pack("m.up_proj", weight))
    assert type(again) is type(weight)
    for ours, theirs in zip(_fields(again), _fields(weight), strict=True):
        assert torch.equal(ours, theirs)


@every_case
def test_a_written_checkpoint_reads_back(format, grid, tmp_path):
    modules, tensors = make_quantized.quantized_tensors(format, grid)
    checkpoint = Checkpoint.open(make_quantized.write(tmp_path / "model", format, grid))
    assert checkpoint.format is format
    assert checkpoint.grid == grid or (
        format.name == "awq" and isinstance(grid, IntGrid) and grid.symmetric
    )
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, weight in modules.items():
        read = checkpoint.weight(name)
        assert torch.equal(dequantize(read), dequantize(weight))
        assert checkpoint.shape(name) == tuple(weight.shape)
        assert set(checkpoint.parts(name)) == set(format.pack(name, weight))
    for name in make_quantized.PLAIN:
        assert torch.equal(checkpoint.read(name), tensors[name])
    plain = (name for name, shape in make_quantized.PLAIN.items() if len(shape) == 2)
    expected = {*modules, *(name.removesuffix(".weight") for name in plain)}
    assert set(module_names(checkpoint)) == expected


@every_case
def test_shares_of_a_stored_weight_are_its_slices(format, grid, tmp_path):
    """Of outputs and of inputs; from where the stored words and groups allow, and no further before
    than those ask for."""
    modules, _ = make_quantized.quantized_tensors(format, grid)
    checkpoint = Checkpoint.open(make_quantized.write(tmp_path / "model", format, grid))
    for name, weight in modules.items():
        whole = dequantize(weight)
        for axis, size in zip(("N", "K"), whole.shape):
            for start, stop in (
                (0, size),
                (0, size // 2),
                (size // 2, size),
                (size // 4, size // 4 + 3),
            ):
                share, first = checkpoint.weight_slice(name, axis, start, stop)
                assert start - 128 < first <= start
                values = dequantize(share)
                own = values.narrow("NK".index(axis), start - first, stop - start)
                assert torch.equal(own, whole.narrow("NK".index(axis), start, stop - start))


@every_case
def test_the_ignore_list_names_all_unquantized_linears_and_no_other(format, grid):
    config, files = make_quantized.description(format, grid)
    ignored = format.ignored(config, {name: json.loads(content) for name, content in files.items()})
    if ignored is None:
        assert format.name in ("fp8-block", "dense")
        return
    assert not any(ignored(module) for module in make_quantized.QUANTIZED)
    for module in (
        "lm_head",
        "model.layers.3.self_attn.kv_b_proj",
        "model.layers.4.mlp.experts.0.gate_proj",
    ):
        assert ignored(module)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
NO_TARGETS = {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}


@pytest.mark.parametrize(
    ("block", "side", "said"),
    [
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            {},
            "does not read: compressed-tensors float-quantized; give the model .*; of quantized ",
        ),
        (None, {"quantize_config.json": {"bits": 4}}, r"does not read: quantize_config\.json"),
        (AWQ, {"quant_model_description.json": {}}, "says two things .*: awq and modelslim"),
    ],
)
def test_unknown_quantization_is_refused(block, side, said, tmp_path):
    with refused(said):
        detect_format(tmp_path, {"quantization_config": block} if block else {}, side)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (AWQ | {"bits": 8}, "bits 8"),
        (AWQ | {"version": "gemv"}, "version gemv"),
        (AWQ | {"zero_point": None}, "zero_point None"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        (PACKED, "0 descriptions"),
        (PACKED | {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "num_bits 8"),
        (
            PACKED | {"format": "int-quantized", "config_groups": NO_TARGETS},
            "config_groups.a of quantization_config names no targets",
        ),
    ],
)
def test_grids_that_are_not_read_are_refused(block, said, tmp_path):
    config = {"quantization_config": block}
    with refused(said):
        detect_format(tmp_path, config, {}).grid(config, {})
