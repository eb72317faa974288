"""Hy3's MTP layer, and what a release's config.json says that transformers' does not."""

import torch
from make_model import write_dense
from plain_weights import PlainWeights
from refused import refused
from torch.nn.functional import linear
from transformers.models.hy_v3.modeling_hy_v3 import HYV3DecoderLayer
from transformers_peers import HY_V3, checkpoint_tensors, random_peer

from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.models import find_architecture, hy_v3
from quantkit.models.context import CausalContext

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
    for name in ("enorm", "hnorm", "final_layernorm"):
        tensors[f"model.layers.2.{name}.weight"] = 1 + torch.randn(64) * 0.3
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(64, 128) * 0.1
    return peer, config, tensors


def normed(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


def test_the_mtp_layer_is_vllms_statement_around_transformers_block():
    """vLLM: eh_proj over both norms, a decoder layer, final_layernorm, the main model's head;
    hidden states behind the final norm."""
    peer, config, tensors = released()
    made = hy_v3.Config.from_dict(config)
    assert {row.name: row.shape for row in hy_v3.parameters(made)} == {
        name: tuple(one.shape) for name, one in tensors.items()
    }
    weights, p = PlainWeights(tensors), "model.layers.2"
    model, mtp = hy_v3.Model(made, weights), hy_v3.MtpLayer(made, weights)
    mtp.follow(model)
    token_ids, next_ids = torch.randint(0, 211, (2, 30))
    block = peer.model.layers[2]
    assert isinstance(block, HYV3DecoderLayer)
    with torch.no_grad():
        hidden = model(token_ids, CausalContext([30]))
        ours = mtp.logits(mtp(next_ids, hidden, CausalContext([30])))
        embedded = normed(
            tensors["model.embed_tokens.weight"][next_ids], tensors[f"{p}.enorm.weight"]
        )
        inputs = linear(
            torch.cat((embedded, normed(hidden, tensors[f"{p}.hnorm.weight"])), dim=-1),
            tensors[f"{p}.eh_proj.weight"],
        )
        turned = peer.model.rotary_emb(inputs[None], torch.arange(30)[None])
        mask = torch.full((30, 30), float("-inf")).triu(1)[None, None]
        out = block(inputs[None], attention_mask=mask, position_embeddings=turned)[0]
        expected = linear(
            normed(out, tensors[f"{p}.final_layernorm.weight"]), tensors["lm_head.weight"]
        )
    assert expected.abs().max() > 1
    assert (ours - expected).abs().max() < 1e-4


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
