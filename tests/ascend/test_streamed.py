"""Experts by the Ascend C kernels: their layouts are the twins', and backend ascend takes them
where they were built and fit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ascend import ascendc, ascendc_double, triton_double
from kernel_weights import exact_experts, layer, random_experts
from quantkit_kernels.ascend import extension, streamed
from quantkit_kernels.samples import distance, random_weight
from quantkit_kernels.weights import stack

CPU = torch.device("cpu")
HIDDEN, INNER = 512, 256
"""As the kernels tile: gate and up of 512 rows, down of 512 by 256."""
LARGE = 2.0**20
"""More than fp16 holds."""


@pytest.fixture
def launched():
    with ascendc_double.installed() as names:
        yield names


@pytest.mark.parametrize("grid", ["int4-asym-128", "int4-sym-128"])
def test_int4_is_packed_as_its_twin_does_it(grid):
    twin = ascendc.twin("int4_grouped")
    weight = random_weight(grid, 512, 384, torch.Generator().manual_seed(1))
    codes, parameters = streamed.packed(weight)
    zero = weight.zero_point
    zero = torch.zeros_like(weight.scale) if zero is None else zero.float()
    expected = twin.pack_parameters(weight.scale.numpy(), zero.numpy())
    assert np.array_equal(codes.numpy(), twin.pack(weight.codes.numpy()))
    assert np.array_equal(parameters.numpy(), expected)
    assert all(one.is_contiguous() for one in (codes, parameters))


def test_fp4_is_packed_as_its_twin_does_it():
    twin = ascendc.twin("fp4_gemv")
    weight = random_weight("fp4", 1024, 192, torch.Generator().manual_seed(1))
    for one in (weight, weight._replace(global_scale=torch.rand(1024))):
        words, scale, global_scale = streamed.packed(one)
        assert np.array_equal(words.view(torch.uint16).numpy(), twin.pack(one.codes.numpy()))
        assert np.array_equal(
            scale.view(torch.uint8).numpy(), twin.pack_scales(one.scale.view(torch.uint8).numpy())
        )
        assert torch.equal(global_scale, one.global_scale.expand(1024) * twin.RESCALE)


@pytest.mark.parametrize("grid", ["int4-asym-128", "int4-sym-128", "fp4"])
def test_experts(grid, launched):
    """Of one token and of many; experts that nobody asked; no Triton kernel is launched."""
    rng = torch.Generator().manual_seed(2)
    weights = random_experts(grid, 5, HIDDEN, INNER, rng)
    experts = layer(weights, "ascend", torch.bfloat16)
    assert isinstance(experts, streamed.StreamedExperts)
    for tokens, top_k in ((1, 1), (7, 3), (12, 2)):
        x = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()
        ids = torch.rand(tokens, 4, generator=rng).topk(top_k, dim=-1).indices
        share = torch.rand(tokens, top_k, generator=rng) * LARGE
        assert distance(experts(x, ids, share), exact_experts(x, ids, share, weights)) < 1.2e-2
    assert launched == []


def test_gate_and_up_are_whole_tiles_together(launched):
    """And experts lie where they are used, on a device that is not where the weights come from."""
    gate, up, down = random_experts("int4-asym-128", 2, 256, 128, torch.Generator().manual_seed(1))
    assert isinstance(layer([gate, up, down], "ascend", torch.bfloat16), streamed.StreamedExperts)
    made = streamed.StreamedLayout(2, torch.bfloat16, torch.device("meta"))
    made._rooms = tuple(
        streamed.Streamed("int4", 256, 256, made._room(streamed.packed(one)))
        for one in (stack(gate[0], up[0]), down[0])
    )
    assert {one.device.type for one in made.finish().held()} == {"meta"}


@pytest.mark.parametrize(
    ("grid", "hidden", "inner", "dtype", "double"),
    [
        ("int4-asym-128", HIDDEN, INNER, torch.float16, ascendc_double),
        ("int4-asym-64", HIDDEN, INNER, torch.bfloat16, ascendc_double),
        ("int4-asym-128", 384, INNER, torch.bfloat16, ascendc_double),
        ("fp4", HIDDEN, 128, torch.bfloat16, ascendc_double),
        ("int8", HIDDEN, INNER, torch.bfloat16, ascendc_double),
        ("int4-asym-128", HIDDEN, INNER, torch.bfloat16, triton_double),
    ],
    ids=str,
)
def test_what_does_not_fit_goes_by_triton(grid, hidden, inner, dtype, double):
    """Rows of 16 bits that are not bfloat16, groups of 64, column tiles that are not whole, int8;
    and all where the library is not."""
    with double.installed() as launched:
        made = random_experts(grid, 2, hidden, inner, torch.Generator().manual_seed(1))
        experts = layer(made, "ascend", dtype)
        ids = torch.zeros(1, 1, dtype=torch.int32)
        experts(torch.zeros(1, hidden, dtype=dtype), ids, torch.ones(1, 1))
    kind = grid.partition("-")[0]
    assert launched == [f"{kind}_gate_up", f"{kind}_down"]


def test_sizes_at_their_bounds(launched):
    def fits(grid, n, k):
        weight = random_weight(grid, n, k, torch.Generator().manual_seed(1))
        return streamed.fits(weight, torch.bfloat16, CPU)

    assert fits("int4-sym-128", 256, 8192)
    assert not any(fits("int4-sym-128", *size) for size in ((256, 8320), (128, 128), (384, 128)))
    assert fits("fp4", 512, 64)
    assert fits("fp4", 512, 8320)
    assert not any(fits("fp4", *size) for size in ((256, 64), (512, 96)))


def test_scales_that_float16_does_not_hold():
    weight = random_weight("int4-sym-128", 256, 128, torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="larger than float16"):
        streamed.packed(weight._replace(scale=weight.scale * 1e8))


def test_parts_of_k_fill_the_cores():
    """Equal ones; none where items are enough, more where they are few."""
    for items, tiles in ((1, 112), (9, 112), (48, 112), (1000, 112), (14, 4), (3, 7)):
        parts = streamed.enough_splits(items, tiles, 48)
        assert tiles % parts == 0
        assert parts <= 16
        busy, *others = (-(-items * one // 48) / (items * one) for one in (parts, 1, 2, 4, 7))
        assert busy <= min(others) * 1.2 or tiles % 7
    assert streamed.enough_splits(48, 112, 48) == 1
    assert streamed.enough_splits(3, 112, 48) == 16


def test_where_the_library_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert extension.library() == tmp_path / "quantkit" / "ascendc" / extension.LIBRARY
    assert not extension.has("int4_grouped", CPU)
    monkeypatch.setenv("QUANTKIT_ASCENDC", str(tmp_path / "other.so"))
    extension._load.cache_clear()
    with pytest.raises(ValueError, match=r"QUANTKIT_ASCENDC names .*other.so, .* `make ascendc`"):
        extension._load()
    extension._load.cache_clear()
    monkeypatch.delenv("QUANTKIT_ASCENDC")
    extension._load()  # what was not built is not missed
    extension._load.cache_clear()


def test_the_library_is_loaded_where_tensors_lie_on_an_npu(tmp_path, monkeypatch):
    loaded, built = [], tmp_path / "built.so"
    built.touch()
    monkeypatch.setenv("QUANTKIT_ASCENDC", str(built))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    for device, now in ((CPU, []), (SimpleNamespace(type="npu"), [str(built)])):
        extension._load.cache_clear()
        extension.has("int4_grouped", device)
        assert loaded == now
    extension._load.cache_clear()
