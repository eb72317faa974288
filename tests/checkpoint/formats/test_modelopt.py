"""ModelOpt NVFP4: its golden bytes, both places where it describes itself, and its matching of
excluded modules."""

import json

import golden
import make_quantized
import torch
from nearest import quantize_fp4

from quantkit.checkpoint.formats.modelopt import FORMAT, W4A4
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import SCHEMES


def test_both_ways_with_vectors_made_by_the_judge():
    """tests/judges/packers.py had ModelOpt quantize a weight; the file says by which version."""
    vectors = golden.load("modelopt_packer")
    tensors = {f"m.{name}": golden.tensor(stored) for name, stored in vectors["tensors"].items()}
    weight = FORMAT.unpack("m", tensors)
    packed = FORMAT.pack("m", weight)
    assert all(
        torch.equal(packed[name].view(-1).view(torch.uint8), t.view(-1).view(torch.uint8))
        for name, t in tensors.items()
    )
    ours = quantize_fp4(golden.tensor(vectors["input_weight"]), global_scale=weight.global_scale)
    assert torch.equal(ours.codes, weight.codes)
    assert torch.equal(ours.scale.view(torch.uint8), weight.scale.view(torch.uint8))


def test_scales_declared_as_uint8_are_read():
    weight = quantize_fp4(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))
    tensors = FORMAT.pack("m", weight)
    tensors["m.weight_scale"] = tensors["m.weight_scale"].view(torch.uint8)
    tensors["m.weight_scale_2"] = tensors["m.weight_scale_2"].reshape(1, 1)
    again = FORMAT.unpack("m", tensors)
    assert torch.equal(again.scale.float(), weight.scale.float())


def test_description_has_every_key_engines_demand():
    config, files = make_quantized.description(FORMAT, Nvfp4Grid())
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
    path = make_quantized.write(tmp_path / "model", FORMAT, Nvfp4Grid())
    block = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    (path / "hf_quant_config.json").unlink()
    flat = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": block["exclude_modules"],
        "group_size": 16,
    }
    (path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "quantization_config": flat})
    )
    checkpoint = Checkpoint.open(path)
    assert checkpoint.format is FORMAT
    assert checkpoint.scheme is SCHEMES["fp4-w4a16"]


def test_rounded_inputs_are_described_in_words(tmp_path):
    """By quant_algo alone, as in DeepSeek-R1-FP4, an input_scale is read and not used."""
    grid = Nvfp4Grid(activation_bits=4)
    path = make_quantized.write(tmp_path / "model", W4A4, grid)
    assert (Checkpoint.open(path).format, Checkpoint.open(path).grid) == (W4A4, grid)
    assert Checkpoint.open(path).scheme is SCHEMES["nvfp4-w4a4"]
    flat = json.loads((path / "config.json").read_text())["quantization_config"]
    assert (
        flat["quant_algo"]
        == json.loads((path / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
        == "NVFP4"
    )
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.format, checkpoint.grid) == (FORMAT, Nvfp4Grid())
    module = f"{make_quantized.LAYER}.self_attn.o_proj"
    weight = checkpoint.weight(module)
    assert f"{module}.input_scale" in checkpoint.parts(module)
    assert weight.input_divisor is None


def test_nvidias_wildcards():
    ignored = FORMAT.ignored(
        {},
        {
            "hf_quant_config.json": {
                "quantization": {
                    "exclude_modules": ["lm_head", "model.layers.*.self_attn*", "layers.61"]
                }
            }
        },
    )
    assert ignored("lm_head")
    assert ignored("model.layers.7.self_attn.q_a_proj")
    assert ignored("model.layers.61.mlp.experts.0.up_proj")
    assert not ignored("model.layers.6.mlp.experts.0.up_proj")


def test_the_mtp_layer_stays_unquantized():
    assert FORMAT.quantizes("model.layers.61.mlp.experts.0.up_proj", "linear", mtp=True) is False
    assert FORMAT.quantizes("model.layers.3.mlp.experts.0.up_proj", "linear")
