"""Accepted lengths of DSpark heads in reports, against the heads as they draft while serving."""

import json

import pytest
import torch
from block_heads import MODELS, block_after, head_rows, write_with_head
from letters import write_letters
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
    text = write_letters(tmp_path / "text.jsonl", 2000)
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), **SMALL | {"held_out": 4})
    quantized(source, tmp_path / "out", recipe)
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    linears = [row.module for row in head_rows(MODELS[name]) if row.role == "linear"]
    assert sum("gptq" in facts["methods"][one] for one in linears) > len(linears) / 2
    report = facts["held_out"]
    sequences = sequences_of(recipe, source)
    texts = {"": sequences.held_out, "_own": [sequences.held_out[one] for one in sequences.written]}
    for path, end in ((source, "_source"), (tmp_path / "out", "")):
        for name, own in texts.items():
            found = served(path, own)
            assert 1.05 < found < 3.9
            assert report[f"accepted_length{name}{end}"] == pytest.approx(found, abs=0.02)
    assert report["accepted_length_low"] < report["accepted_length"]
    assert report["accepted_length"] < report["accepted_length_high"]
