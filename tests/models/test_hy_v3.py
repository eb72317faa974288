"""Hy3's MTP layer, and what a release's config.json says that transformers' does not."""

import torch
from make_model import write_dense
from refused import refused
from stated_logits import causal, check_mtp, check_table, mtp_tensors
from transformers.models.hy_v3.modeling_hy_v3 import HYV3DecoderLayer
from transformers_peers import HY_V3, checkpoint_tensors, random_peer

from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.models import find_architecture, hy_v3

RELEASED = {
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "expert_hidden_dim": 32,
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
    "enable_lm_head_fp32": True,
    "enable_moe_fp32_combine": False,
}


def released():
    """A model of transformers, the config.json and the tensors of a release: the layer after the
    last one is the MTP layer's block."""
    peer = random_peer("HYV3", {**HY_V3, "num_hidden_layers": 3})
    config = {
        key: value for key, value in peer.config.to_dict().items() if key != "mlp_layer_types"
    }
    config |= {**RELEASED, "num_hidden_layers": 2}
    tensors = checkpoint_tensors(peer)
    tensors |= mtp_tensors("model.layers.2", 64, "final_layernorm")
    return peer, config, tensors


def test_the_mtp_layer_is_vllms_statement_around_transformers_block():
    peer, config, tensors = released()
    p, layer = "model.layers.2", peer.model.layers[2]
    assert isinstance(layer, HYV3DecoderLayer)

    def block(x):
        turned = peer.model.rotary_emb(x, torch.arange(31)[None])
        return layer(x, attention_mask=causal(31), position_embeddings=turned)

    rows = check_mtp(peer, config, tensors, p, "final_layernorm", block)
    assert rows == {name for name in tensors if name.startswith(p)}
    check_table(hy_v3.parameters(hy_v3.Config.from_dict(config)), tensors)


def test_a_hy3_of_another_kind_is_refused():
    _, config, _ = released()
    assert find_architecture(config) is hy_v3
    others = {
        "qk_norm": False,
        "route_norm": False,
        "moe_router_use_sigmoid": False,
        "attention_bias": True,
        "use_cla": True,
    }
    for key, value in {
        **others,
        "sliding_window": 8,
        "mlp_layer_types": ["dense"],
        "first_k_dense_replace": -1,
    }.items():
        with refused(key):
            hy_v3.Config.from_dict({**config, key: value})
    assert hy_v3.Config.from_dict({**config, "first_k_dense_replace": 5}).dense_layers == {0, 1}


def test_vllm_is_told_of_as_it_reads_config_json(tmp_path):
    """Its model reads expert_hidden_dim, which a release has and transformers does not write."""
    _, config, tensors = released()
    whole = Checkpoint.open(write_dense(tmp_path / "released", config, tensors))
    assert check_checkpoint("vllm", whole) == []
    lacking = {key: value for key, value in config.items() if key != "expert_hidden_dim"}
    (problem,) = check_checkpoint(
        "vllm", Checkpoint.open(write_dense(tmp_path / "other", lacking, tensors))
    )
    assert "vllm reads expert_hidden_dim in config.json" in problem.problem
