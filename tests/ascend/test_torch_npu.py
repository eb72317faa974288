"""Backend torch_npu on the double: every operator against float64, and every rule shown to refuse
something."""

import pytest
import torch
from ascend import npu_double
from ascend.test_rule_bounds import good_call
from kernel_weights import exact_experts, layer, random_experts
from quantkit_kernels import (
    Fp4,
    Int8,
    NarrowInt8,
    Routing,
    dequantize,
    functional,
    prepare,
    reference,
    route,
    torch_npu,
)
from quantkit_kernels.samples import distance, exact_linear, random_weight
from quantkit_kernels.torch_npu import calls, layout, vllm_plugin
from quantkit_kernels.torch_npu.vllm_plugin import WeightOnlyLinear

from quantkit.checkpoint.formats import awq
from quantkit.checkpoint.formats.compressed_int4 import FORMAT, INT8_WORDS
from quantkit.grids.int_groups import IntWeight

EPS = 0.7
"""Next to activations of one: an operator that takes its default instead is 30 % off."""
pytestmark = pytest.mark.usefixtures("called")


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("group", "rows"), [(64, 8), (128, 1), (128, 16)])
def test_few_rows_split_into_digits(group, rows):
    """The way that CANN takes for few rows: other bits, as near to float64; one row more, and it is
    the plain way."""
    weight = random_weight(f"int4-asym-{group}", 128, 384, torch.Generator().manual_seed(1))
    linear, x = prepare(weight, backend="torch_npu", dtype=torch.bfloat16), random(rows + 1, 384)
    x[0, :group] = 0  # a group without a largest value
    with npu_double.few_rows_split():
        split, plain = linear(x[:rows]), linear(x)
    assert distance(split, exact_linear(x[:rows], weight)) < 4e-3
    assert not torch.equal(split, linear(x[:rows]))
    assert torch.equal(plain, linear(x)) == (8 * rows == group)


def test_a_group_of_all_inputs_is_a_channels():
    """The operator takes no group that is as long as K."""
    weight = random_weight("int4-asym-64", 64, 64, torch.Generator().manual_seed(1))
    linear, x = prepare(weight, backend="torch_npu", dtype=torch.bfloat16), random(3, 64)
    assert distance(linear(x), exact_linear(x, weight)) < 4e-3


def test_fp4_decodes_exactly():
    """All 16 codes under all 126 positive e4m3 scales."""
    scale = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8).repeat(126, 4)
    of_rows = 2.0 ** (torch.arange(126) % 3)
    weight = Fp4(codes, scale.unsqueeze(1).repeat(1, 4), of_rows)
    decoded = prepare(weight, backend="torch_npu", dtype=torch.bfloat16)(torch.eye(64).bfloat16()).T
    assert torch.equal(decoded.double(), dequantize(weight, torch.float64))


def test_experts_in_half_a_byte_a_code():
    """W4A8: half the memory of int8, but for scales and biases; gate and up that no int32 carries
    whole stay int8."""
    rng = torch.Generator().manual_seed(2)
    ids, share = torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.ones(3, 2)
    for width in (128, 126):
        weights = random_experts("int8-narrow", 2, 128, width, rng)
        experts, x = layer(weights, "torch_npu", torch.bfloat16), random(3, 128)
        bytes_ = [[Int8(*one) for one in projection] for projection in weights]
        held = layer(bytes_, "torch_npu", torch.bfloat16).nbytes
        assert (experts.nbytes < 0.6 * held) == (width == 128)
        assert distance(experts(x, ids, share), exact_experts(x, ids, share, weights)) < 1.5e-2
    wide = [
        NarrowInt8(torch.empty(8, k, device="meta"), torch.empty(8, 1, device="meta"))
        for k in (18432, 18433)
    ]
    assert [*map(layout.is_carried, wide)] == [True, False]
    weight = NarrowInt8(torch.tensor([[-8, 7, 3, 1]] * 8).to(torch.int8), torch.full((8, 1), 0.5))
    carriers, scale_bits, bias = layout.narrow_tensors(weight)
    assert carriers.shape == (4, 1)
    assert (scale_bits == 0x3F000000).all()
    assert (bias == 8 * 3 * 0.5).all()


def test_norms_and_activation(called):
    called.clear()
    x, residual, gain = random(5, 7168), random(5, 7168, seed=1), random(7168, seed=2)
    found, expected = (
        (
            functional.rms_norm(x, gain, EPS, backend=name),
            *functional.add_rms_norm(x, residual, gain, EPS, backend=name),
            functional.silu_and_mul(x, backend=name),
        )
        for name in ("torch_npu", "reference")
    )
    assert all(distance(ours, twin.double()) < 4e-3 for ours, twin in zip(found, expected))
    assert called == ["npu_rms_norm", "npu_add_rms_norm", "npu_swiglu"]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_route(scoring, norm_topk_prob, called):
    called.clear()
    logits = random(9, 256, dtype=torch.float32)
    bias = random(256, dtype=torch.float32, seed=1) / 10
    groups = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "num_joined_experts": 1}
    rule = Routing(256, 8, norm_topk_prob, scoring, **groups)
    ids, weights = route(logits, bias, rule, backend="torch_npu")
    twin_ids, twin_weights = reference.route(logits, bias, rule)
    assert torch.equal(ids.long(), twin_ids)
    # As the operator gives them: the next one takes them so.
    assert ids.dtype == (torch.int32 if called else torch.int64)
    torch.testing.assert_close(weights, twin_weights, rtol=1e-5, atol=1e-6)
    assert bool(called) == ((scoring == "sigmoid") == norm_topk_prob)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(interleaved, called):
    called.clear()
    x, positions = random(5, 16, 64), torch.tensor([3, 0, 7, 7, 1])
    angles = random(8, 32, dtype=torch.float32, seed=1)
    given = (x, positions, angles.cos(), angles.sin())
    ours = functional.rope(*given, interleaved=interleaved, backend="torch_npu")
    assert distance(ours, reference.rope(*given, interleaved).double()) < 4e-3
    assert called == ["npu_rotary_mul"]


def test_carriers_are_low_nibble_first():
    assert layout.carry_int4(
        torch.tensor([[1, 2, 3, 4, 5, 6, 7, -8]], dtype=torch.int8)
    ).item() == 0x87654321 - (1 << 32)
    codes = torch.randint(
        -8, 8, (5, 48), dtype=torch.int8, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(layout.uncarry_int4(layout.carry_int4(codes)), codes)


def test_a_call_that_breaks_a_rule_is_not_made(called):
    given = good_call("npu_quant_matmul")
    called.clear()
    with pytest.raises(AssertionError, match="npu_quant_matmul: offset goes with int8"):
        calls.call("npu_quant_matmul", **given, offset=torch.ones(1))
    with pytest.raises(AssertionError, match="no argument offsets"):
        calls.call("npu_quant_matmul", **given, offsets=torch.ones(1))
    assert called == []


@pytest.mark.parametrize(
    ("operator", "name"),
    [("linear_int8", "npu_format_cast"), ("experts_int4", "npu_grouped_matmul")],
)
def test_an_operator_that_does_not_run_is_named(operator, name, monkeypatch):
    monkeypatch.setattr(torch_npu, "has_kernel", lambda one, device: one != name)
    reason = torch_npu.unusable(operator, torch.device("cpu"), None, ())
    assert reason == f"{name} does not run on cpu"


@pytest.mark.parametrize(
    ("operator", "device", "dtype", "shapes", "reason"),
    [
        ("linear_int8", "cpu", torch.float32, (), "bfloat16 and float16"),
        ("experts_int8", "cpu", torch.float32, (), "bfloat16 and float16"),
        ("linear_int4", "cpu", torch.bfloat16, ((12, 64),), "multiples of 8, not 12"),
        ("linear_int4", "cpu", torch.bfloat16, ((16, 64),), ""),
        ("rms_norm", "cuda", None, (), "does not run on cuda"),
        ("experts_dense", "cpu", torch.float32, (), ""),
        ("float32_linear", "cpu", None, (), "torch's own"),
        ("mla_decode", "cpu", None, (), "torch_npu is not installed"),
    ],
)
def test_unusable_names_the_reason(operator, device, dtype, shapes, reason, monkeypatch):
    """In a torch_npu that has no operator of that name."""
    monkeypatch.setitem(torch_npu.NEEDS, "mla_decode", ("npu_of_no_version",))
    found = torch_npu.unusable(operator, torch.device(device), dtype, shapes) or ""
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [64, 0, -1])
def test_the_plugin_of_vllm_computes_what_the_format_stores(bits, symmetric, group):
    """Of a linear as compressed-tensors packs it; group 0 and -1: one scale per output channel."""
    (n, k), most = (128, 256), 2 ** (bits - 1)
    shapes = ((n, k), (n, k // (group if group > 0 else k)))
    codes, points = (torch.randint(-most, most, shape, dtype=torch.int8) for shape in shapes)
    scale = (torch.rand(shapes[1]) + 0.5).bfloat16().float()
    weight = IntWeight(codes, scale, None if symmetric else points, bits)
    scheme, layer_of_vllm = WeightOnlyLinear(bits, group, symmetric), torch.nn.Module()
    for name, value in {4: FORMAT, 8: INT8_WORDS}[bits].pack("m", weight).items():
        own = torch.nn.Parameter(value, requires_grad=False)
        layer_of_vllm.register_parameter(name.removeprefix("m."), own)
    made = {
        **scheme.get_weight(k, n, torch.bfloat16),
        **scheme.get_pergroup_param(k, n, torch.bfloat16),
        **scheme.get_pertensor_param(torch.bfloat16),
    }
    assert {name: one.shape for name, one in made.items() if not name.startswith("_")} == {
        name: one.shape for name, one in layer_of_vllm.named_parameters()
    }
    if not symmetric:  # what vLLM gives each rank a part of
        assert made["weight_zero_point"].shape[made["_packed_dim"]] * made["_packed_factor"] == n
    scheme.process_weights_after_loading(layer_of_vllm)
    x, bias = random(2, 3, k), random(n)
    exact = x.double() @ weight.dequantize(torch.float64).t() + bias.double()
    assert distance(scheme.apply(layer_of_vllm, x, bias), exact) < 1e-2
    vllm_plugin._dequantize(layer_of_vllm)
    assert torch.equal(layer_of_vllm.weight, weight.dequantize(torch.bfloat16))


def test_the_plugin_of_vllm_does_nothing_without_vllm_ascend():
    vllm_plugin.register()


def test_the_plugin_of_vllm_gives_awq_as_the_backend_lays_it_out():
    """A weight, and a stack of them: the operands of the products that are tested with our own."""
    rngs = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    made = [random_weight("int4-asym-64", 128, 256, rng) for rng in rngs]
    made = [one._replace(scale=one.scale.half().float()) for one in made]
    stored = [awq.FORMAT.pack("m", IntWeight(*one, 4)).values() for one in made]
    expected = [layout.int4_tensors(one, torch.float16) for one in made]
    assert all(map(torch.equal, vllm_plugin.awq_tensors(*stored[0]), expected[0]))
    together = vllm_plugin.awq_tensors(*map(torch.stack, zip(*stored)))
    assert all(map(torch.equal, together, map(torch.stack, zip(*expected))))
