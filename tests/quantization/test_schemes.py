"""Schemes through the whole line: what is stored and described, what it computes, what is refused."""

import json
from dataclasses import replace

import pytest
import quantkit_kernels as kernels
import torch
from make_model import NARROW, random_dense, random_fp8, random_tensors, tiny_config, write_dense
from packed_model import write_packed
from quantized import quantized, stop_when
from refused import refused
from rounded_inputs import distances
from small_recipe import SMALL
from top_logprobs import distance, top_logprobs

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats import compressed_fp4
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.inspect import describe
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.executor.weights.weights import operand
from quantkit.grids.base import cut_columns, dequantize
from quantkit.grids.fp8_block import Fp8BlockGrid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import find_scheme
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert
from quantkit.quantization.mixed_precision import Mixture

NAMES = ("int4-w4a8", "int4-w4a8-groups", "nvfp4-w4a4", "w8a16", "fp8-w8a8", "fp8-block-w8a8")
W4A8, GROUPS, W4A4, W8A16, FP8, BLOCKS = map(find_scheme, NAMES)
MXFP4, MXFP8 = map(find_scheme, ("mxfp4-w4a4", "mxfp8-w8a8"))
CHANNEL = replace(W8A16, weight=IntGrid(8, None, symmetric=True))
FORMATS = {W4A8: "modelslim"} | dict.fromkeys((GROUPS, W4A4, MXFP4, MXFP8), "compressed-tensors")
O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A layer of experts, and an MTP layer."""
    path = tmp_path_factory.mktemp("source")
    return random_fp8(path, num_hidden_layers=1, first_k_dense_replace=0)


@pytest.fixture(scope="module")
def recipe(text):
    return lambda scheme: Recipe(scheme=scheme.name, calibration=str(text), **SMALL)


@pytest.fixture(scope="module")
def written(source, recipe, tmp_path_factory):
    """The source in a scheme and format, made once."""
    made = {}

    def write(scheme, form="auto"):
        key = (scheme.name, scheme.weight, form)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("made") / "out"
            quantize(source, made[key], scheme, form, recipe(scheme), device="cpu")
        return made[key]

    return write


@pytest.mark.parametrize("scheme", FORMATS, ids=lambda scheme: scheme.name)
def test_it_is_described_whole_and_rounds_activations(scheme, written, source, tmp_path):
    """Two ranks round their halves of an input apart: other answers, about as near."""
    about = describe(Checkpoint.open(written(scheme)))
    assert (about.scheme, about.format) == (scheme.name, FORMATS[scheme])
    assert (about.missing, about.unknown) == ([], [])
    found = distances(written(scheme), source, tmp_path)
    assert 1e-7 < found.rounding < 0.3, "activations are rounded"
    assert 1e-7 < found.source < 0.3
    if scheme == GROUPS:
        one, two = (top_logprobs(written(scheme), tp=ranks) for ranks in (1, 2))
        assert 0 < distance(two, one) < 0.3


def test_experts_are_int4_and_the_rest_is_int8(written):
    """MTP layers in int8 whole, as ModelSlim's recipe for DeepSeek has them; the description names
    the type of every tensor."""
    checkpoint = Checkpoint.open(written(W4A8))
    said = json.loads((checkpoint.path / "quant_model_description.json").read_text())
    assert (said["model_quant_type"], said["group_size"]) == ("W4A8_DYNAMIC", 0)
    for module in checkpoint.linears:
        weight = checkpoint.weight(module)
        four = ".experts." in module and ".layers.1." not in module
        assert weight.bits == (4 if four else 8), module
        assert weight.scale.shape[1] == 1
        assert said[f"{module}.weight"] == ("W4A8_DYNAMIC" if four else "W8A8_DYNAMIC")
        assert (f"{module}.scale_bias" in checkpoint.tensors) == four
    plain = ("self_attn.kv_b_proj", "mlp.gate")
    assert {said[f"model.layers.0.{module}.weight"] for module in plain} == {"FLOAT"}
    assert {name for name, kind in said.items() if "." in name} == set(checkpoint.tensors)
    assert check_checkpoint("vllm-ascend", checkpoint) == []
    assert [found.severity for found in check_checkpoint("sglang", checkpoint)] == ["warning"], (
        "its draft model is not quantized"
    )


def test_groups_with_activations_are_described_as_engines_read_them(written, tmp_path):
    """pack-quantized with input_activations: without them inputs have 16 bits."""
    checkpoint = Checkpoint.open(written(GROUPS))
    block = checkpoint.config["quantization_config"]
    (group,) = block["config_groups"].values()
    assert block["format"] == "pack-quantized"
    shared = {"type": "int", "symmetric": True}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 128, "dynamic": False}
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    assert (group["weights"], group["input_activations"]) == (shared | weights, shared | inputs)
    assert check_checkpoint("vllm", checkpoint), "vLLM has no kernel for such experts on CUDA"
    group["input_activations"] = None
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    other = write_dense(tmp_path / "other", checkpoint.config, tensors)
    assert Checkpoint.open(other).linears[O_PROJ].grid == IntGrid(4, 128, symmetric=True)
    assert distance(top_logprobs(other), top_logprobs(written(GROUPS))) > 0


def test_every_linear_brings_a_scale_for_its_input(written):
    """Linears that engines fuse share it, as all experts of a layer do where they read one
    input."""
    checkpoint = Checkpoint.open(written(W4A4))
    block = checkpoint.config["quantization_config"]
    inputs = block["config_groups"]["group_0"]["input_activations"]
    assert block["format"] == "nvfp4-pack-quantized"
    assert (inputs["strategy"], inputs["dynamic"]) == ("tensor_group", "local")
    divisors = {
        module.removeprefix("model.layers.0."): float(checkpoint.weight(module).input_divisor)
        for module in checkpoint.linears
    }
    for one, other in (
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ):
        assert divisors[one] == divisors[other]
    gate, up, down = (
        {divisors[f"mlp.experts.{expert}.{side}_proj"] for expert in range(8)}
        for side in ("gate", "up", "down")
    )
    assert gate == up
    assert len(gate) == 1 < len(down)
    assert check_checkpoint("vllm", checkpoint) == []


def test_ranks_round_their_inputs_as_one_does(written):
    """The same groups under the same scale: halves of a linear add up to the whole."""
    weight = Checkpoint.open(written(W4A4)).weight(O_PROJ)
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(3)) * 4
    half = weight.shape[1] // 2
    parts = (cut_columns(weight, "o_proj", start, start + half) for start in (0, half))
    whole, *halves = (
        kernels.prepare(operand(part, torch.float32), backend="reference", dtype=torch.float32)
        for part in (weight, *parts)
    )
    torch.testing.assert_close(
        sum(run(part) for run, part in zip(halves, x.chunk(2, dim=1))), whole(x)
    )


def test_it_converts_to_modelopt_and_back(written, tmp_path):
    """The MTP layer is plain there."""
    paths = (written(W4A4), tmp_path / "modelopt", tmp_path / "again")
    convert(paths[0], paths[1], format="modelopt")
    convert(paths[1], paths[2], format="compressed-tensors")
    first, between, again = map(Checkpoint.open, paths)
    assert between.scheme == W4A4
    assert again.linears.keys() == between.linears.keys() < first.linears.keys()
    for module in again.linears:
        for name in first.parts(module):
            stored, returned = (one.read(name).view(torch.uint8) for one in (first, again))
            assert torch.equal(stored, returned), name
        divided = first.read(f"{module}.input_global_scale")
        multiplied = between.read(f"{module}.input_scale")
        assert torch.equal(divided.reciprocal().reshape(()), multiplied)
    assert check_checkpoint("vllm", between) == check_checkpoint("sglang", between) == []


def test_fp4_next_to_fp8_that_is_kept(source, recipe, tmp_path):
    """In a mixture, whose parts are read, solved and told apart by their own tensors; a run that
    was stopped among the experts ends with the bytes of another."""

    def run(out, **listen):
        mixture = Mixture(keep=("attention",))
        return quantized(source, tmp_path / out, recipe(W4A4), mixture=mixture, **listen).out

    with pytest.raises(KeyboardInterrupt):
        run("out", on_event=stop_when(lambda event: "layers.0.experts.4" in str(event)))
    checkpoint = Checkpoint.open(run("out"))
    for path in run("undisturbed").glob("*.safetensors"):
        assert path.read_bytes() == (checkpoint.path / path.name).read_bytes(), path.name
    assert {one.grid for one in checkpoint.linears.values()} == {W4A4.weight, Fp8BlockGrid()}
    for module, linear in checkpoint.linears.items():
        four = "self_attn" not in module
        assert linear.format.member(module).activation_bits == (4 if four else 16)
        assert (f"{module}.input_global_scale" in checkpoint.tensors) == four
    assert diagnose(str(checkpoint.path)).findings.found == []


def test_linears_that_read_under_different_scales_are_not_fused(tmp_path):
    """As another writer may have them: each is computed under its own."""
    config, grid = tiny_config(), Nvfp4Grid(activation_bits=4)
    path = write_packed(
        tmp_path / "model", config, random_tensors(config), compressed_fp4.W4A4, grid
    )
    checkpoint = Checkpoint.open(path)
    assert checkpoint.scheme == W4A4
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors["model.layers.0.mlp.gate_proj.input_global_scale"] /= 10
    other = write_dense(tmp_path / "other", checkpoint.config, tensors)
    assert distance(top_logprobs(other), top_logprobs(path)) > 0
    assert diagnose(str(path), engine="vllm").to_json()["findings"] == []


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("scheme", [W8A16, CHANNEL], ids=["groups", "channel"])
def test_int8_with_16_bit_activations(written, tmp_path, scheme, form):
    """It runs as its dequantized weights, in about the bytes that are stored."""
    out = written(scheme, form)
    checkpoint = Checkpoint.open(out)
    assert (checkpoint.format.name, checkpoint.grid) == (form, scheme.weight)
    assert checkpoint.activation_bits(O_PROJ) == 16
    convert(out, tmp_path / "plain", dtype="fp32")
    assert distance(top_logprobs(tmp_path / "plain"), top_logprobs(out)) < 1e-4
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert load_model(out, device="cpu").nbytes <= 1.1 * stored


@pytest.mark.parametrize(
    ("scheme", "form"),
    [(FP8, "compressed-tensors"), (BLOCKS, "fp8-block"), (MXFP8, "fp8-block")],
)
def test_fp8_is_written_loaded_and_kept(scheme, form, recipe, tmp_path):
    """Of latent attention and experts in 16 bits, whose kv_a_proj blocks are partial. What a source
    has on the grid is copied, and only the rest is rounded."""
    sizes = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 0}
    dense = random_dense(tmp_path / "dense", **NARROW, **sizes)
    out, whole, attention = tmp_path / "out", tmp_path / "whole", Mixture(keep=("attention",))
    quantized(dense, out, recipe(scheme), form, mixture=attention)
    quantized(out, whole, recipe(scheme), form)
    part, checkpoint = Checkpoint.open(out), Checkpoint.open(whole)
    assert not any("self_attn" in module for module in part.linears)
    about = describe(checkpoint)
    assert (about.scheme, about.format) == (scheme.name, form)
    assert {linear.grid for linear in checkpoint.linears.values()} == {scheme.weight}
    for name in {name for linear in part.linears.values() for name in linear.tensors}:
        assert torch.equal(checkpoint.read(name).float(), part.read(name).float()), name
    assert O_PROJ in checkpoint.linears
    assert "model.layers.0.self_attn.kv_b_proj" not in checkpoint.linears
    assert check_checkpoint("sglang" if scheme is MXFP8 else "vllm", checkpoint) == []
    assert diagnose(str(whole), source=str(dense)).findings.found == []
    assert 0 < distance(top_logprobs(whole), top_logprobs(dense)) < 0.3
    with refused("already"):
        quantized(whole, tmp_path / "again", recipe(scheme), form)
    for other in {BLOCKS: scheme.formats[:1], MXFP8: scheme.formats[:2]}.get(scheme, ()):
        assert convert(whole, tmp_path / other, format=other).exact
        copy = Checkpoint.open(tmp_path / other)
        assert copy.scheme is scheme
        assert copy.activation_bits(O_PROJ) == checkpoint.activation_bits(O_PROJ)
        assert torch.equal(dequantize(copy.weight(O_PROJ)), dequantize(checkpoint.weight(O_PROJ)))


def test_what_is_not_computed_is_refused(source, written, tmp_path):
    changes = {"first_k_dense_replace": 3, "num_nextn_predict_layers": 0}
    dense = random_fp8(tmp_path / "dense", **changes)
    out = tmp_path / "out"

    def made(scheme, model):
        nearest = Recipe(scheme=scheme.name, methods=())
        return quantize(model, out, scheme, "auto", nearest, device="cpu")

    for attempt, said in (
        (lambda: made(W4A4, source), "nvfp4-w4a4 has input scales, which calibration determines"),
        (
            lambda: plan(source, W4A4, PlanOptions(mixture=Mixture(bits=4.6))),
            "quantizing activations saves none",
        ),
        (
            lambda: load_model(written(W4A4), device="cpu", backend="torch_npu"),
            r"_proj \(nvfp4-w4a4\) rounds what it reads, .* not computed on backend torch_npu",
        ),
        (lambda: made(W4A8, dense), "int4-w4a8 is for routed experts, and the model has none"),
        (
            lambda: convert(written(W4A8), tmp_path / "ct", format="compressed-tensors"),
            "weights on 2 grids",
        ),
        (lambda: plan(source, GROUPS, PlanOptions(engine="vllm-ascend")), "groups"),
    ):
        with refused(said):
            attempt()
    assert not out.exists()
