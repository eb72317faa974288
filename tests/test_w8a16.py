"""w8a16 through the whole line: int8 weights in groups or per channel, 16-bit activations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_model import random_tensors, tiny_config, write_fp8
from quantkit_kernels import W8A16
from top_logprobs import distance, top_logprobs

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.executor.weights.weights import operand
from quantkit.grids.base import cut_columns, dequantize
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.grids.schemes import Scheme, find_scheme
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert

SCHEME = find_scheme("w8a16")
CHANNEL = replace(SCHEME, weight=IntGrid(8, None, symmetric=True))
FEW = {
    "samples": 8,
    "held_out": 2,
    "seq_len": 48,
    "search_rows": 16,
    "scale_points": 3,
    "fit_points": 1,
    "sweeps": 1,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of experts."""
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0)
    return write_fp8(tmp_path_factory.mktemp("source"), config, random_tensors(config))


def written(source: Path, out: Path, scheme: Scheme, format: str) -> Path:
    text = out.parent / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": " ".join(str((i * j) % 97) for j in range(60))}) + "\n"
            for i in range(12)
        )
    )
    recipe = Recipe.model_validate({"scheme": scheme.name, "calibration": str(text), **FEW})
    quantize(source, out, scheme, format, recipe, device="cpu")
    return out


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("scheme", [SCHEME, CHANNEL], ids=["groups", "channel"])
def test_a_model_runs_as_its_dequantized_weights(
    source: Path, tmp_path: Path, scheme: Scheme, format: str
) -> None:
    out = written(source, tmp_path / "out", scheme, format)
    checkpoint = Checkpoint.open(out)
    assert (checkpoint.format.name, checkpoint.grid) == (format, scheme.weight)
    assert checkpoint.activation_bits(next(iter(checkpoint.linears))) == 16
    convert(out, tmp_path / "plain", dtype="fp32")
    assert distance(top_logprobs(tmp_path / "plain"), top_logprobs(out)) < 1e-4
    held = load_model(out, device="cpu").nbytes
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert held <= 1.1 * stored


def test_formats_convert_into_each_other(source: Path, tmp_path: Path) -> None:
    out = written(source, tmp_path / "out", SCHEME, "compressed-tensors")
    convert(out, tmp_path / "gptq", format="gptq")
    module = "model.layers.0.self_attn.o_proj"
    before, after = (Checkpoint.open(path).weight(module) for path in (out, tmp_path / "gptq"))
    torch.testing.assert_close(dequantize(after), dequantize(before), rtol=1e-3, atol=0)


def test_columns_are_cut_inside_groups() -> None:
    codes = torch.randint(-127, 128, (16, 256), dtype=torch.int8)
    weight = IntWeight(codes, torch.rand(16, 2) + 0.5, None, 8)
    for start, stop in ((0, 64), (128, 192), (192, 256)):
        part = cut_columns(weight, "x", start, stop)
        assert torch.equal(dequantize(part), dequantize(weight)[:, start:stop])
        assert isinstance(operand(part, torch.float32), W8A16)
