"""Accepted lengths of DSpark heads in reports, against the heads as they draft while serving."""

import json

import pytest
import torch
from block_heads import MODELS, block_after, head_rows, write_with_head
from letters import write_letters
from quantized import quantized
from small_recipe import SMALL, sequences_of

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext
from quantkit.models.expert_counts import FILE_NAME, ExpertCounts

_OF_HEAD = "dspark_n_routed_experts"


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


def test_experts_of_a_head_are_neither_pruned_nor_placed(tmp_path):
    """They are as many as the main model's were, where config.json does not say."""
    config = MODELS["deepseek_v41"]
    text = {key: one for key, one in config["text_config"].items() if key != _OF_HEAD}
    source = write_with_head(tmp_path / "source", {**config, "text_config": text})
    quantized(source, tmp_path / "out", Recipe(scheme="awq-w4a16", prune=0.25, **SMALL))
    linears = Checkpoint.open(tmp_path / "out").linears
    assert "mtp.1.ffn.experts.3.w1" in linears
    assert "layers.0.ffn.experts.2.w1" in linears
    assert "layers.0.ffn.experts.3.w1" not in linears
    assert load_model(tmp_path / "out", device="cpu", mtp=1).block_head is not None
    assert {*ExpertCounts.read(tmp_path / "out" / FILE_NAME).layers} == {*range(5)}, "for place"
