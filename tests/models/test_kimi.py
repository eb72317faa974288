"""Kimi-K2 is DeepSeek-V3 in other numbers; in K2.5 and K2.6 it is the text model beside others."""

import make_model
import torch
from refused import refused

from quantkit.executor.weights.load import load_model
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext

TEXT = make_model.tiny_config(
    model_type="kimi_k2", num_hidden_layers=2, n_group=1, topk_group=1, num_nextn_predict_layers=0
)
WHOLE = {
    "model_type": "kimi_k25",
    "text_config": TEXT,
    "vision_config": {"hidden_size": 64},
    "vocab_size": TEXT["vocab_size"],
}


def logits(path):
    loaded = load_model(path, device="cpu", dtype="float32")
    with torch.inference_mode():
        return loaded.model.logits(loaded.model(torch.arange(5, 35), CausalContext([30])))


def test_the_text_model_computes_what_deepseek_v3_does(tmp_path):
    """Of the same weights, whose logits are held against transformers there."""
    tensors, vision = make_model.random_tensors(TEXT), torch.randn(128, 64).bfloat16()
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    named["vision_tower.encoder.blocks.0.mlp.fc0.weight"] = vision
    text = {**TEXT, "model_type": "deepseek_v3"}
    text = make_model.write_dense(tmp_path / "text", text, tensors)
    whole = make_model.write_dense(tmp_path / "whole", WHOLE, named)
    assert torch.equal(logits(text), logits(whole))


def test_what_is_not_computed_is_refused():
    architecture = find_architecture(WHOLE)
    with refused("text_config"):
        architecture.Config.from_dict({"model_type": "kimi_k25"})
    with refused("MTP"):
        architecture.Config.from_dict(
            {**WHOLE, "text_config": {**TEXT, "num_nextn_predict_layers": 1}}
        )
