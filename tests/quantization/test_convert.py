"""Between formats nothing is lost that both can hold, and what is lost is said; published layouts
are valid sources."""

import json
import shutil

import pytest
import torch
from edited import edited
from make_model import fp8_values, random_tensors, tiny_config
from module_names import module_names
from output_files import files
from packed_model import write_packed
from refused import refused
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.formats import (
    awq,
    compressed_int4,
    compressed_int8,
    compressed_mxfp4,
    gptq,
    modelopt,
    modelslim,
)
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.quantization import conversion_plan as module
from quantkit.quantization.conversion_plan import fit_scales
from quantkit.quantization.convert import convert

INT4 = IntGrid(4, 128, symmetric=False)
INT4_SYMMETRIC = IntGrid(4, 128, symmetric=True)
INT8 = IntGrid(8, None, symmetric=True)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Writes (once) the tiny model in a format and returns its directory."""
    config = tiny_config()
    tensors = random_tensors(config)
    made = {}

    def write(format, grid):
        if (format, grid) not in made:
            made[format, grid] = write_packed(
                tmp_path_factory.mktemp("packed"), config, tensors, format, grid
            )
        return made[format, grid]

    return write


def dense_weights(path):
    checkpoint = Checkpoint.open(path)
    return {name: dequantize(checkpoint.weight(name)) for name in module_names(checkpoint)}


@pytest.mark.parametrize(
    ("source", "grid", "asked", "variant"),
    [
        (compressed_int8.FORMAT, INT8, {"format": "modelslim"}, "ascendV1"),
        (modelslim.FORMAT, INT8, {"format": "compressed-tensors"}, "int-quantized"),
        (modelopt.FORMAT, Nvfp4Grid(), {"format": "compressed-tensors"}, "nvfp4-pack-quantized"),
        (compressed_int4.FORMAT, INT4_SYMMETRIC, {"format": "awq"}, "gemm"),
        (compressed_mxfp4.FORMAT, Mxfp4Grid(), {"format": "modelopt"}, "NVFP4"),
        (modelopt.FORMAT, Nvfp4Grid(), {"dtype": "fp32"}, "plain"),
        (awq.FORMAT, INT4, {"dtype": "fp32"}, "plain"),
    ],
)
def test_exact_where_both_formats_hold_the_value(packed, tmp_path, source, grid, asked, variant):
    path = packed(source, grid)
    assert convert(path, tmp_path / "out", **asked).exact
    made = Checkpoint.open(tmp_path / "out")
    assert (made.format.name, made.format.variant) == (asked.get("format", "dense"), variant)
    before, after = dense_weights(path), dense_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
    assert {one.dtype for one in made.tensors.values()} == {torch.float32} or "format" in asked
    if asked.get("format") == "modelopt":  # gate and up share a scale
        assert check_checkpoint("vllm", made) == []


def test_activations_stay_as_they_are_or_are_told(packed, tmp_path):
    """int8 weights that read 16 bits do not become int8 weights that round what they read, and the
    other way about it is said."""
    rounded = packed(compressed_int8.FORMAT, INT8)
    plain = convert(rounded, tmp_path / "gptq", format="gptq")
    assert ("activations", "16 bits, 8 in the source") in plain.facts()
    again = convert(tmp_path / "gptq", tmp_path / "compressed", format="compressed-tensors")
    assert Checkpoint.open(tmp_path / "compressed").format.variant == "pack-quantized"
    assert again.activation_bits == (16, 16)
    assert "activations" not in dict(again.facts())


def test_awq_keeps_its_fp16_scales_in_compressed_tensors(packed, tmp_path):
    """Which BF16, compressed-tensors' usual dtype of scales, could not hold; and comes back to the
    same bytes."""
    path = packed(awq.FORMAT, INT4)
    convert(path, tmp_path / "ct", format="compressed-tensors")
    source, made = Checkpoint.open(path), Checkpoint.open(tmp_path / "ct")
    scales = [made.read(f"{name}.weight_scale") for name in source.linears]
    assert {scale.dtype for scale in scales} == {torch.float16}
    assert not all(torch.equal(scale.bfloat16().half(), scale) for scale in scales)
    assert convert(tmp_path / "ct", tmp_path / "back", format="awq").exact
    back = Checkpoint.open(tmp_path / "back")
    assert all(torch.equal(source.read(name), back.read(name)) for name in source.tensors)


def test_a_scale_that_must_be_rounded_is_told(packed, tmp_path):
    """A scale so small that FP16 has few bits for it: AWQ stores FP16, compressed-tensors' BF16 has
    its full precision there."""
    path = shutil.copytree(packed(compressed_int4.FORMAT, INT4), tmp_path / "source")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    tensors[name] = tensors[name] * 2**-14
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    report = convert(path, tmp_path / "out", format="awq")
    assert not report.exact
    assert 0 < report.changes["compressed-tensors to awq: experts"].max_relative_error < 0.1
    assert report.changes["compressed-tensors to awq: attention"].max_relative_error == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["changes"]["compressed-tensors to awq: experts"]["max_relative_error"] > 0
    assert manifest["tensors"].keys() == Checkpoint.open(path).tensors.keys()


def test_fp8_to_bf16(tiny_checkpoint, tmp_path):
    report = convert(tiny_checkpoint, tmp_path / "out", dtype="bf16")
    made = Checkpoint.open(tmp_path / "out")
    assert made.format.name == "dense"
    assert "quantization_config" not in made.config
    assert made.config["torch_dtype"] == "bfloat16"
    config = tiny_config()
    for name, value in fp8_values(random_tensors(config)).items():
        expected = value if name.endswith("e_score_correction_bias") else value.bfloat16()
        assert torch.equal(made.read(name), expected), name
    assert report.changes["fp8-block to bfloat16: experts"].max_relative_error <= 2**-8
    copies = (folder / "tokenizer.json" for folder in (tiny_checkpoint, tmp_path / "out"))
    assert len({path.read_bytes() for path in copies}) == 1


def test_public_autoawq_layout(tmp_path):
    """AutoAWQ quantizes kv_b_proj, lists nothing as plain, works in FP16 and leaves the MTP layer
    out."""
    config = tiny_config(torch_dtype="float16")
    tensors = {
        name: t.half() if t.dtype == torch.bfloat16 else t
        for name, t in random_tensors(config).items()
        if ".layers.3." not in name
    }
    path = write_packed(
        tmp_path / "awq",
        config,
        tensors,
        awq.FORMAT,
        INT4,
        lambda row: row.role in ("linear", "kv_b"),
    )
    with edited(path / "config.json") as said:
        said["quantization_config"]["modules_to_not_convert"] = None
    report = convert(path, tmp_path / "ct", format="compressed-tensors")
    source, made = Checkpoint.open(path), Checkpoint.open(tmp_path / "ct")
    kv_b = "model.layers.0.self_attn.kv_b_proj"
    assert kv_b not in made.linears
    assert made.read(f"{kv_b}.weight").dtype == torch.float16
    assert 0 < report.changes["awq to float16: kv_b"].max_relative_error <= 2**-11
    assert made.linears.keys() == {name for name in source.linears if "kv_b" not in name}


def test_an_unknown_architecture_converts_all_the_same(packed, tmp_path):
    path = shutil.copytree(packed(compressed_int4.FORMAT, INT4), tmp_path / "source")
    with edited(path / "config.json") as config:
        config["model_type"] = "mistral"
    assert convert(path, tmp_path / "out", format="awq").exact


def test_a_stopped_conversion_goes_on_to_the_same_bytes(packed, tmp_path, monkeypatch):
    path = packed(compressed_int8.FORMAT, INT8)
    monkeypatch.setattr(module, "UNIT_BYTES", 100_000)
    convert(path, tmp_path / "whole", format="modelslim")
    seen = []

    def stop(event):
        seen.append(event.unit)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "stopped", format="modelslim", on_event=stop)
    assert not (tmp_path / "stopped").exists()
    read = []
    original = Checkpoint.weight
    monkeypatch.setattr(
        Checkpoint, "weight", lambda self, name: (read.append(name), original(self, name))[1]
    )
    convert(path, tmp_path / "stopped", format="modelslim")
    assert 0 < len(read) < len(Checkpoint.open(path).linears), "what was done is not done again"
    assert files(tmp_path / "whole") == files(tmp_path / "stopped")


@pytest.mark.parametrize(
    ("format", "grid", "options", "told"),
    [
        (awq.FORMAT, INT4, {"format": "modelslim"}, "use --format gptq or compressed-tensors"),
        (awq.FORMAT, INT4, {"format": "awq"}, "already awq gemm; there is nothing to convert"),
        (
            compressed_mxfp4.FORMAT,
            Mxfp4Grid(),
            {"format": "compressed-tensors"},
            "already compressed-tensors mxfp4-pack-quantized",
        ),
        (compressed_mxfp4.FORMAT, Mxfp4Grid(), {"format": "awq"}, "use --format modelopt"),
        (awq.FORMAT, INT4, {"dtype": "int3"}, "'int3' is not known"),
        (awq.FORMAT, INT4, {"format": "awq", "dtype": "bf16"}, "either a format or a dtype"),
        (awq.FORMAT, INT4, {}, "either a format or a dtype"),
        (gptq.FORMATS[2], INT4_SYMMETRIC, {"format": "awq"}, "--dtype bf16 makes it plain"),
    ],
)
def test_what_cannot_be_converted(packed, tmp_path, format, grid, options, told):
    with refused(told):
        convert(packed(format, grid), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_scales_beyond_fp16_are_refused():
    weight = IntWeight(torch.zeros(8, 128, dtype=torch.int8), torch.full((8, 1), 1e6), None, 4)
    with refused("scales that float16 cannot hold"):
        fit_scales("m", weight, awq.FORMAT)
