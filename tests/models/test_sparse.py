"""Sparse attention of DeepSeek-V3.2 and GLM-5 against transformers, in float32 on tiny random
models."""

import pytest
import torch
from quantized import quantized
from refused import refused
from stated_logits import check_logits, opened
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, write
from transformers_peers import checkpoint_tensors, random_peer

from quantkit.calibrate.recipe import Recipe
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext

CASES = TABLES["sparse_cases"]
"""7 tokens of up to 40 are seen."""


def model_of(case):
    """Of transformers, its config.json and its tensors."""
    peer = random_peer(*CASES[case])
    return peer, peer.config.to_dict(), checkpoint_tensors(peer)


@torch.no_grad()
def logits(config_dict, tensors, lengths, token_ids):
    architecture, config, weights = opened(config_dict, tensors)
    model = architecture.Model(config, weights)
    return model.logits(model(token_ids, CausalContext(lengths)))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Sequences longer than index_topk, as long, and shorter."""
    peer, config, tensors = model_of(case)
    lengths, token_ids = [40, 7, 5, 31], torch.randint(0, 211, (83,))
    _, _, found = check_logits(peer, config, tensors, lengths, token_ids)
    seeing_all = logits({**config, "index_topk": 40}, tensors, lengths, token_ids)
    assert (seeing_all - found).abs().max() > 1e-2, "the selection did nothing"


def test_up_to_topk_tokens_it_is_dense_attention():
    """DeepSeek-V3 over the same weights, to the bit."""
    (_, config, tensors), ids = model_of("deepseek_v32"), torch.arange(1, 41)
    dense = {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_nextn_predict_layers": 0}
    found = (logits({**config, **own}, tensors, [40], ids) for own in (dense, {"index_topk": 40}))
    assert torch.equal(*found)


def test_the_first_layer_shares_nothing():
    glm = {**CONFIGS["glm_moe_dsa"], "num_hidden_layers": 3}
    make = find_architecture(glm).Config.from_dict
    assert make({**glm, "index_topk_pattern": "FFS"}).indexer_types[2] == "shared"
    with refused("first layer"):
        make({**glm, "index_topk_pattern": "SFF"})


def test_a_layer_that_shares_is_not_computed_alone_on_long_texts():
    architecture, config, weights = opened(*model_of("glm_moe_dsa-shared")[1:])
    layer = architecture.DecoderLayer(config, 1, weights)
    layer.attend(torch.randn(7, 64), CausalContext([7]))
    with refused("at most 7 tokens"):
        layer.attend(torch.randn(8, 64), CausalContext([8]))


def test_a_calibration_on_longer_texts_is_refused_before_it_begins(tmp_path):
    source = write(tmp_path / "model", "glm_moe_dsa", index_topk_pattern="FS")
    recipe = Recipe(scheme="awq-w4a16", seq_len=13)
    with refused("12 at most"):
        quantized(source, tmp_path / "out", recipe)
    quantized(source, tmp_path / "out", Recipe(scheme="rtn-w4a16", seq_len=13))
