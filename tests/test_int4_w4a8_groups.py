"""int4-w4a8-groups through the whole line: int4 in groups of 128, activations rounded to int8, a
step a token."""

import json
from pathlib import Path

import pytest
import quantkit_kernels as kernels
import torch
from make_model import random_tensors, tiny_config, write_dense, write_fp8
from nearest import quantize_int
from quantkit_kernels.samples import exact_linear
from rounded_inputs import distances
from top_logprobs import distance, top_logprobs

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.inspect import describe
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.weights import operand
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.grids.schemes import find_scheme
from quantkit.planning.cost_model import predict
from quantkit.planning.hardware import load_hardware
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert

SCHEME = find_scheme("int4-w4a8-groups")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of experts."""
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0)
    return write_fp8(tmp_path_factory.mktemp("source"), config, random_tensors(config))


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("w4a8")
    text = directory / "text.jsonl"
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
    quantize(
        source,
        directory / "out",
        SCHEME,
        "auto",
        Recipe(scheme=SCHEME.name, calibration=str(text), **few),
        device="cpu",
    )
    return directory / "out"


def test_it_is_described_as_engines_read_it(written: Path) -> None:
    """pack-quantized with input_activations: without them an engine would leave inputs in 16
    bits."""
    checkpoint = Checkpoint.open(written)
    block = checkpoint.config["quantization_config"]
    (group,) = block["config_groups"].values()
    assert block["format"] == "pack-quantized"
    assert group["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
        "dynamic": False,
    }
    assert group["input_activations"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    about = describe(checkpoint)
    assert (about.scheme, about.format, about.missing, about.unknown) == (
        SCHEME.name,
        "compressed-tensors",
        [],
        [],
    )
    assert [found.problem for found in check_checkpoint("vllm", checkpoint)], (
        "vLLM has no kernel for such experts on CUDA"
    )


def test_it_computes_rounded_activations(written: Path, source: Path, tmp_path: Path) -> None:
    found = distances(written, source, tmp_path)
    assert 1e-7 < found.rounding < 0.1, "activations are rounded"
    assert 1e-7 < found.source < 0.3
    one, two = top_logprobs(written), top_logprobs(written, tp=2)
    assert 0 < distance(two, one) < 0.3, "each of two ranks rounds its half of an input"


def test_without_what_is_said_of_activations_they_have_16_bits(
    written: Path, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(written)
    config = json.loads(json.dumps(checkpoint.config))
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    other = write_dense(
        tmp_path / "other", config, {name: checkpoint.read(name) for name in checkpoint.tensors}
    )
    assert Checkpoint.open(other).linears["model.layers.0.self_attn.o_proj"].grid == IntGrid(
        4, 128, symmetric=True
    )
    assert distance(top_logprobs(other), top_logprobs(written)) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_of_rounded_inputs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantize_int(
        torch.randn(64, 256, generator=generator),
        IntGrid(4, 128, symmetric=True),
        scale_dtype=torch.float32,
    )
    run = operand(weight, dtype, 8, in_groups=True)
    assert isinstance(run, kernels.Int4Int8)
    assert type(operand(weight, dtype, 16)) is kernels.Int4
    x = (
        torch.randn(5, 256, generator=generator)
        * torch.tensor([1e-3, 1.0, 30.0, 1e3, 0.0])[:, None]
    ).to(dtype)
    exact, plain = exact_linear(x, run), x.double() @ dequantize(weight).double().T
    found = kernels.prepare(run, backend="reference", dtype=dtype)(x).double()
    size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert ((found - exact).abs() / size).max() < {
        torch.float32: 1e-5,
        torch.float16: 2e-3,
        torch.bfloat16: 1e-2,
    }[dtype]
    assert ((plain - exact).abs() / size).max() > 1e-3


def test_weights_that_read_apart_are_not_stacked() -> None:
    weight = IntWeight(torch.zeros(16, 128, dtype=torch.int8), torch.ones(16, 1), None, 4)
    codes, scale, _ = operand(weight, torch.float32, 16)
    with pytest.raises(ValueError, match="inputs are rounded differently"):
        kernels.stack(kernels.Int4(codes, scale, None), kernels.Int4Int8(codes, scale, None))


def test_what_cannot_be_is_refused(written: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="no engine loads int4-w4a8-groups in format awq"):
        plan(source, SCHEME, PlanOptions(format="awq"))
    with pytest.raises(QuantkitError, match="groups"):
        plan(source, SCHEME, PlanOptions(engine="vllm-ascend"))
    with pytest.raises(QuantkitError, match="decoding times of int4-w4a8-groups are not predicted"):
        predict(tiny_config(), SCHEME, load_hardware("910B1"), devices=8, batches=(1,), context=640)
    with pytest.raises(QuantkitError, match="cannot"):
        convert(written, tmp_path / "awq", format="awq")
