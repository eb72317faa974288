"""Passes cover every sequence once and never mix calibration with held-out ones."""

import torch

from quantkit.calibrate.hidden_states import BATCH_TOKENS, HiddenStates


def test_passes():
    lengths = [1000, 1000, 1000, 25, 2250, 12]
    stream = HiddenStates(torch.empty(sum(lengths), 1), 3000, lengths)
    passes = list(stream.batches())
    assert [one.lengths for one in passes] == [[1000, 1000], [1000], [25], [2250], [12]]
    assert [one.held_out for one in passes] == [False, False, True, True, True]
    assert passes[0].part == slice(0, 2000)
    assert [one.part.start for one in passes[1:]] == [one.part.stop for one in passes[:-1]]
    assert passes[-1].part.stop == sum(lengths)
    assert BATCH_TOKENS == 2048


def test_no_sequences_no_passes():
    assert list(HiddenStates(torch.empty(0, 1), 0, []).batches()) == []
