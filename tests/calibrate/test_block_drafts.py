"""Accepted lengths of DSpark heads in reports, against the heads as they draft while serving."""

import json

import pytest
import torch
from block_heads import MODELS, block_after, write_with_head
from quantized import quantized
from small_recipe import SMALL, sequences_of

from quantkit.calibrate.recipe import Recipe
from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext


def served(path, texts):
    """Mean accepted length at every place of the texts: drafts after a text's own tokens, counted
    while they are the model's."""
    loaded = load_model(path, device="cpu", dtype="float32", mtp=1)
    head, lengths = loaded.block_head, []
    for ids in texts:
        hidden = loaded.model(ids, CausalContext([len(ids)]))
        own = loaded.model.logits(hidden).argmax(-1)
        keys = head.keys(hidden, torch.arange(len(ids)))
        for at in range(1, len(ids) - head.block_size + 1):
            block = block_after(head, keys, at, ids[at : at + 1])
            last = ids[at : at + head.block_size]
            drafts = (head.logits(block) + head.pair_logits(last)).argmax(-1)
            right = (drafts == own[at : at + head.block_size]).long()
            lengths.append(1 + int(right.cumprod(0).sum()))
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_accepted_lengths_are_those_of_both_models(name, tmp_path):
    source = write_with_head(tmp_path / "source", MODELS[name])
    recipe = Recipe(scheme="awq-w4a16", **SMALL)
    quantized(source, tmp_path / "out", recipe)
    report = json.loads((tmp_path / "out" / "report.json").read_text())["held_out"]
    texts = sequences_of(recipe, source).held_out
    for path, key in ((source, "accepted_length_source"), (tmp_path / "out", "accepted_length")):
        found = served(path, texts)
        assert 1.05 < found < 3.9
        assert report[key] == pytest.approx(found, abs=0.02)
    assert report["accepted_length_low"] < report["accepted_length"]
    assert report["accepted_length"] < report["accepted_length_high"]
