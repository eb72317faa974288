"""One pass over blocks of the vocabulary gives what whole logits give."""

import pytest
import torch
from torch.nn import functional as F

from quantkit.calibrate.output_cost import compare_paths


@pytest.mark.parametrize("rows", [7, 64, 1000])
def test_blocks_give_what_whole_logits_give(rows):
    generator = torch.Generator().manual_seed(0)
    original = 4 * torch.randn(50, 16, generator=generator)
    quantized = original + 0.3 * torch.randn(50, 16, generator=generator)
    head = torch.randn(333, 16, generator=generator)
    p, q = (
        (hidden.double() @ head.double().t()).log_softmax(-1) for hidden in (original, quantized)
    )
    (found,) = compare_paths(original, [quantized], head.split(rows))
    assert found.tokens == 50
    assert found.kl == pytest.approx(
        float(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()), rel=1e-5
    )
    assert found.top1_agree == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert 0 < found.top1_agree < 1


def test_equal_paths_do_not_differ():
    hidden, head = torch.randn(9, 8), torch.randn(100, 8)
    (found,) = compare_paths(hidden, [hidden.clone()], head.split(30))
    assert found.kl == pytest.approx(0, abs=1e-12)
    assert found.top1_agree == 1
