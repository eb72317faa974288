"""Qwen3.5's text models, dense and of experts, inside the whole ones, against transformers."""

import pytest
import torch
from quantkit_kernels.backends import use_backend
from stated_logits import check_logits
from transformers_peers import QWEN_3_5, QWEN_3_5_DENSE, whole


@pytest.mark.parametrize(("kind", "extra"), [("Qwen3_5Moe", QWEN_3_5), ("Qwen3_5", QWEN_3_5_DENSE)])
def test_logits_equal_transformers(kind, extra):
    peer, config, tensors = whole(extra, kind)
    text, flat = config["text_config"], {}
    for name, one in tensors.items():
        flat[name.replace("language_model.", "")] = one
    with use_backend("reference"):
        _, found, _ = check_logits(peer, config, tensors, [50])
        assert torch.equal(check_logits(peer, text, flat, [50])[1], found)
