"""The fixture checkpoint is what it says: loadable by other people's code."""

import json
from pathlib import Path

import make_model
import torch
from safetensors import safe_open


def test_fp8_layout(tiny_checkpoint: Path) -> None:
    weight_map = json.loads((tiny_checkpoint / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert len(set(weight_map.values())) == 3
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    with safe_open(tiny_checkpoint / weight_map[name], "pt") as shard:
        assert shard.get_tensor(name).dtype == torch.float8_e4m3fn
    with safe_open(tiny_checkpoint / weight_map[f"{name}_scale_inv"], "pt") as shard:
        assert shard.get_tensor(f"{name}_scale_inv").shape == (2, 2)


def test_fp8_values_are_near_the_weights() -> None:
    tensors = make_model.random_tensors(make_model.tiny_config())
    name = "model.layers.0.mlp.down_proj.weight"
    error = (make_model.fp8_values(tensors)[name] - tensors[name].float()).norm() / tensors[
        name
    ].float().norm()
    assert 0 < error < 0.04


def test_tokenizer_renders_and_round_trips(tiny_checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    assert tokenizer.decode(tokenizer.encode("Zürich 12 + 3")) == "Zürich 12 + 3"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("hi<｜Assistant｜><think>\n")
    assert tokenizer.encode(text)[0] == 0
