"""Each kind of weight meets its operator, and the operator computes the weight's value."""

import warnings

import pytest
import quantkit_kernels as kernels
import torch
from nearest import quantize_fp4, quantize_fp8_block, quantize_int
from refused import refused

from quantkit.executor.weights.load import load_model
from quantkit.executor.weights.weights import ExecutorWeights, operand
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.models.mlp import Mlp

W = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
NO_FP4 = kernels.backends.why_unusable("linear_fp4", "cpu", torch.device("cpu"))


def rounded(bits, group, symmetric, dtype=torch.float32, rows=96, columns=256):
    return quantize_int(W[:rows, :columns], IntGrid(bits, group, symmetric), scale_dtype=dtype)


def odd():
    """24 rows in groups of 32, which no packed operator of a CPU takes."""
    return operand(rounded(4, 32, False, torch.float16, 24, 64), torch.bfloat16)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (W, kernels.Dense),
        (rounded(4, 128, False, torch.float16), kernels.Int4),
        (rounded(4, 64, True, torch.bfloat16), kernels.Int4),
        (rounded(8, None, True), kernels.Int8),
        (rounded(4, None, True), kernels.Int4),
        (rounded(4, None, False), kernels.Int4),
        (rounded(8, 128, True), kernels.W8A16),
        (rounded(8, 128, False), kernels.Dense),
        (quantize_fp4(W), kernels.Fp4),
        (quantize_fp8_block(W), kernels.Dense),
    ],
)
def test_operand_stands_for_the_weight(weight, kind):
    prepared = operand(weight, torch.float32, 8 if kind is kernels.Int8 else 16)
    assert type(prepared) is kind
    torch.testing.assert_close(
        kernels.dequantize(prepared), dequantize(weight), rtol=1e-6, atol=1e-7
    )


@pytest.fixture(scope="module")
def weights(tiny_checkpoint):
    return load_model(tiny_checkpoint, device="cpu", dtype="float32").weights


def test_fused_linear_is_its_parts_side_by_side(weights):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    names = tuple(f"model.layers.1.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    fused = weights.fused_linear(names)
    assert isinstance(fused, kernels.Linear)
    expected = torch.cat([x @ weights.dequantized(name).T for name in names], dim=-1)
    torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)


def test_a_shared_expert_of_the_routed_ones_form_is_one_more_of_them(weights):
    generator = torch.Generator().manual_seed(1)
    prefix, shared = "model.layers.1.mlp.experts", "model.layers.1.mlp.shared_experts"
    x, topk_weights = (
        torch.randn(5, 256, generator=generator),
        torch.rand(5, 2, generator=generator),
    )
    topk_ids = torch.tensor([[0, 3], [1, 2], [3, 0], [2, 2], [1, 0]])
    count = int(weights.checkpoint.config["n_routed_experts"])
    joined = weights.experts_with_shared(prefix, count, shared)
    ours = joined(
        x,
        torch.cat((topk_ids, torch.full((5, 1), count)), dim=1),
        torch.cat((topk_weights, torch.ones(5, 1)), dim=1),
    )
    expected = weights.experts(prefix, count)(x, topk_ids, topk_weights) + Mlp(shared, weights)(x)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_shared_expert_of_another_form_is_run_apart(weights, monkeypatch):
    monkeypatch.setattr(
        weights.checkpoint, "weight", lambda module, device: W[:64] if "shared" in module else W
    )
    assert (
        weights.experts_with_shared(
            "model.layers.1.mlp.experts", 4, "model.layers.1.mlp.shared_experts"
        )
        is None
    )


def test_parts_on_different_grids_are_not_fused(weights, monkeypatch):
    parts = {"a": W, "b": rounded(4, 128, False, torch.float16)}
    monkeypatch.setattr(weights.checkpoint, "weight", lambda module, device: parts[module])
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([x @ dequantize(part).T for part in parts.values()], dim=-1)
    torch.testing.assert_close(weights.fused_linear(("a", "b"))(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "fits", "expanded"),
    [(96, True, True), (96, False, False), (2064, True, NO_FP4 is not None)],
)
def test_fp4_on_a_cpu_is_expanded_once_where_it_is_small_and_fits(
    weights, rows, fits, expanded, monkeypatch
):
    """A large one only where there is no compiler for the kernels' own product."""
    weight = quantize_fp4(torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(weights.checkpoint, "weight", lambda module, device: weight)
    monkeypatch.setattr(weights, "_may_expand", fits)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    linear = weights.linear("a")
    assert linear.backend == ("expanded" if expanded else "cpu" if NO_FP4 is None else "reference")
    torch.testing.assert_close(linear(x), x @ dequantize(weight).T, rtol=1e-4, atol=1e-4)


def test_router_stays_in_float32(tiny_checkpoint):
    weights = load_model(tiny_checkpoint, device="cpu", dtype="bfloat16").weights
    assert weights.tensor("model.layers.1.mlp.gate.weight").dtype == torch.float32
    assert weights.tensor("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32
    assert weights.tensor("model.norm.weight").dtype == torch.bfloat16
    assert weights.has("model.norm.weight")
    assert not weights.has("model.norm.bias")


def test_held_bytes_are_counted(tiny_checkpoint):
    loaded = load_model(tiny_checkpoint, device="cpu", dtype="float32")
    held = sum(
        info.nbytes
        for name, info in loaded.checkpoint.tensors.items()
        if "layers.3" not in name and "scale_inv" not in name
    )
    # FP8 is one byte a weight on disk and four here; norms and embeddings grow from two.
    assert 2 * held < loaded.nbytes < 5 * held


def test_a_backend_asked_for_serves_what_it_has(tiny_checkpoint):
    """The CPU's packed operators have no unquantized linears: torch has them then. One that serves
    nothing here is refused at once."""
    loaded = load_model(tiny_checkpoint, device="cpu", backend="cpu")
    assert loaded.weights.linear("lm_head").backend == "expanded"
    for backend, why in (("cuda", "runs nothing on cpu"), ("fast", "not known")):
        with refused(why):
            load_model(tiny_checkpoint, device="cpu", backend=backend)


def test_the_reference_is_told_with_its_time(tiny_checkpoint, weights, monkeypatch):
    """24 rows in groups of 32, which no packed operator of a CPU takes, and too little memory to
    expand them: told once."""
    int4 = odd()
    slow = ExecutorWeights(weights.checkpoint, [], device=torch.device("cpu"), dtype=torch.bfloat16)
    assert slow._backend("linear", int4) == "expanded"
    monkeypatch.setattr(slow, "_may_expand", False)
    with pytest.warns(
        RuntimeWarning,
        match=r"SLOW: linear_int4 runs on the reference.* ms a token for one weight of 24 x "
        r"64.*cpu: .*16",
    ):
        assert slow._backend("linear", int4) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert slow._backend("linear", int4) == "reference"


def test_what_the_backend_asked_for_does_not_take_of_a_model_is_told_once(weights):
    """24 rows, which the CPU's packed operator of int4 does not take; of unquantized ones it has
    none, which is nothing to tell."""
    int4 = odd()
    asked = ExecutorWeights(
        weights.checkpoint, [], device=torch.device("cpu"), dtype=torch.bfloat16, backend="cpu"
    )
    with pytest.warns(
        RuntimeWarning,
        match=r"^backend cpu does not serve linear_int4 of this model, reference does: .*16",
    ):
        asked._backend("linear", int4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked._backend("linear", int4)
        asked._backend("linear", kernels.Dense(W[:24, :64]))
