"""The proof that the table owns structure: an architecture with other names is planned, quantized,
inspected and placed."""

import json

import make_model
import other_names
import pytest
import quantize_job
import torch
from letters import write_letters
from quantized import quantized
from torch.nn import functional as F

from quantkit import Engine, SamplingParams
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats import modelslim
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.inspect import describe
from quantkit.engines.memory import ParallelSizes, check_split, find_split_problem, fit
from quantkit.engines.profiles import part_of
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntWeight
from quantkit.grids.schemes import find_scheme
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import read_model
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import quantize


@pytest.fixture
def model(monkeypatch, tmp_path):
    other_names.register(monkeypatch)
    config = other_names.tiny_config()
    return make_model.write_dense(tmp_path / "model", config, other_names.random_tensors(config))


def test_it_is_calibrated(model, tmp_path):
    text = write_letters(tmp_path / "calibration.txt")
    settings = Recipe(scheme="awq-w4a16", calibration=str(text), **quantize_job.SMALL)
    report = as_planned(model, tmp_path / "out", "compressed-tensors", settings)
    found = report.findings
    assert {layer: len(counts) for layer, counts in found.expert_tokens.items()} == {"1": 4, "2": 4}
    blocks = {"blocks.0.att.qkv", "blocks.0.ff.gate_up", "blocks.0.ff.up_down"}
    assert found.scales.keys() == blocks | {
        f"blocks.{layer}.{group}"
        for layer in (1, 2)
        for group in ("att.qkv", "moe.gate_up", "moe.common.up_down")
    }
    by_layer = json.loads((report.out / "report.json").read_text())["error_by_layer"]
    assert by_layer.keys() == {
        f"{kind}w{side}" for kind in ("expert ", "shared ", "") for side in (1, 2, 3)
    } | {"wq", "wk", "wv", "wo"}
    assert by_layer["w1"].keys() == {"0"}
    assert by_layer["expert w1"].keys() == {"1", "2"}


def as_planned(model, out, format, settings):
    """The model quantized: as large as plan() says, every linear of the table packed, nothing
    missing or left over."""
    scheme = find_scheme(settings.scheme)
    told = plan(
        model, scheme, PlanOptions(format=format, recipe=settings, devices="2x1GiB", context=256)
    )
    report = quantize(model, out, scheme, format, settings, device="cpu")
    found = Checkpoint.open(report.out)
    linears = {row.module for row in read_model(found).rows if row.role == "linear"}
    assert (
        told.output_bytes
        == report.output_bytes
        == sum(tensor.nbytes for tensor in found.tensors.values())
    )
    assert told.devices.cache_bytes_per_token == 2 * 3 * 2 * 32, (
        "bytes, layers, a key and a value, one of two heads"
    )
    assert set(found.linears) == linears == set(report.findings.errors)
    about = describe(found)
    assert (about.missing, about.misshapen, about.unknown) == ([], [], [])
    assert set(about.bytes_by_part) == {
        "attention",
        "mlp",
        "routed experts",
        "norms",
        "embeddings and head",
    }
    return report


def test_engines_parts_and_memory_are_asked_of_its_table(model):
    checkpoint = Checkpoint.open(model)
    rows = read_model(checkpoint).rows
    assert {
        row.module.rpartition(".")[0].split(".", 2)[2]: part_of(row)
        for row in rows
        if row.layer is not None and part_of(row)
    } == {
        "att": "attention",
        "ff": "mlp",
        "moe.common": "shared_experts",
        **{f"moe.experts.{expert}": "experts" for expert in range(4)},
    }
    one, two, spread = (
        fit(checkpoint, sizes, 64, 1, 1, 0)
        for sizes in (ParallelSizes(1), ParallelSizes(2), ParallelSizes(2, expert=True))
    )
    assert one.weight_bytes == sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert two.weight_bytes == spread.weight_bytes < one.weight_bytes
    assert check_split(checkpoint, read_model(checkpoint), ParallelSizes(2)) == []
    assert (
        "4 attention heads, which 3 ranks cannot share"
        in check_split(checkpoint, read_model(checkpoint), ParallelSizes(3))[0].problem
    )
    undivided = find_split_problem(rows, lambda module: None, ParallelSizes(3))
    assert "blocks.0.att.wq has 128 outputs" in undivided.problem


@torch.inference_mode()
def test_the_executor_runs_it(model, tmp_path):
    """Rounded: every greedy token is the best of the full forward, and experts compute w2(SiLU(w1
    x) * w3 x)."""
    out = quantized(model, tmp_path / "out", "rtn-w4a16", "awq").out
    engine = Engine.load(out, device="cpu", dtype="float32", max_batch=2, max_model_len=128)
    prompt = list(range(20, 40))
    (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
    stack, ids = engine.loaded.model, torch.tensor(prompt + done.token_ids)
    logits = stack.logits(stack(ids, CausalContext([len(ids)])))[len(prompt) - 1 : -1]
    assert (logits.amax(-1) - logits.gather(1, ids[len(prompt) :, None])[:, 0]).max() < 0.03
    found, x = Checkpoint.open(out), torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    w1, w2, w3 = (
        dequantize(found.weight(f"blocks.1.moe.experts.2.w{side}"), torch.float32)
        for side in (1, 2, 3)
    )
    mlp = stack.layers[1].mlp
    chosen = mlp.experts(x, torch.tensor([[2]] * 3), torch.ones(3, 1))
    torch.testing.assert_close(
        chosen, F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2), rtol=1e-4, atol=1e-4
    )


def test_int4_of_ascend_cuts_w2_along_its_inputs(model, tmp_path):
    """vllm-ascend's scale_bias has 16 slices for linears cut along their inputs, which it tells by
    their names: w2 is such as down_proj is, and of other names none is written."""
    text = write_letters(tmp_path / "calibration.txt")
    settings = Recipe(scheme="int4-w4a8", calibration=str(text), **quantize_job.SMALL)
    report = quantized(model, tmp_path / "out", settings)
    found, expert = Checkpoint.open(report.out), "blocks.1.moe.experts.2"
    for side, slices in (("w1", 1), ("w2", 16), ("w3", 1)):
        weight = IntWeight.of(found.weight(f"{expert}.{side}"))
        assert weight.bits == 4
        sums = weight.codes.float().unflatten(1, (slices, -1)).sum(-1)
        stored = found.read(f"{expert}.{side}.scale_bias")
        torch.testing.assert_close(stored, 8 * sums * weight.scale)
    assert modelslim.FORMAT.split_fault("layer.proj", weight.grid, row_parallel=True)
