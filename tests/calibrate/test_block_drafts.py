"""Accepted lengths of DSpark heads in reports, against the heads as they draft while serving."""

import json

import pytest
import torch
from block_heads import MODELS, write_with_head
from small_recipe import SMALL

from quantkit.calibrate.data import load_sequences
from quantkit.calibrate.recipe import Recipe
from quantkit.executor.weights.load import load_model
from quantkit.grids.schemes import SCHEMES
from quantkit.models.context import CausalContext
from quantkit.models.dspark import Window
from quantkit.quantization import quantize
from quantkit.tokenizer.chat import ChatTokenizer


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
            there = min(at, head.window)
            window = torch.zeros(1, head.window, *keys.shape[1:])
            window[0, head.window - there :] = keys[at - there : at]
            seen = torch.arange(head.window)[None] >= head.window - there
            block = head.hidden(ids[at : at + 1], torch.tensor([at]), Window(window, seen))[0]
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
    quantize(source, tmp_path / "out", SCHEMES["awq-w4a16"], "auto", recipe, device="cpu")
    report = json.loads((tmp_path / "out" / "report.json").read_text())["held_out"]
    texts = load_sequences(
        recipe.calibration,
        ChatTokenizer(source),
        samples=recipe.samples,
        held_out=recipe.held_out,
        seq_len=recipe.seq_len,
        seed=recipe.seed,
    ).held_out
    for path, key in ((source, "accepted_length_source"), (tmp_path / "out", "accepted_length")):
        found = served(path, texts)
        assert 1.05 < found < 3.9
        assert report[key] == pytest.approx(found, abs=0.02)
    assert report["accepted_length_low"] < report["accepted_length"]
    assert report["accepted_length"] < report["accepted_length_high"]
