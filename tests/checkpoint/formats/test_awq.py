"""AutoAWQ gemm: the bytes of WQLinear_GEMM.from_linear."""

import golden
import pytest
import torch
from refused import refused

from quantkit.checkpoint.formats.awq import FORMAT
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid, IntWeight

_VECTORS = golden.load("autoawq_gemm_g32")
_TENSORS = {f"m.{name}": golden.tensor(_VECTORS[name]) for name in ("qweight", "qzeros", "scales")}


def test_unpacks_autoawqs_bytes():
    weight = FORMAT.unpack("m", _TENSORS)
    assert torch.equal(weight.codes.int() + 8, golden.tensor(_VECTORS["int_weight_in_out"]).T)
    assert torch.equal(weight.zero_point.int() + 8, golden.tensor(_VECTORS["int_zero_group_out"]).T)
    assert torch.equal(
        dequantize(weight, torch.float16).T, golden.tensor(_VECTORS["dequant_in_out_fp16"])
    )


def test_both_ways_with_vectors_made_by_the_judge():
    """tests/judges/packers.py had AutoAWQ pack a weight of ours; the file says by which version."""
    vectors = golden.load("autoawq_packer")
    tensors = {f"m.{name}": golden.tensor(stored) for name, stored in vectors["tensors"].items()}
    weight = FORMAT.unpack("m", tensors)
    assert torch.equal(weight.codes, golden.tensor(vectors["codes"]).view(torch.int8))
    assert torch.equal(weight.scale, golden.tensor(vectors["scale"]))
    packed = FORMAT.pack("m", weight)
    assert all(torch.equal(packed[name], tensor) for name, tensor in tensors.items())


def test_a_symmetric_weight_has_the_zero_point_8():
    weight = IntWeight(torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1), None, bits=4)
    assert FORMAT.pack("m", weight)["m.qzeros"].flatten().tolist() == golden.words(["0x88888888"])


def test_expert_shapes_of_r1():
    grid = IntGrid(4, 128, False)
    shapes = {spec.name: spec.shape for spec in FORMAT.specs("e.gate_proj", (2048, 7168), grid)}
    assert shapes == {
        "e.gate_proj.qweight": (7168, 256),
        "e.gate_proj.qzeros": (56, 256),
        "e.gate_proj.scales": (56, 2048),
    }


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((12, 128), "12 outputs, not a multiple of 8"),
        ((16, 96), "96 input channels, not a multiple of 128"),
    ],
)
def test_shapes_that_do_not_pack_are_refused(shape, fault):
    with refused(fault):
        FORMAT.specs("m", shape, IntGrid(4, 128, False))


def test_scales_that_float16_cannot_hold_are_a_bug():
    weight = IntWeight(torch.ones(8, 32, dtype=torch.int8), torch.full((8, 1), 0.1), None, bits=4)
    with pytest.raises(AssertionError, match="not representable"):
        FORMAT.pack("m", weight)


def test_a_vision_tower_is_one_entry_that_catches_no_joined_linear():
    """SGLang takes an entry for a substring of a module's name, and joins q, k and v: attn.qkv
    would be self_attn.qkv_proj."""
    text = [
        f"model.language_model.layers.{layer}.self_attn.{side}_proj"
        for layer in range(2)
        for side in "qkvo"
    ]
    plain = {
        "model.visual.blocks.0.attn.qkv.weight": (48, 16),
        "model.visual.merger.linear_fc1.weight": (16, 16),
        "model.language_model.layers.1.linear_attn.in_proj_a.weight": (4, 16),
        "lm_head.weight": (32, 16),
    }
    grid = IntGrid(bits=4, group_size=16, symmetric=False)
    block = FORMAT.config_block(
        grid,
        dict.fromkeys(text, grid),
        [TensorSpec(name, torch.bfloat16, shape) for name, shape in plain.items()],
    )
    assert block["modules_to_not_convert"] == ["visual.", "lm_head", "linear_attn.in_proj_a"]
    assert not any(
        entry in "model.layers.0.self_attn.qkv_proj" for entry in block["modules_to_not_convert"]
    )
