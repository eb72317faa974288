"""What an operator is given beside its operands, each value unlike the operator's default: gains of
another size, layouts, bytes."""

import importlib

import pytest
import torch
from ascend.npu_double import NZ, layout_of
from ascend.test_latent_attention import layer_of
from ascend.test_torch_npu import EPS, random
from kernel_weights import layer, random_experts
from quantkit_kernels import (
    functional,
    prepare,
    reference,
)
from quantkit_kernels.prolog import sizes_of
from quantkit_kernels.samples import distance, latent_attention, random_weight
from quantkit_kernels.torch_npu import calls
from quantkit_kernels.torch_npu.functional import absorbed_weights
from quantkit_kernels.torch_npu.linear import nz_linear
from quantkit_kernels.torch_npu.prolog import prolog_refused

pytestmark = pytest.mark.usefixtures("called")
torch_npu = importlib.import_module("quantkit_kernels.torch_npu")


def test_layouts_at_rest():
    """The cube's own for int8 and beside the prolog; plain for all that its operators take so."""
    rng = torch.Generator().manual_seed(1)
    int8 = random_weight("int8", 64, 64, rng)
    assert layout_of(prepare(int8, backend="torch_npu").held()[0]) == NZ
    for weight in (int8, random_weight("dense", 64, 64, rng)):
        assert layout_of(nz_linear(weight, torch.bfloat16, torch.device("cpu")).weight) == NZ
    for grid in ("int4-asym-32", "dense", "fp4"):
        held = prepare(random_weight(grid, 64, 64, rng), backend="torch_npu").held()
        assert {layout_of(one) for one in held} == {"ND"}
        assert all(one.is_contiguous() for one in held)
    for grid in ("int4-asym-32", "int8", "dense"):
        experts = layer(random_experts(grid, 3, 64, 32, rng), "torch_npu", torch.bfloat16)
        assert {layout_of(one) for one in experts.held()} == {"ND"}
    assert all(one.is_contiguous() for one in absorbed_weights(random(2, 64 + 32, 128), 64))


def test_scales_are_taken_as_they_lie():
    weight = random_weight("int8", 64, 64, torch.Generator().manual_seed(1))
    part = weight._replace(scale=torch.cat([weight.scale, weight.scale], dim=1)[:, :1])
    ours, x = prepare(part, backend="torch_npu"), random(3, 64)
    assert all(one.is_contiguous() for one in ours.held() if layout_of(one) == "ND")
    assert torch.equal(ours(x), prepare(weight, backend="torch_npu")(x))


def test_the_double_refuses_a_layout():
    weight = calls.format_cast_nz(random(64, 64))
    with pytest.raises(RuntimeError, match="input is FRACTAL_NZ, not ND"):
        calls.call("npu_swiglu", weight)
    with pytest.raises(RuntimeError, match="a part of a tensor in FRACTAL_NZ"):
        calls.call("npu_prefetch", weight[1:], None, 8)
    assert layout_of(weight.clone()) == "ND"
    assert layout_of(calls.call("npu_format_cast", weight, 2)) == "ND"


def test_what_the_rules_exclude_is_plain_torch(called):
    """Nothing to turn, wide heads, gains of another dtype, nothing to activate, more heads than
    share a key: the reference's operators."""
    called.clear()
    x, angles, none = random(3, 4, 896), random(3, 448, dtype=torch.float32), random(0, 4, 64)
    positions = torch.tensor([0, 2, 1])
    given = (x, positions, angles.cos(), angles.sin())
    ours = functional.rope(*given, backend="torch_npu")
    assert torch.equal(ours, reference.rope(*given, True))
    few = angles[:, :32]
    empty = functional.rope(none, positions[:0], few.cos(), few.sin(), backend="torch_npu")
    assert empty.shape == none.shape
    wide, residual = random(2, 3, 128, dtype=torch.float32)
    norms, twins = (
        (one.rms_norm(wide, random(128), EPS), *one.add_rms_norm(wide, residual, random(128), EPS))
        for one in (torch_npu, reference)
    )
    assert all(map(torch.equal, norms, twins))
    assert torch_npu.silu_and_mul(random(0, 64)).shape == (0, 32)
    case = latent_attention([17, 24], 128, 128, (32, 32, 64, 128), torch.bfloat16)
    found = functional.mla_decode(*case.arguments, scale=case.scale, backend="torch_npu")
    assert distance(found, case.exact) < 1e-2
    assert called == ["npu_rotary_mul"]


def test_the_prolog_takes_one_kind_of_weight_and_sizes_it_was_made_for():
    sizes, dense = sizes_of(layer_of("dense"), 64), ("dense",) * 3
    assert prolog_refused(sizes, dense) is None
    for kinds in (("int8", "int8", "dense"), ("dense", "int8", "dense"), ("int4",) * 3):
        assert "all int8 or all unquantized" in str(prolog_refused(sizes, kinds))
    wrong = {"hidden": 7000, "q_lora": 1024, "kv_lora": 256, "heads": 3, "nope": 96, "rope_dim": 32}
    for size, value in wrong.items():
        reason = prolog_refused(sizes._replace(**{size: value}), dense)
        assert f"not made for {size} = {value}, but" in str(reason)


@pytest.mark.parametrize("grid", ["int4-asym-32", "int8", "fp4", "dense"])
def test_linears_are_held_where_they_are_used(grid, monkeypatch):
    """On a device that is not where the weights come from, the prolog's too."""
    module = importlib.import_module("quantkit_kernels.torch_npu.linear")
    meta = torch.device("meta")
    monkeypatch.setattr(module, "format_cast_nz", lambda weight: weight)
    weight = random_weight(grid, 64, 64, torch.Generator().manual_seed(1))
    held = module.linear(weight, torch.bfloat16, meta).held()
    if grid in ("int8", "dense"):
        weights = layer_of(grid)
        prolog = torch_npu.mla_prolog(
            weights, sizes_of(weights, 64), EPS, True, torch.bfloat16, meta
        )
        held += [*prolog.held(), prolog.kv_b, *prolog._gains]
    assert {one.device.type for one in held} == {"meta"}


@pytest.mark.parametrize("backend", ["torch_npu", "ascend"])
@pytest.mark.parametrize("grid", ["int4-asym-32", "int8"])
def test_experts_are_held_where_they_are_used(grid, backend):
    """On a device that is not where the weights come from."""
    gate, up, down = random_experts(grid, 2, 256, 128, torch.Generator().manual_seed(1))
    layout = importlib.import_module(f"quantkit_kernels.{backend}").experts_layout(
        2, gate[0], down[0], torch.bfloat16, torch.device("meta")
    )
    for index in range(2):
        layout.place(index, gate[index], up[index], down[index])
    assert {one.device.type for one in layout.finish().held()} == {"meta"}
