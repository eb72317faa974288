"""Passes cover every sequence once and never mix calibration with held-out ones; states in a file
are those in memory."""

import os

import torch
from refused import refused

from quantkit.calibrate.hidden_states import BATCH_TOKENS, HiddenStates, copied_states
from quantkit.common.scratch import give_back, scratch_tensor


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


def test_a_file_holds_what_memory_does(tmp_path):
    """To the bit, whatever was given back meanwhile; the file is gone with its tensor."""
    before = torch.randn(5000, 3000, generator=torch.Generator().manual_seed(0))
    before[2, 5] = 0.0
    states = HiddenStates(copied_states(before, tmp_path), 5000, [5000], scratch=tmp_path)
    after = before[:7].clone()
    after[2, 5], after[3, 2900] = -0.0, float("nan")
    states.put(slice(0, 7), after[:, :2950])
    give_back()
    expected = torch.cat((after, before[7:]))
    assert torch.equal(states.hidden.view(torch.int32), expected.view(torch.int32))
    wider = copied_states(states.hidden[:, :10], tmp_path, 3)
    assert torch.equal(wider[:, :10].view(torch.int32), expected[:, :10].view(torch.int32))
    assert not wider[:, 10:].any()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_at_once(tmp_path, monkeypatch):
    def fill(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fill, raising=False)
    with refused("no room for 32.0 MB of hidden states"):
        scratch_tensor(tmp_path, 1000, 8000)
