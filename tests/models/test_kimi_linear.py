"""Latent attention without a low-rank projection of queries, and Kimi-Linear, against transformers
in float32 on tiny random models."""

import pytest
import torch
from plain_weights import PlainWeights
from refused import refused
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS
from transformers_peers import checkpoint_tensors, random_peer
from ulp_bound import assert_near, movement

from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.mlp import PROJ_NAMES

CASES = TABLES["latent_cases"]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    kind, extra = CASES[case]
    peer = random_peer(kind, extra)
    config_dict = peer.config.to_dict()
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    tensors = published(peer)
    token_ids, lengths = torch.randint(0, 211, (121,)), [70, 40, 1, 10]

    def expected():
        return torch.cat([peer(one[None]).logits[0] for one in token_ids.split(lengths)])

    with torch.no_grad():
        names = config.mixture.linears if kind == "KimiLinear" else PROJ_NAMES
        model = architecture.Model(config, PlainWeights(tensors, names))
        logits = model.logits(model(token_ids, CausalContext(lengths)))
        assert expected().abs().max() > 1
        assert_near(logits, expected(), movement(expected, peer.parameters()))
    table = {row.name: row.shape for row in architecture.parameters(config)}
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


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
