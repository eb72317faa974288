"""Latent attention without a low-rank projection of queries, and Kimi-Linear, against transformers
in float32 on tiny random models."""

import pytest
from refused import refused
from stated_logits import check_logits
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS
from transformers_peers import checkpoint_tensors, random_peer

from quantkit.models import find_architecture

CASES = TABLES["latent_cases"]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    peer = random_peer(*CASES[case])
    check_logits(peer, peer.config.to_dict(), published(peer), [70, 40, 1, 10])


def published(peer):
    """Tensors by the release's names: transformers writes dense layers under those of mixtures."""
    dense = [f"layers.{n}." for n in range(3) if not hasattr(peer.model.layers[n].mlp, "experts")]
    return {
        name.replace("block_sparse_moe", "mlp") if any(one in name for one in dense) else name: own
        for name, own in checkpoint_tensors(peer).items()
    }


def test_the_release_describes_layers_in_words_of_its_own():
    config = CONFIGS["kimi_linear"]
    read = find_architecture(config).Config.from_dict
    renamed = {**config, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    own = renamed.pop("linear_attn_config")
    renamed |= {"linear_num_heads": 2, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    assert read(config) == read(renamed)
    for fields in (
        {"kda_layers": [0, 1]},
        {"kda_layers": [1, 2, 3]},
        {"kda_layers": None},
        {"head_dim": 0},
    ):
        with refused("linear_attn_config|layer_types|head_dim"):
            read({**config, "linear_attn_config": {**own, **fields}})
