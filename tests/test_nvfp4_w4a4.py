"""nvfp4-w4a4 through the whole line: NVFP4 weights, and activations rounded to NVFP4 under
calibrated scales."""

import json
from pathlib import Path

import pytest
import quantkit_kernels as kernels
import torch
from make_model import random_tensors, tiny_config, write_dense, write_fp8
from packed_model import write_packed
from rounded_inputs import distances
from top_logprobs import distance, top_logprobs

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats import compressed_fp4
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.inspect import describe
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.executor.weights.weights import operand
from quantkit.grids.base import cut_columns, dequantize
from quantkit.grids.fp8_block import Fp8BlockGrid
from quantkit.grids.nvfp4 import Nvfp4Grid, Nvfp4Weight
from quantkit.grids.schemes import find_scheme
from quantkit.planning.cost_model import predict
from quantkit.planning.hardware import load_hardware
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert
from quantkit.quantization.mixed_precision import Mixture

SCHEME = find_scheme("nvfp4-w4a4")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    text = tmp_path_factory.mktemp("text") / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": " ".join(str((i * j) % 97) for j in range(60))}) + "\n"
            for i in range(12)
        )
    )
    few = {
        "samples": 8,
        "held_out": 2,
        "seq_len": 48,
        "search_rows": 16,
        "scale_points": 3,
        "fit_points": 1,
        "sweeps": 2,
    }
    return Recipe(scheme=SCHEME.name, calibration=str(text), **few)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of experts, and an MTP layer."""
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0)
    return write_fp8(tmp_path_factory.mktemp("source"), config, random_tensors(config))


@pytest.fixture(scope="module")
def written(source: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("w4a4") / "out"
    quantize(source, out, SCHEME, "auto", recipe, device="cpu")
    return out


def test_every_linear_brings_a_scale_for_its_input(written: Path) -> None:
    """Linears that engines fuse share it, as all experts of a layer do where they read one
    input."""
    checkpoint = Checkpoint.open(written)
    block = checkpoint.config["quantization_config"]
    inputs = block["config_groups"]["group_0"]["input_activations"]
    assert (block["format"], inputs["strategy"], inputs["dynamic"]) == (
        "nvfp4-pack-quantized",
        "tensor_group",
        "local",
    )
    divisors = {}
    for module in checkpoint.linears:
        weight = checkpoint.weight(module)
        assert isinstance(weight, Nvfp4Weight)
        assert weight.input_divisor is not None
        assert checkpoint.read(f"{module}.input_global_scale").shape == (1,)
        divisors[module] = float(weight.input_divisor)
    for sides in (
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ):
        assert len({divisors[f"model.layers.0.{side}"] for side in sides}) == 1
    experts = {
        side: {divisors[f"model.layers.0.mlp.experts.{e}.{side}_proj"] for e in range(8)}
        for side in ("gate", "up", "down")
    }
    assert experts["gate"] == experts["up"]
    assert len(experts["gate"]) == 1
    assert len(experts["down"]) > 1
    about = describe(checkpoint)
    assert (about.scheme, about.format, about.missing, about.unknown) == (
        SCHEME.name,
        "compressed-tensors",
        [],
        [],
    )
    assert check_checkpoint("vllm", checkpoint) == []


def test_it_computes_rounded_activations(written: Path, source: Path, tmp_path: Path) -> None:
    found = distances(written, source, tmp_path)
    assert 1e-6 < found.rounding < 0.3, "activations are rounded"
    assert 1e-6 < found.source < 0.3


def test_ranks_round_their_inputs_as_one_does(written: Path) -> None:
    """The same groups under the same scale: halves of a linear add up to the whole."""
    weight = Checkpoint.open(written).weight("model.layers.0.self_attn.o_proj")
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(3)) * 4
    whole, *halves = (
        kernels.prepare(operand(part, torch.float32), backend="reference", dtype=torch.float32)
        for part in (
            weight,
            *(
                cut_columns(weight, "o_proj", start, start + weight.shape[1] // 2)
                for start in (0, weight.shape[1] // 2)
            ),
        )
    )
    torch.testing.assert_close(
        sum(half(part) for half, part in zip(halves, x.chunk(2, dim=1))), whole(x)
    )


def test_it_converts_to_modelopt_and_back(written: Path, tmp_path: Path) -> None:
    """Another writer's divisor may come back one unit in the last place off; ours is chosen not to.
    The MTP layer is plain there."""
    convert(written, tmp_path / "modelopt", format="modelopt")
    convert(tmp_path / "modelopt", tmp_path / "again", format="compressed-tensors")
    first, between, again = (
        Checkpoint.open(path) for path in (written, tmp_path / "modelopt", tmp_path / "again")
    )
    assert between.scheme == SCHEME
    assert again.linears.keys() == between.linears.keys() < first.linears.keys()
    for module in again.linears:
        for name in first.parts(module):
            assert torch.equal(
                first.read(name).view(torch.uint8), again.read(name).view(torch.uint8)
            ), name
        divided, multiplied = (
            first.read(f"{module}.input_global_scale"),
            between.read(f"{module}.input_scale"),
        )
        assert torch.equal(divided.reciprocal().reshape(()), multiplied)
        assert torch.equal(dequantize(between.weight(module)), dequantize(first.weight(module)))
    assert check_checkpoint("vllm", between) == []
    assert check_checkpoint("sglang", between) == []


def test_a_stopped_run_ends_with_the_same_bytes(
    source: Path, written: Path, recipe: Recipe, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(event: object) -> None:
        if "layers.0.experts.4" in str(event):
            raise Stop

    with pytest.raises(Stop):
        quantize(source, tmp_path / "out", SCHEME, "auto", recipe, device="cpu", on_event=stop)
    assert not (tmp_path / "out").exists()
    quantize(source, tmp_path / "out", SCHEME, "auto", recipe, device="cpu")
    for path in written.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_beside_fp8_that_is_kept(source: Path, recipe: Recipe, tmp_path: Path) -> None:
    """In a mixture, whose parts are read, solved and told apart by their own tensors."""
    quantize(
        source,
        tmp_path / "out",
        SCHEME,
        "auto",
        recipe,
        mixture=Mixture(keep=("attention",)),
        device="cpu",
    )
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert {linear.grid for linear in checkpoint.linears.values()} == {
        SCHEME.weight,
        Fp8BlockGrid(),
    }
    for module, linear in checkpoint.linears.items():
        assert linear.format.member(module).activation_bits == (16 if "self_attn" in module else 4)
        assert (f"{module}.input_global_scale" in checkpoint.tensors) == ("self_attn" not in module)
    assert diagnose(str(tmp_path / "out")).to_json()["findings"] == []


def test_what_is_not_computed_is_refused(
    source: Path, written: Path, recipe: Recipe, tmp_path: Path
) -> None:
    for refused in (
        lambda: quantize(
            source, tmp_path / "out", SCHEME, "auto", recipe.with_given(methods=()), device="cpu"
        ),
        lambda: plan(source, SCHEME, PlanOptions(recipe=recipe.with_given(methods=()))),
    ):
        with pytest.raises(
            QuantkitError,
            match="nvfp4-w4a4 has input scales, which calibration determines",
        ):
            refused()
    with pytest.raises(QuantkitError, match="quantizing activations saves none"):
        plan(source, SCHEME, PlanOptions(mixture=Mixture(bits=4.6)))
    with pytest.raises(QuantkitError, match="decoding times of nvfp4-w4a4 are not predicted"):
        predict(tiny_config(), SCHEME, load_hardware("910B1"), devices=8, batches=(1,), context=640)
    with pytest.raises(
        QuantkitError,
        match=r"_proj rounds what it reads to NVFP4 \(W4A4\), which is not computed on backend "
        r"torch_npu",
    ):
        load_model(written, device="cpu", backend="torch_npu")


def test_linears_that_read_under_different_scales_are_not_fused(tmp_path: Path) -> None:
    """As another writer may have them: each is computed under its own."""
    config = tiny_config()
    path = write_packed(
        tmp_path / "model",
        config,
        random_tensors(config),
        compressed_fp4.W4A4,
        Nvfp4Grid(activation_bits=4),
    )
    checkpoint = Checkpoint.open(path)
    assert checkpoint.scheme == SCHEME
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors["model.layers.0.mlp.gate_proj.input_global_scale"] /= 10
    other = write_dense(tmp_path / "other", checkpoint.config, tensors)
    same, apart = top_logprobs(path), top_logprobs(other)
    assert distance(apart, same) > 0
    assert diagnose(str(path), engine="vllm").to_json()["findings"] == []
