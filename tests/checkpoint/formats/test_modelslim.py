"""ModelSlim: the golden bytes of its W4A8 packing, and its description of every tensor."""

import json

import golden
import make_quantized
import pytest
import torch
from refused import refused

from quantkit.checkpoint.formats.modelslim import FORMAT
from quantkit.grids.int_groups import IntGrid, IntWeight

_INT8, _INT4 = IntGrid(8, None, True), IntGrid(4, None, True)
_VECTORS = golden.load("modelslim_w4a8_pack")


def _int4(codes):
    return IntWeight(
        torch.tensor(codes, dtype=torch.int8),
        torch.tensor(_VECTORS["weight_scale"]).unsqueeze(1),
        None,
        bits=4,
    )


def test_int4_golden_bytes():
    weight = _int4(_VECTORS["int4"])
    packed = FORMAT.pack("experts.0.up_proj", weight)
    assert packed["experts.0.up_proj.weight"].tolist() == _VECTORS["packed_int8"]
    assert packed["experts.0.up_proj.scale_bias"].tolist() == _VECTORS["scale_bias_up_proj"]
    again = FORMAT.unpack("experts.0.up_proj", packed)
    assert torch.equal(again.codes, weight.codes)
    assert again.bits == 4


def test_int4_down_proj_has_a_bias_for_each_of_16_slices():
    packed = FORMAT.pack("experts.0.down_proj", _int4(_VECTORS["int4_down"]))
    assert (
        packed["experts.0.down_proj.scale_bias"].tolist() == _VECTORS["scale_bias_down_proj_tp16"]
    )


def test_int8_has_a_scale_and_a_zero_offset_in_float32():
    packed = FORMAT.pack(
        "m", IntWeight(torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1), None, bits=8)
    )
    assert packed["m.weight_scale"].dtype == packed["m.weight_offset"].dtype == torch.float32
    assert packed["m.weight_offset"].tolist() == [[0.0]] * 4


@pytest.mark.parametrize(("grid", "kind"), [(_INT8, "W8A8_DYNAMIC"), (_INT4, "W4A8_DYNAMIC")])
def test_every_tensor_is_described(grid, kind):
    config, files = make_quantized.description(FORMAT, grid)
    assert "quantization_config" not in config
    description = json.loads(files["quant_model_description.json"])
    _, tensors = make_quantized.quantized_tensors(FORMAT, grid)
    meta = {
        "model_quant_type": kind,
        "version": "1.0.0",
        "group_size": 0,
        "metadata": {},
        "optional": {},
    }
    types = {name: "FLOAT" if name in make_quantized.PLAIN else kind for name in tensors}
    assert description == meta | types


def test_a_checkpoint_of_int4_experts_and_int8_attention_says_both():
    files = FORMAT.extra_files(_INT4, {"a.q_proj": _INT8, "e.up_proj": _INT4}, [])
    description = json.loads(files["quant_model_description.json"])
    assert description["a.q_proj.weight"] == "W8A8_DYNAMIC"
    assert description["e.up_proj.scale_bias"] == "W4A8_DYNAMIC"
    assert "a.q_proj.scale_bias" not in description


def test_an_asymmetric_weight_is_refused():
    tensors = FORMAT.pack(
        "m", IntWeight(torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1), None, bits=8)
    )
    tensors["m.weight_offset"][2] = 3.0
    with refused(r"m\.weight_offset is not zero"):
        FORMAT.unpack("m", tensors)


@pytest.mark.parametrize("kind", ["heads_rotation", "kronecker_rotation"])
def test_rotations_as_the_model_runs_are_refused_and_folded_ones_read(kind):
    config, files = make_quantized.description(FORMAT, _INT8)
    side = {name: json.loads(text) for name, text in files.items()}
    described = side["quant_model_description.json"]
    described["optional"] = {"quarot": {"rotation_map": {"global_rotation": "a.safetensors"}}}
    described["metadata"] = {"quarot": {"max_tp_size": 4, kind: {"layers": []}}}
    assert FORMAT.of_checkpoint(config, side) is FORMAT
    described["metadata"]["quarot"][kind]["layers"] = ["model.layers.0.self_attn.o_proj"]
    with refused(r"inputs of model\.layers\.0\.self_attn\.o_proj are rotated"):
        FORMAT.of_checkpoint(config, side)


def test_types_that_are_not_read_are_refused():
    with refused("model_quant_type W4A4_MXFP4; quantkit reads W8A8_DYNAMIC, W4A8_DYNAMIC, W8A8,"):
        FORMAT.grid({}, {"quant_model_description.json": {"model_quant_type": "W4A4_MXFP4"}})
