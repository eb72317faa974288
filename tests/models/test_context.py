"""Attention over whole sequences: what is computed by blocks is what torch computes whole."""

import pytest
import torch

from quantkit.models.context import CausalContext


@pytest.mark.parametrize("lengths", [[1], [128, 129], [300, 40]])
def test_values_narrower_than_keys(lengths):
    """As in multi-head latent attention; zeros beside the values make them as wide as keys, which
    torch attends to."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), 4, width, generator=generator) for width in (24, 24, 16))
    context = CausalContext(lengths)
    expected = context.attend(q, k, torch.nn.functional.pad(v, (0, 8)), 0.3)[..., :16]
    torch.testing.assert_close(context.attend(q, k, v, 0.3), expected)
