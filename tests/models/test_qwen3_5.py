"""Qwen3.5's text models, dense and of experts, inside the whole ones, against transformers; experts
stacked as published."""

import json

import pytest
import torch
from quantkit_kernels.backends import use_backend
from safetensors.torch import save_file
from stated_logits import check_logits
from transformers_peers import QWEN_3_5, QWEN_3_5_DENSE, whole

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.stored_parameters import check_stored, read_model

VISION = "model.visual.patch_embed.proj.weight"


@pytest.mark.parametrize(("kind", "extra"), [("Qwen3_5Moe", QWEN_3_5), ("Qwen3_5", QWEN_3_5_DENSE)])
def test_logits_equal_transformers(kind, extra):
    peer, config, tensors = whole(extra, kind)
    text, flat = config["text_config"], {}
    for name, one in tensors.items():
        flat[name.replace("language_model.", "")] = one
    with use_backend("reference"):
        _, found, _ = check_logits(peer, config, tensors, [50])
        assert torch.equal(check_logits(peer, text, flat, [50])[1], found)


def test_stacked_experts_are_those_of_one_by_one(tmp_path):
    """gate's rows, then up's, as transformers holds them; a vision tower and an MTP layer are no
    faults."""
    _, config, tensors = whole(QWEN_3_5)
    stacked = {name: one for name, one in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        sides = {
            side: torch.stack([tensors[f"{prefix}.{e}.{side}_proj.weight"] for e in range(8)])
            for side in ("gate", "up", "down")
        }
        stacked |= {
            f"{prefix}.gate_up_proj": torch.cat((sides["gate"], sides["up"]), dim=1),
            f"{prefix}.down_proj": sides["down"],
        }
    beside = {VISION: torch.zeros(2, 3), "mtp.fc.weight": torch.zeros(4, 4)}
    save_file(
        {name: one.contiguous() for name, one in (stacked | beside).items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    checkpoint = Checkpoint.open(tmp_path)
    check_stored(checkpoint, read_model(checkpoint).rows)
    assert checkpoint.tensors.keys() == tensors.keys() | beside.keys()
    assert all(torch.equal(checkpoint.read(name), one) for name, one in tensors.items())
