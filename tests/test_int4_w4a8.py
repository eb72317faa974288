"""int4-w4a8 through the whole line: what Ascend's ModelSlim publishes as W4A8, int4 in routed
experts and int8 elsewhere."""

import json
from pathlib import Path

import pytest
import quantkit_kernels as kernels
import torch
from make_model import random_tensors, tiny_config, write_fp8
from nearest import quantize_int
from rounded_inputs import distances
from top_logprobs import distance, top_logprobs

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.inspect import describe
from quantkit.engines.check import check_checkpoint
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import PerplexityOptions
from quantkit.executor.weights.weights import operand
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.grids.schemes import find_scheme
from quantkit.planning.cost_model import predict
from quantkit.planning.hardware import load_hardware
from quantkit.planning.plan import plan
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert

SCHEME = find_scheme("int4-w4a8")


@pytest.fixture(scope="module")
def written(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("w4a8")
    text = directory / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": " ".join(str((i * j) % 97) for j in range(60))}) + "\n"
            for i in range(16)
        )
    )
    recipe = Recipe(
        scheme=SCHEME.name,
        calibration=str(text),
        samples=10,
        held_out=2,
        seq_len=48,
        search_rows=32,
        scale_points=5,
        sweeps=2,
    )
    quantize(
        tiny_checkpoint,
        directory / "out",
        SCHEME,
        "auto",
        recipe,
        engine="vllm-ascend",
        device="cpu",
    )
    return directory / "out"


def test_experts_are_int4_and_the_rest_is_int8(written: Path) -> None:
    """MTP layers in int8 whole, as ModelSlim's recipe for DeepSeek has them; the description names
    the type of every tensor."""
    checkpoint = Checkpoint.open(written)
    said = json.loads((written / "quant_model_description.json").read_text())
    assert (said["model_quant_type"], said["group_size"]) == ("W4A8_DYNAMIC", 0)
    for module in checkpoint.linears:
        weight = checkpoint.weight(module)
        assert isinstance(weight, IntWeight)
        four = ".experts." in module and not module.startswith("model.layers.3.")
        assert weight.bits == (4 if four else 8), module
        assert weight.scale.shape[1] == 1
        assert said[f"{module}.weight"] == ("W4A8_DYNAMIC" if four else "W8A8_DYNAMIC")
        assert (f"{module}.scale_bias" in checkpoint.tensors) == four
    assert (
        said["model.layers.1.self_attn.kv_b_proj.weight"]
        == said["model.layers.1.mlp.gate.weight"]
        == "FLOAT"
    )
    assert {name for name, kind in said.items() if "." in name} == set(checkpoint.tensors)
    about = describe(checkpoint)
    assert (about.scheme, about.format, about.missing, about.unknown) == (
        "int4-w4a8",
        "modelslim",
        [],
        [],
    )
    assert check_checkpoint("vllm-ascend", checkpoint) == []
    assert [found.severity for found in check_checkpoint("sglang", checkpoint)] == ["warning"], (
        "its draft model is not quantized"
    )


def test_it_runs_with_int8_activations_and_stays_near_its_source(
    written: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    found = distances(written, tiny_checkpoint, tmp_path)
    assert 1e-7 < found.rounding < 0.1, "activations are rounded"
    assert 1e-7 < found.source < 0.1
    # Two ranks round their halves of an input apart: other answers, about as near those of
    # unrounded activations (0.06 to 0.14 of a nat).
    one, two, unrounded = (
        top_logprobs(written),
        top_logprobs(written, tp=2),
        top_logprobs(tmp_path / "plain"),
    )
    assert distance(two, one) > 0
    assert max(distance(one, unrounded), distance(two, unrounded)) < 0.3


def test_a_weight_runs_as_its_format_says() -> None:
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    weight = quantize_int(w, IntGrid(4, None, symmetric=True), scale_dtype=torch.float32)
    with_int8, with_16_bits = operand(weight, torch.float32, 8), operand(weight, torch.float32, 16)
    assert isinstance(with_int8, kernels.Int8)
    assert isinstance(with_16_bits, kernels.Int4)
    for run in (with_int8, with_16_bits):
        assert torch.equal(kernels.dequantize(run), dequantize(weight))


def test_compensation_beats_rounding_in_int4(
    written: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The experts' own error: the solver of int4 rounded them, not that of int8."""
    quantize(
        tiny_checkpoint,
        tmp_path / "nearest",
        SCHEME,
        "auto",
        Recipe(scheme=SCHEME.name, methods=(), fit_points=1),
        device="cpu",
    )
    (tmp_path / "text.jsonl").write_text(
        json.dumps({"text": " ".join(str((5 * j) % 97) for j in range(60))}) + "\n"
    )
    found = [
        measure(
            str(path), tmp_path / "text.jsonl", PerplexityOptions(baseline=str(tiny_checkpoint))
        ).kl
        for path in (written, tmp_path / "nearest")
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] < 0.8 * found[1]


def test_what_has_no_int4_experts_is_refused(
    tiny_checkpoint: Path, written: Path, tmp_path: Path
) -> None:
    config = tiny_config(first_k_dense_replace=3, num_nextn_predict_layers=0)
    dense = write_fp8(tmp_path / "dense", config, random_tensors(config))
    for refused in (
        lambda: quantize(
            dense,
            tmp_path / "out",
            SCHEME,
            "auto",
            Recipe(scheme=SCHEME.name, methods=()),
            device="cpu",
        ),
        lambda: plan(dense, SCHEME),
    ):
        with pytest.raises(
            QuantkitError, match="int4-w4a8 is for routed experts, and the model has none"
        ):
            refused()
    with pytest.raises(QuantkitError, match="weights on 2 grids"):
        convert(written, tmp_path / "ct", format="compressed-tensors")
    with pytest.raises(QuantkitError, match="decoding times of int4-w4a8 are not predicted"):
        predict(config, SCHEME, load_hardware("910B1"), devices=8, batches=(1,), context=640)
