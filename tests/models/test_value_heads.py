"""Scales of o's columns and of the rows that make what these read."""

import torch

from quantkit.models.table import ValueHeads


def test_a_scale_is_one_for_all_that_read_a_value_and_falls_on_its_rows_alone():
    """3 heads of 4 values, each read by 2 query heads; 5 rows before each head's values. o(v) is
    what it was."""
    heads = ValueHeads(3, 2, 4, before=5)
    drawn = torch.rand(7, heads.columns) + 0.5
    scales = heads.tie(drawn)
    assert torch.equal(
        scales.unflatten(-1, (3, 2, 4))[:, :, 0], scales.unflatten(-1, (3, 2, 4))[:, :, 1]
    )
    torch.testing.assert_close(scales.log().mean(-1), torch.zeros(7))
    torch.testing.assert_close(heads.tie(scales), scales)
    made, o = torch.randn(3 * 9, 16), torch.randn(8, heads.columns)

    def added(rows, o):
        values = rows.unflatten(0, (3, 9))[:, None, 5:].expand(3, 2, 4, 16)
        return o @ values.flatten(0, 2)

    by = heads.producer_scales(scales[0])
    torch.testing.assert_close(
        added(made / by[:, None], o * scales[0]), added(made, o), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(by.unflatten(0, (3, 9))[:, :5], torch.ones(3, 5))


def test_no_scale_stays_none():
    heads = ValueHeads(2, 3, 4)
    assert torch.equal(heads.tie(torch.ones(24)), torch.ones(24))
    assert torch.equal(heads.producer_scales(torch.ones(24)), torch.ones(8))
