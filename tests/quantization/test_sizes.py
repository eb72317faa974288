"""Models whose sizes 128 does not divide: what every linear gets, and that it is read back. All
published shapes with every scheme and engine: `make gallery`."""

import published_shapes
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match
from quantized import quantized
from size_coverage import covered
from small_recipe import SMALL
from tiny_models import CONFIGS
from top_logprobs import distance, top_logprobs

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.progress import Note
from quantkit.engines.check import check_checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.schemes import SCHEMES
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization.convert import convert
from quantkit.quantization.job import open_job
from quantkit.quantization.request import read_request

ODD = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}


def source_of(folder, family="llama", **sizes):
    config = {**CONFIGS[family], **ODD, **sizes}
    return published_shapes.write(folder / "source", config)


def rounded(source, out, scheme="rtn-w4a16", **options):
    given = options.pop("format", "auto")
    recipe = Recipe(scheme=scheme, methods=(), **SMALL)
    return quantized(source, out, recipe, given, **options)


def group_sizes(path):
    """Of the first layer, by the linear's own name."""
    return {
        module.rpartition(".")[2]: None if linear.grid is None else linear.grid.group_size
        for module, linear in Checkpoint.open(path).linears.items()
        if ".layers.0." in module
    }


def test_awq_has_one_group_size_for_all(tmp_path):
    source, lines = source_of(tmp_path), []
    report = rounded(source, tmp_path / "out", on_event=lines.append)
    assert set(group_sizes(report.out).values()) == {64}
    assert Checkpoint.open(report.out).config["quantization_config"]["group_size"] == 64
    assert Checkpoint.open(report.out).scheme is SCHEMES["awq-w4a16"]
    said = next(event.text for event in lines if isinstance(event, Note))
    assert "int4-g64" in said
    assert said == plan(source, "rtn-w4a16").description


def test_compressed_tensors_has_group_sizes_of_linears(tmp_path):
    source = source_of(tmp_path)
    out = rounded(source, tmp_path / "out", format="compressed-tensors").out
    sizes = group_sizes(out)
    assert {sizes[name] for name in ("q_proj", "o_proj", "gate_proj")} == {64}
    assert sizes["down_proj"] == 128
    block = Checkpoint.open(out).config["quantization_config"]
    assert block["format"] == "pack-quantized"
    groups = QuantizationConfig.model_validate(block).config_groups.values()
    for module, linear in Checkpoint.open(out).linears.items():
        sizes = [
            group.weights.group_size
            for group in groups
            if any(is_match(module, torch.nn.Linear(1, 1), target) for target in group.targets)
        ]
        assert sizes == [linear.grid and linear.grid.group_size], "the library reads another size"
    assert check_checkpoint("vllm", Checkpoint.open(out), device="cpu") == []


def test_one_odd_linear_of_many_stays_in_16_bits(tmp_path):
    """A dense layer of 320 inputs before sparse ones: finer groups for all would cost more."""
    sizes = {"intermediate_size": 320, "hidden_size": 1024, "moe_intermediate_size": 1024}
    config = {**CONFIGS["glm4_moe"], **sizes, "n_routed_experts": 64}
    source = published_shapes.write_headers(tmp_path / "source", config)
    request = read_request(SCHEMES["rtn-w4a16"], "auto", None, Recipe(scheme="rtn-w4a16"))
    job = open_job(request, Checkpoint.open(source))
    assert "model.layers.0.mlp.down_proj" not in job.grids
    assert {grid.group_size for grid in job.grids.values()} == {128}
    assert 0.98 < covered(job) < 1


@pytest.mark.parametrize("format", ["awq", "compressed-tensors"])
def test_a_model_of_odd_sizes_computes_its_dequantized_weights(tmp_path, format):
    source = source_of(tmp_path, intermediate_size=320)
    out = rounded(source, tmp_path / "out", format=format).out
    convert(out, tmp_path / "dense", dtype="float32")
    assert distance(top_logprobs(tmp_path / "dense"), top_logprobs(out)) < 1e-4


def test_outputs_that_packing_does_not_divide(tmp_path):
    """Zero points are packed eight to a word along the outputs: such linears are without in
    compressed-tensors, which is written then, and in 16 bits where AWQ is asked for."""
    source = source_of(tmp_path, hidden_size=256, num_attention_heads=4, intermediate_size=324)
    out = rounded(source, tmp_path / "awq", format="awq").out
    assert set(group_sizes(out)) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    said = plan(source, "rtn-w4a16", PlanOptions(format="awq")).description
    assert "--format compressed-tensors takes more of them" in said
    out = rounded(source, tmp_path / "compressed").out
    linears = Checkpoint.open(out).linears
    up, down = (linears[f"model.layers.0.mlp.{name}_proj"] for name in ("up", "down"))
    assert (up.grid.kind, up.grid.symmetric) == ("int4", True)
    assert down.grid.kind == "int8", "324 inputs have no groups"


def test_blocks_that_do_not_fit_are_written_as_the_engine_can_read_them(tmp_path):
    """DeepSeek's form has blocks alone; vLLM reads channels beside them in compressed-tensors."""
    source, scheme = source_of(tmp_path), "fp8-block-w8a8"
    out = rounded(source, tmp_path / "vllm", scheme, engine="vllm").out
    written = Checkpoint.open(out)
    assert written.format.name == "compressed-tensors"
    assert {linear.grid and linear.grid.kind for linear in written.linears.values()} == {"fp8"}
    assert check_checkpoint("vllm", written, device="cuda") == []
    assert "int8-a8w8c16" in plan(source, scheme, PlanOptions(engine="transformers")).description
    even = source_of(
        tmp_path / "even", hidden_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    assert plan(even, scheme, PlanOptions(engine="vllm")).format == "fp8-block"


SMALLEST = {
    "SmolLM2-135M": "awq-w4a16",
    "gpt-oss-20b": "awq-w4a16",
    "GLM-4.5-Air": "fp4-w4a16",
    "Qwen2-57B-A14B": "w8a16",
    "gemma-3-270m": "rtn-w4a16",
    "falcon-7b": "rtn-w4a16",
    "Qwen1.5-MoE-A2.7B": "int4-w4a8",
}
"""A scheme that each is written in; every scheme is planned."""


@pytest.mark.parametrize("name", SMALLEST)
def test_published_sizes_are_never_refused(name, tmp_path):
    source = published_shapes.write(tmp_path / "source", published_shapes.narrow(name))
    experts = any(".experts." in tensor for tensor in Checkpoint.open(source).tensors)
    for scheme in SCHEMES.values():
        if scheme.cache or (scheme.outside and not experts):
            continue
        request = read_request(scheme, "auto", None, Recipe(scheme=scheme.name))
        assert covered(open_job(request, Checkpoint.open(source))) >= 0.98, scheme.name
    out = rounded(source, tmp_path / "out", SMALLEST[name]).out
    before, after = Checkpoint.open(source), Checkpoint.open(out)
    for module, linear in after.linears.items():
        weight = after.weight(module)
        assert dequantize(weight).shape == before.read(f"{module}.weight").shape, linear
