"""The shipped weights run: transformers and quantkit's own forward agree on them, and they answer;
so does the MTP layer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext

ROOT = Path(__file__).parents[2]


def decode(codes, scale):
    """FP8 codes [N, K] times the scale of their 128 x 128 block."""
    rows, columns = torch.arange(codes.shape[0]) // 128, torch.arange(codes.shape[1]) // 128
    return codes.float() * scale[rows][:, columns]


@pytest.fixture(scope="module")
def peer(tiny_r1, tmp_path_factory):
    """transformers' DeepseekV3ForCausalLM with the decoded float32 weights."""
    from transformers import AutoModelForCausalLM

    dense = tmp_path_factory.mktemp("models") / "tiny-r1-float32"
    dense.mkdir()
    tensors = {}
    for shard in tiny_r1.glob("*.safetensors"):
        tensors |= load_file(shard)
    decoded = {
        name: decode(value, tensors[f"{name}_scale_inv"])
        if value.dtype == torch.float8_e4m3fn
        else value.float()
        for name, value in tensors.items()
        if not name.endswith("weight_scale_inv") and not name.startswith("model.layers.4.")
    }
    save_file(decoded, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny_r1 / "config.json").read_text())
    del config["quantization_config"]
    (dense / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_r1):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_r1)


@pytest.fixture(scope="module")
def loaded(tiny_r1):
    return load_model(tiny_r1, device="cpu", dtype="float32", mtp=True)


@pytest.fixture(scope="module")
def held_out(tokenizer):
    lines = (ROOT / "eval/data/tiny-heldout.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    return [
        tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids for line in lines
    ]


def test_logits_equal_transformers(peer, loaded, held_out):
    with torch.inference_mode():
        expected = torch.cat([peer(torch.tensor([ids])).logits[0] for ids in held_out])
        flat = torch.tensor([token for ids in held_out for token in ids])
        ours = loaded.model.logits(
            loaded.model(flat, CausalContext([len(ids) for ids in held_out]))
        )
    assert (ours - expected).abs().max() < 1e-3


def test_mtp_layer_guesses_the_token_after_next(loaded, held_out):
    """In the response nearly every guess is right: the reasoning follows from the question."""
    right = total = 0
    for ids in held_out:
        tokens = torch.tensor(ids)
        with torch.inference_mode():
            hidden = loaded.model(tokens, CausalContext([len(ids)]))
            (layer,) = loaded.mtp_layers
            guesses = layer.logits(
                layer(torch.roll(tokens, -1), hidden, CausalContext([len(ids)]))
            ).argmax(-1)
        start = ids.index(5)  # <think>
        right += int((guesses[start:-2] == tokens[start + 2 :]).sum())
        total += len(ids) - start - 2
    assert right / total > 0.97
