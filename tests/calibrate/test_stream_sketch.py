"""The size of the residual stream after attention, which weighs the rows of o_proj's input, may be
estimated from a sketch of it; products of latents have the precision of the tokens."""

import make_model
import pytest
import quantize_job
import torch
from letters import write_letters
from torch.nn import functional as F

from quantkit.calibrate import input_statistics, walk
from quantkit.calibrate.input_statistics import StreamSketch, collect_statistics
from quantkit.calibrate.sublayer import LayerWeights, run_attention


def source(path, **changes):
    """A small DeepSeek-V3 without MTP layers."""
    changes = make_model.FEW_EXPERTS | {"num_nextn_predict_layers": 0} | changes
    config = make_model.tiny_config(num_hidden_layers=1, first_k_dense_replace=1, **changes)
    return make_model.write_fp8(path, config, make_model.random_tensors(config))


def attention(tmp_path, monkeypatch, compare):
    """Calls `compare` with the arguments of `collect_statistics` for the attention of a layer."""

    def collect(sublayer, *given):
        if sublayer.name.endswith("attend"):
            compare(sublayer, *given)
        return collect_statistics(sublayer, *given)

    monkeypatch.setattr(walk, "collect_statistics", collect)
    monkeypatch.setattr(quantize_job, "METHODS", ("awq", "gptq"))
    text = write_letters(tmp_path / "calibration.txt")
    quantize_job.run(source(tmp_path / "source"), text, tmp_path / "out")


def test_rows_are_weighed_by_a_sketch_as_by_the_stream(tmp_path, monkeypatch):
    found = []

    def compare(sublayer, tensors, states, ranks, original=None):
        for signs in (64, 10**6):  # the stream has 256 channels: no sketch of a million
            monkeypatch.setattr(input_statistics, "SKETCHED", signs)
            statistics = collect_statistics(sublayer, tensors, states, ranks, original)
            found.append((sublayer, statistics.inputs))

    attention(tmp_path, monkeypatch, compare)
    ((sublayer, sketched), (_, exact)) = found
    assert sketched.keys() == exact.keys()
    for module, one in sketched.items():
        h, other = one.mean_hessian, exact[module].mean_hessian
        distance = float((h - other).norm() / other.norm())
        if module in sublayer.output_linears:
            assert 0 < distance < 0.12  # a row's mean square is estimated to 18 %
            assert one.sample.shape == exact[module].sample.shape
        else:
            assert distance == 0


def test_a_sketch_needs_all_that_is_added_to_the_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(input_statistics, "SKETCHED", 64)
    found = []

    def compare(sublayer, tensors, states, *others):
        (o,) = sublayer.output_linears
        found.append(StreamSketch.of(sublayer, tensors, states.quantized, [o]))

        def twice(block, hidden, lengths):  # as if a norm came after o_proj
            return 2 * run_attention(block, hidden, lengths) - hidden

        changed = type(sublayer)(**{**vars(sublayer), "run": twice})
        found.append(StreamSketch.of(changed, tensors, states.quantized, [o]))

    attention(tmp_path, monkeypatch, compare)
    assert found[0] is not None
    assert found[1] is None


def test_keys_and_values_have_the_precision_of_the_tokens(tmp_path, monkeypatch):
    """Without values, attention adds nothing to the stream."""
    checked = []

    def compare(sublayer, tensors, states, *others):
        (name,) = (name for name in tensors if "kv_b_proj" in name)
        shape = tensors[name].shape
        hidden = states.quantized.hidden[:16]

        def nothing(x, w):
            return 0 * F.linear(x, w) if w.shape == shape else F.linear(x, w)

        after = [
            sublayer.run(sublayer.build(LayerWeights(tensors, product=product)), hidden, [16])
            for product in (F.linear, nothing)
        ]
        checked.append((after[0] - hidden, after[1] - hidden))

    attention(tmp_path, monkeypatch, compare)
    ((added, none),) = checked
    assert added.abs().max() > 0
    assert torch.equal(none, torch.zeros_like(none))


@pytest.mark.parametrize("bias", [False, True])
def test_a_sketch_is_of_what_the_stream_will_be(bias):
    torch.manual_seed(0)
    w, x, hidden = torch.randn(2048, 96), torch.randn(500, 96), torch.randn(500, 2048)
    b = torch.randn(2048) if bias else torch.zeros(2048)
    signs = (2.0 * torch.randint(0, 2, (256, 2048)) - 1) / 2048**0.5
    sketch = StreamSketch("o", signs, signs @ w, signs @ b).stream(hidden, x)
    exact = (hidden + F.linear(x, w, b)).square().mean(-1)
    ratio = sketch.square().mean(-1) / exact
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    assert ratio.std() == pytest.approx((2 / 256) ** 0.5, rel=0.2)
