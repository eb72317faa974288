"""GLM-5.3-Flash against transformers, in float32 on tiny random models."""

import pytest
import torch
from refused import refused
from stated_logits import check_logits, check_mtp, mtp_tensors
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, write
from transformers_peers import POOLED, glm5_next

from quantkit.executor.weights.load import load_model

CASES = TABLES["glm5_next_cases"]
LENGTHS = [40, 7, 1]
"""Texts shorter and longer than a group of tokens, and than what is selected."""


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    check_logits(*glm5_next({**POOLED, **CASES[case]}), LENGTHS)


def test_the_mtp_layer_has_one_stream_and_reads_the_normed_output():
    """vLLM's glm5next/nvidia/mtp.py: a layer whose sublayers are added as they are."""
    kinds = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    peer, config_dict, tensors = glm5_next({**POOLED, **kinds})
    text = config_dict["text_config"]
    text |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    text["layer_types"] = ["indexed_attention", "linear_attention"]
    text["mlp_layer_types"] = ["dense", "sparse"]
    del text["indexer_types"]
    p, layer = "model.language_model.layers.2", peer.model.language_model.layers[2]

    def block(x):
        mask = torch.ones(1, 31, dtype=torch.bool)
        x = x + layer.self_attn(layer.input_layernorm(x), attention_mask=mask)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    tensors |= mtp_tensors(p, text["hidden_size"], "shared_head.norm")
    rows = check_mtp(peer, config_dict, tensors, p, "shared_head.norm", block)
    assert rows == {name for name in tensors if name.startswith(p) and ".hc_" not in name}


def test_groups_that_do_not_fill_a_block_are_computed_and_not_served(tmp_path):
    text = {**CONFIGS["glm5_next"]["text_config"], "index_topk": 12, "index_kpool": 3}
    with refused("index keys of 3 tokens each do not fill blocks of 64"):
        load_model(write(tmp_path / "model", "glm5_next", text_config=text), device="cpu")
