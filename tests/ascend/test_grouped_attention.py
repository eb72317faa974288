"""Grouped-query attention by backend torch_npu on the double: pages where they lie."""

import pytest
import torch
from quantkit_kernels import gqa_decode, gqa_prefill
from quantkit_kernels.samples import distance, grouped_attention

pytestmark = pytest.mark.usefixtures("called")


@pytest.mark.parametrize(("heads", "width", "block_size"), [((8, 2), 128, 64), ((4, 4), 64, 128), ((8, 1), 80, 16)])
def test_gqa_decode(heads: tuple[int, int], width: int, block_size: int, called: list[str]) -> None:
    """NaN past a sequence's end; lengths from the host, and from the device."""
    called.clear()
    lengths = [17, 0, 24, 129]
    case = grouped_attention(lengths, [1] * 4, heads, width, block_size, torch.bfloat16)
    ours = gqa_decode(case.q, case.pages, scale=case.scale, backend="torch_npu")
    assert distance(ours, case.exact) < 1e-2
    assert torch.equal(gqa_decode(case.q, case.pages._replace(lengths=lengths), scale=case.scale, backend="torch_npu"), ours)
    assert called == ["npu_fused_infer_attention_score"] * 2


def test_what_the_operator_does_not_take(called: list[str]) -> None:
    """A window, and blocks that are no multiple of 16: plain torch."""
    called.clear()
    for block_size, window in ((64, 20), (7, 0)):
        case = grouped_attention([17, 40], [1, 1], (4, 2), 64, block_size, torch.bfloat16, window=window)
        assert distance(gqa_decode(case.q, case.pages, scale=case.scale, window=window, backend="torch_npu"), case.exact) < 1e-2
    assert called == []


@pytest.mark.parametrize("window", [0, 20])
def test_gqa_prefill(window: int) -> None:
    case = grouped_attention([60, 30], [20, 30], (4, 2), 64, 16, torch.bfloat16, window=window)
    out = gqa_prefill(case.q, case.pages[:2], case.prompts, scale=case.scale, window=window, backend="torch_npu")
    assert distance(out, case.exact) < 1e-2
