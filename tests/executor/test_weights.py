"""Each kind of weight meets its operator, and the operator computes the weight's value; shares of a
weight put together are the weight."""

import warnings

import pytest
import quantkit_kernels as kernels
import torch
from nearest import quantize_fp4, quantize_fp8_block, quantize_int
from refused import refused

from quantkit.executor.weights.load import load_model
from quantkit.executor.weights.weights import ExecutorWeights, operand, share_range
from quantkit.grids.base import cut_columns, cut_rows, dequantize
from quantkit.grids.int_groups import IntGrid

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


def test_a_backend_asked_for_serves_what_it_has(tiny_checkpoint):
    """The CPU's packed operators have no unquantized linears: torch has them then. One that serves
    nothing here is refused at once."""
    loaded = load_model(tiny_checkpoint, device="cpu", backend="cpu")
    assert loaded.weights.linear("lm_head").backend == "expanded"
    for backend, why in (("cuda", "runs nothing on cpu"), ("fast", "not known")):
        with refused(why):
            load_model(tiny_checkpoint, device="cpu", backend=backend)


def test_the_reference_is_told_with_its_time(weights, monkeypatch):
    """24 rows in groups of 32, which no packed operator of a CPU takes, and too little memory to
    expand them."""
    slow = executor_weights(weights)
    assert slow._backend("linear", odd()) == "expanded"
    monkeypatch.setattr(slow, "_may_expand", False)
    told = (
        r"SLOW: linear_int4 runs on the reference.* ms a token for one weight of 24 x 64.*cpu: .*16"
    )
    assert check_told_once(slow, told) == "reference"


def test_what_the_backend_asked_for_does_not_take_of_a_model_is_told(weights):
    """24 rows, which the CPU's packed operator of int4 does not take; of unquantized ones it has
    none, which is nothing to tell."""
    asked = executor_weights(weights, backend="cpu")
    check_told_once(asked, "^backend cpu does not serve linear_int4 of this model, reference does")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked._backend("linear", kernels.Dense(W[:24, :64]))


def executor_weights(weights, **options):
    asked = {"device": torch.device("cpu"), "dtype": torch.bfloat16, **options}
    return ExecutorWeights(weights.checkpoint, [], **asked)


def check_told_once(weights, told):
    """The backend of a weight of which this is told, the first time alone."""
    with pytest.warns(RuntimeWarning, match=told):
        weights._backend("linear", odd())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return weights._backend("linear", odd())


W192 = torch.randn(192, 256, generator=torch.Generator().manual_seed(0))
WEIGHTS = {
    "dense": W192,
    "int4 asymmetric": quantize_int(W192, IntGrid(4, 128, False), scale_dtype=torch.float16),
    "int4 symmetric": quantize_int(W192, IntGrid(4, 64, True), scale_dtype=torch.float16),
    "int8": quantize_int(W192, IntGrid(8, None, True), scale_dtype=torch.float32),
    "fp4": quantize_fp4(W192),
    "fp8": quantize_fp8_block(W192),
}


def row_share(weight, name, rank, size):
    return cut_rows(weight, *share_range(weight.shape[0], "output features", name, rank, size))


def column_share(weight, name, rank, size):
    return cut_columns(
        weight, name, *share_range(weight.shape[1], "input features", name, rank, size)
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_shares_make_the_whole(name, size):
    weight = WEIGHTS[name]
    for cut, dim in ((row_share, 0), (column_share, 1)):
        shares = [cut(weight, name, rank, size) for rank in range(size)]
        is_packed = name in ("int4 asymmetric", "int8", "fp4")
        assert not is_packed or {type(share) for share in shares} == {type(weight)}
        assert torch.equal(torch.cat([*map(dequantize, shares)], dim=dim), dequantize(weight))


def test_a_group_is_cut_into_whole_smaller_groups():
    """256 input features in groups of 128 on 4 ranks: 64 each, half a group, which keeps the
    group's scale."""
    share = column_share(WEIGHTS["int4 asymmetric"], "w", 1, 4)
    assert share.group_size == 64
    assert torch.equal(share.scale[:, 0], WEIGHTS["int4 asymmetric"].scale[:, 0])


@pytest.mark.parametrize(
    ("size", "heads", "own"), [(2, 2, [0, 1]), (4, 2, [0, 0, 1, 1]), (4, 1, [0, 0, 0, 0])]
)
def test_ranks_beyond_the_key_heads_hold_copies_side_by_side(size, heads, own):
    """As query heads lie: those of a key head are on neighbours."""
    ranges = [
        share_range(heads * 64, "output features", "k", rank, size, heads) for rank in range(size)
    ]
    assert ranges == [(head * 64, (head + 1) * 64) for head in own]


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [("int4 symmetric", 16, "groups of 64"), ("fp4", 32, "groups of 16"), ("dense", 3, "evenly")],
)
def test_what_cannot_be_cut_is_refused(name, size, said):
    with refused(f"^{name} .*{said}"):
        column_share(WEIGHTS[name], name, 0, size)
