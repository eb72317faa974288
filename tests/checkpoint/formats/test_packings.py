"""Golden bytes of AutoAWQ, ModelOpt and ModelSlim, how each describes itself, and lists of what is not
quantized: short, complete, and never catching a quantized module."""

import fnmatch
import json

import golden
import make_quantized
import pytest
import torch
from nearest import quantize_fp4
from refused import refused

from quantkit.checkpoint.formats import awq, modelopt, modelslim
from quantkit.checkpoint.formats.base import IgnoreSpelling, ignore_list
from quantkit.checkpoint.formats.modelslim_folded import FoldedInputs
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import SCHEMES

_AWQ = golden.load("autoawq_gemm_g32")
_AWQ_TENSORS = {f"m.{name}": golden.tensor(_AWQ[name]) for name in ("qweight", "qzeros", "scales")}


def test_unpacks_autoawqs_bytes():
    weight = awq.FORMAT.unpack("m", _AWQ_TENSORS)
    assert torch.equal(weight.codes.int() + 8, golden.tensor(_AWQ["int_weight_in_out"]).T)
    assert torch.equal(weight.zero_point.int() + 8, golden.tensor(_AWQ["int_zero_group_out"]).T)
    assert torch.equal(
        dequantize(weight, torch.float16).T, golden.tensor(_AWQ["dequant_in_out_fp16"])
    )


def test_both_ways_with_vectors_made_by_the_judge():
    """tests/judges/packers.py had AutoAWQ pack a weight of ours; the file says by which version."""
    vectors = golden.load("autoawq_packer")
    tensors = {f"m.{name}": golden.tensor(stored) for name, stored in vectors["tensors"].items()}
    weight = awq.FORMAT.unpack("m", tensors)
    assert torch.equal(weight.codes, golden.tensor(vectors["codes"]).view(torch.int8))
    assert torch.equal(weight.scale, golden.tensor(vectors["scale"]))
    packed = awq.FORMAT.pack("m", weight)
    assert all(torch.equal(packed[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((12, 128), "12 outputs, not a multiple of 8"),
        ((16, 96), "96 input channels, not a multiple of 128"),
    ],
)
def test_shapes_that_do_not_pack_are_refused(shape, fault):
    with refused(fault):
        awq.FORMAT.specs("m", shape, IntGrid(4, 128, False))


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
    block = awq.FORMAT.config_block(
        grid,
        dict.fromkeys(text, grid),
        [TensorSpec(name, torch.bfloat16, shape) for name, shape in plain.items()],
    )
    assert block["modules_to_not_convert"] == ["visual.", "lm_head", "linear_attn.in_proj_a"]
    assert not any(
        entry in "model.layers.0.self_attn.qkv_proj" for entry in block["modules_to_not_convert"]
    )


def test_nvfp4_both_ways_with_vectors_made_by_modelopt():
    """tests/judges/packers.py had ModelOpt quantize a weight; the file says by which version."""
    vectors = golden.load("modelopt_packer")
    tensors = {f"m.{name}": golden.tensor(stored) for name, stored in vectors["tensors"].items()}
    weight = modelopt.FORMAT.unpack("m", tensors)
    packed = modelopt.FORMAT.pack("m", weight)
    assert all(
        torch.equal(packed[name].view(-1).view(torch.uint8), t.view(-1).view(torch.uint8))
        for name, t in tensors.items()
    )
    ours = quantize_fp4(golden.tensor(vectors["input_weight"]), global_scale=weight.global_scale)
    assert torch.equal(ours.codes, weight.codes)
    assert torch.equal(ours.scale.view(torch.uint8), weight.scale.view(torch.uint8))


def test_scales_declared_as_uint8_are_read():
    weight = quantize_fp4(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))
    tensors = modelopt.FORMAT.pack("m", weight)
    tensors["m.weight_scale"] = tensors["m.weight_scale"].view(torch.uint8)
    tensors["m.weight_scale_2"] = tensors["m.weight_scale_2"].reshape(1, 1)
    again = modelopt.FORMAT.unpack("m", tensors)
    assert torch.equal(again.scale.float(), weight.scale.float())


def test_description_has_every_key_engines_demand():
    config, files = make_quantized.description(modelopt.FORMAT, Nvfp4Grid())
    block = json.loads(files["hf_quant_config.json"])["quantization"]
    assert block.keys() == {"quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules"}
    assert "model.layers.4.*" in block["exclude_modules"]
    # vLLM takes this quant_algo from the flat form only, where it has no "quantization" to look
    # into.
    flat = config["quantization_config"]
    assert "quantization" not in flat
    assert (flat["quant_method"], flat["quant_algo"], flat["ignore"]) == (
        "modelopt",
        block["quant_algo"],
        block["exclude_modules"],
    )


def test_description_in_config_json_is_read(tmp_path):
    path = make_quantized.write(tmp_path / "model", modelopt.FORMAT, Nvfp4Grid())
    (path / "hf_quant_config.json").unlink()
    checkpoint = Checkpoint.open(path)
    assert checkpoint.format is modelopt.FORMAT
    assert checkpoint.scheme is SCHEMES["fp4-w4a16"]


def test_rounded_inputs_are_described_in_words(tmp_path):
    """By quant_algo alone, as in DeepSeek-R1-FP4, an input_scale is read and not used."""
    grid = Nvfp4Grid(activation_bits=4)
    path = make_quantized.write(tmp_path / "model", modelopt.W4A4, grid)
    assert (Checkpoint.open(path).format, Checkpoint.open(path).grid) == (modelopt.W4A4, grid)
    assert Checkpoint.open(path).scheme is SCHEMES["nvfp4-w4a4"]
    assert Checkpoint.open(path).config["quantization_config"]["quant_algo"] == "NVFP4"
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.format, checkpoint.grid) == (modelopt.FORMAT, Nvfp4Grid())
    module = f"{make_quantized.LAYER}.self_attn.o_proj"
    assert f"{module}.input_scale" in checkpoint.parts(module)
    assert checkpoint.weight(module).input_divisor is None


def test_nvidias_wildcards():
    said = {"exclude_modules": ["lm_head", "model.layers.*.self_attn*", "layers.61"]}
    ignored = modelopt.FORMAT.ignored({}, {"hf_quant_config.json": {"quantization": said}})
    assert ignored("lm_head")
    assert ignored("model.layers.7.self_attn.q_a_proj")
    assert ignored("model.layers.61.mlp.experts.0.up_proj")
    assert not ignored("model.layers.6.mlp.experts.0.up_proj")


_INT8, _INT4 = IntGrid(8, None, True), IntGrid(4, None, True)
_SLIM = golden.load("modelslim_w4a8_pack")


def _int4(codes):
    return IntWeight(
        torch.tensor(codes, dtype=torch.int8),
        torch.tensor(_SLIM["weight_scale"]).unsqueeze(1),
        None,
        bits=4,
    )


def test_int4_golden_bytes():
    """down_proj has a bias for each of 16 slices."""
    weight = _int4(_SLIM["int4"])
    packed = modelslim.FORMAT.pack("experts.0.up_proj", weight)
    assert packed["experts.0.up_proj.weight"].tolist() == _SLIM["packed_int8"]
    assert packed["experts.0.up_proj.scale_bias"].tolist() == _SLIM["scale_bias_up_proj"]
    again = modelslim.FORMAT.unpack("experts.0.up_proj", packed)
    assert torch.equal(again.codes, weight.codes)
    assert again.bits == 4
    down = modelslim.FORMAT.pack("experts.0.down_proj", _int4(_SLIM["int4_down"]))
    bias = down["experts.0.down_proj.scale_bias"]
    assert bias.tolist() == _SLIM["scale_bias_down_proj_tp16"]
    assert modelslim.FORMAT.split_fault("layer.proj", _INT4, row_parallel=True), (
        "it tells them by their names"
    )


@pytest.mark.parametrize(("grid", "kind"), [(_INT8, "W8A8_DYNAMIC"), (_INT4, "W4A8_DYNAMIC")])
def test_every_tensor_is_described(grid, kind):
    config, files = make_quantized.description(modelslim.FORMAT, grid)
    assert "quantization_config" not in config
    description = json.loads(files["quant_model_description.json"])
    _, tensors = make_quantized.quantized_tensors(modelslim.FORMAT, grid)
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
    files = modelslim.FORMAT.extra_files(_INT4, {"a.q_proj": _INT8, "e.up_proj": _INT4}, [])
    description = json.loads(files["quant_model_description.json"])
    assert description["a.q_proj.weight"] == "W8A8_DYNAMIC"
    assert description["e.up_proj.scale_bias"] == "W4A8_DYNAMIC"
    assert "a.q_proj.scale_bias" not in description


def test_an_asymmetric_weight_is_refused():
    tensors = modelslim.FORMAT.pack(
        "m", IntWeight(torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1), None, bits=8)
    )
    tensors["m.weight_offset"][2] = 3.0
    with refused(r"m\.weight_offset is not zero"):
        modelslim.FORMAT.unpack("m", tensors)


@pytest.mark.parametrize("kind", ["heads_rotation", "kronecker_rotation"])
def test_rotations_as_the_model_runs_are_told_from_those_in_the_weights(kind):
    config, files = make_quantized.description(modelslim.FORMAT, _INT8)
    side = {name: json.loads(text) for name, text in files.items()}
    described = side["quant_model_description.json"]
    described["optional"] = {"quarot": {"rotation_map": {"global_rotation": "a.safetensors"}}}
    described["metadata"] = {"quarot": {"max_tp_size": 4, kind: {"layers": []}}}
    assert modelslim.FORMAT.of_checkpoint(config, side) is modelslim.FORMAT
    module = "model.layers.3.self_attn.o_proj"
    described["metadata"]["quarot"][kind]["layers"] = [f"{module}."]
    found = modelslim.FORMAT.of_checkpoint(config, side).member(module)
    assert isinstance(found, FoldedInputs)


_SUBSTRING = IgnoreSpelling(
    layer=lambda prefix: f"{prefix}.",
    tails=lambda tail: (tail, f"{tail}."),
    name=lambda module: module,
    matches=lambda entry, module: entry in module,
)
_WILDCARD = IgnoreSpelling(
    layer=lambda prefix: f"{prefix}.*",
    tails=lambda tail: (f"*.{tail}",),
    name=lambda module: module,
    matches=lambda entry, module: fnmatch.fnmatchcase(module, entry),
)


def test_endings_and_whole_layers_are_one_entry_each():
    quantized = [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj"
        for layer in range(3)
        for expert in range(4)
    ]
    plain = [
        "lm_head",
        *(f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(4)),
        "model.layers.3.mlp.experts.0.up_proj",
    ]
    assert ignore_list(quantized, plain, _WILDCARD) == [
        "model.layers.3.*",
        "lm_head",
        "*.self_attn.kv_b_proj",
    ]


def test_an_ending_that_would_catch_a_quantized_module_is_spelled_otherwise():
    assert ignore_list(
        ["model.layers.0.mlp.gate_proj"], ["model.layers.0.mlp.gate"], _SUBSTRING
    ) == ["mlp.gate."]
    quantized = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.gate"]
    plain = ["model.layers.1.mlp.up_proj", "model.layers.0.mlp.gate"]
    assert sorted(ignore_list(quantized, plain, _WILDCARD)) == sorted(plain)


def test_layer_6_does_not_catch_layer_61():
    entries = ignore_list(
        ["model.layers.61.mlp.up_proj"], ["model.layers.6.mlp.up_proj"], _WILDCARD
    )
    assert entries == ["model.layers.6.*"]
    assert not fnmatch.fnmatchcase("model.layers.61.mlp.up_proj", entries[0])
