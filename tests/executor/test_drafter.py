"""Guessing with the MTP layer changes how many tokens a step brings, and no token."""

from collections import Counter

import make_model
import pytest
import torch
from engines import capture, load, tokens
from refused import refused

from quantkit import SamplingParams
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DevicePositions

PROMPTS = [list(range(6 + i, 30 + 3 * i)) for i in range(6)]


@pytest.mark.parametrize(("draft_length", "temperature"), [(1, 0.8), (3, 0.0)])
def test_tokens_are_those_of_plain_decoding(easy_checkpoint, draft_length, temperature):
    params = [
        SamplingParams(
            max_new_tokens=20 + i if i else 250,
            temperature=temperature,
            top_p=0.9,
            seed=i,
            ignore_eos=True,
        )
        for i in range(6)
    ]
    drafting = load(easy_checkpoint, max_model_len=128, draft_length=draft_length)
    assert tokens(drafting, PROMPTS, params) == tokens(
        load(easy_checkpoint, max_model_len=128), PROMPTS, params
    )
    assert 0.2 < drafting.speculation.acceptance.rate < 1, (
        "all or no guesses are right: the test tests half"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_are_the_same_however_they_are_computed(easy_checkpoint, temperature, monkeypatch):
    """By a host that waits for the first, as for an NPU; in one chain, which the host waits for
    once a step; over static buffers."""
    params = [
        SamplingParams(max_new_tokens=20 + 7 * i, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(6)
    ]
    found, waited = [], Counter()
    agree = Parallel.agree

    def counted(self, x):
        waited[kind] += 1
        return agree(self, x)

    monkeypatch.setattr(Parallel, "agree", counted)
    for kind in ("waits", "chain", "captured"):
        engine = load(easy_checkpoint, draft_length=3)
        if kind == "captured":
            capture(engine, lambda step, _: step, 3)
        drafter = engine.speculation.drafter
        assert not drafter.waits
        drafter.waits = kind == "waits"
        found.append((tokens(engine, PROMPTS, params), vars(engine.speculation.acceptance)))
    assert found[0] == found[1] == found[2]
    assert waited["chain"] == waited["captured"] < 0.6 * waited["waits"]


def test_places_that_are_nobodys_lie_in_block_0():
    """Behind the last block, behind the blocks of a sequence, and from the reach on; and nothing is
    read beyond the tables."""
    tables = torch.tensor([[5, 7], [3, 0]], dtype=torch.int32)
    found = DevicePositions.of(torch.tensor([9, 3]), tables, 8, 1000)
    assert (found.positions.tolist(), found.slots.tolist()) == ([9, 3], [7 * 8 + 1, 3 * 8 + 3])
    found = DevicePositions.of(torch.tensor([17, 12]), tables, 8, 1000)
    assert (found.positions.tolist(), found.slots.tolist()) == ([15, 12], [1, 4])
    found = DevicePositions.of(torch.tensor([9, 6]), tables, 8, 6)
    assert (found.positions.tolist(), found.slots.tolist()) == ([5, 5], [1, 6])


def test_a_model_without_the_layer_is_refused(tmp_path):
    config = make_model.tiny_config(num_nextn_predict_layers=0)
    make_model.write_dense(tmp_path / "none", config, make_model.random_tensors(config))
    with refused("no MTP layer"):
        load(tmp_path / "none", draft_length=1)
    make_model.write_dense(
        tmp_path / "dropped", make_model.tiny_config(), make_model.random_tensors(config)
    )
    with refused(
        "promises MTP layer 3, of which no tensor is stored: left out; leave out --draft-length"
    ):
        load(tmp_path / "dropped", draft_length=1)
