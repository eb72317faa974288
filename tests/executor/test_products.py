"""Sizes that plans are measured for are those of the operators that a model is run with."""

import make_model
import pytest
import quantkit_kernels as kernels
from engines import note
from quantized import quantized
from quantkit_kernels.sizes import ExpertsSize, LinearSize
from quantkit_kernels.weights import kind, shape
from refused import refused
from tiny_models import CONFIGS, random_tensors

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.executor.weights.tp_shares import products


def made(architecture, scheme, folder):
    source = make_model.write_dense(
        folder / "source", CONFIGS[architecture], random_tensors(CONFIGS[architecture])
    )
    quantized(source, folder / "out", Recipe(scheme=scheme, methods=()))
    return folder / "out"


@pytest.mark.parametrize(
    ("architecture", "scheme"), [("qwen3_moe", "rtn-w4a16"), ("llama", "int8-a8w8c16")]
)
def test_products_are_those_of_the_operators(architecture, scheme, tmp_path, monkeypatch):
    path = made(architecture, scheme, tmp_path)
    linears, experts = set(), set()

    def added(builder, index, gate, *_):
        intermediate, hidden = shape(gate)
        experts.add((kind(gate), hidden, intermediate, builder.num_experts))

    note(
        monkeypatch,
        kernels,
        "prepare",
        lambda weight, **_: linears.add(LinearSize(kind(weight), *shape(weight))),
    )
    note(monkeypatch, kernels.ExpertsBuilder, "add", lambda *given, **_: added(*given))
    load_model(path, device="cpu", dtype="float32")
    found = products(Checkpoint.open(path))
    assert {size for size in found.linears if size.kind != "dense"} == {
        size for size in linears if size.kind != "dense"
    }
    assert found.linears
    assert {size[:4] for size in found.experts} == experts
    assert {size.top_k for size in found.experts} <= {2}


def test_ranks_have_their_part(tmp_path):
    """q, k and v are one product, and so are gate and up; what a rank reads of o and down is
    cut."""
    checkpoint = Checkpoint.open(made("qwen3_moe", "rtn-w4a16", tmp_path))
    assert products(checkpoint).linears == (
        LinearSize("int4", 512, 256),
        LinearSize("int4", 256, 256),
    )
    half = products(checkpoint, 2)
    assert half.linears == (LinearSize("int4", 256, 256), LinearSize("int4", 256, 128))
    assert half.experts == (ExpertsSize("int4", 256, 64, 4, 2),)
    with refused("3 ranks cannot share evenly"):
        products(checkpoint, 3)
