"""Decoders with grouped-query attention against transformers, in float32 on tiny random models."""

import pytest
import torch
import transformers
from plain_weights import PlainWeights
from quantkit_kernels import Dense, rms_norm, silu_and_mul
from quantkit_kernels.backends import use_backend
from quantkit_kernels.reference.linear import ReferenceLinear
from refused import refused
from stated_logits import check_logits, opened
from transformers_peers import CASES, checkpoint_tensors, random_peer

from quantkit.models import find_architecture
from quantkit.models.context import CausalContext


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    peer = random_peer(*CASES[case])
    with use_backend("reference"):
        check_logits(peer, peer.config.to_dict(), checkpoint_tensors(peer), [40, 40])


class OneLaunch(ReferenceLinear):
    """Computes what is around it for any number of rows."""

    def fuses(self, rows):
        return True

    def in_one_launch(self, x, gain, eps, residual):
        x = x if gain is None else rms_norm(x, gain, eps)
        y = self(x if x.shape[1] == self.in_features else silu_and_mul(x))
        return y if residual is None else y + residual


class FusingWeights(PlainWeights):
    def linear(self, module):
        return OneLaunch(Dense(self.dequantized(module)), torch.float32, torch.device("cpu"))

    def fused_linear(self, modules):
        both = torch.cat([self.dequantized(module) for module in modules])
        return OneLaunch(Dense(both), torch.float32, torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_linears_may_compute_norms_and_sums(case):
    peer, token_ids = random_peer(*CASES[case]), torch.randint(1, 211, (9,))
    architecture, config, weights = opened(peer.config.to_dict(), checkpoint_tensors(peer))
    fusing = FusingWeights(weights.tensors, weights.names)
    with use_backend("reference"):
        model, plain = (architecture.Model(config, one) for one in (fusing, weights))
        found, expected = (one(token_ids, CausalContext([9])) for one in (model, plain))
        first = model.layers[0].fused(model.embedding[token_ids], CausalContext([9]))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (first is None) == (config.is_moe(0) or config.delta(0) is not None)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_fields_that_config_json_leaves_out_are_those_of_transformers(kind):
    """rope_theta, the width of Qwen3's heads, and a window that use_sliding_window: false turns
    off."""
    peer = getattr(transformers, f"{kind}Config")(num_experts=8, num_key_value_heads=8)
    config = {
        key: value
        for key, value in peer.to_dict().items()
        if key not in ("rope_parameters", "head_dim", "tie_word_embeddings")
    }
    config |= {"use_sliding_window": False, "sliding_window": 4096, "moe_intermediate_size": 64}
    ours = find_architecture(config).Config.from_dict(config)
    heads = getattr(peer, "head_dim", None) or peer.hidden_size // peer.num_attention_heads
    assert (ours.rope.theta, ours.head_dim, ours.tie_word_embeddings) == (10000.0, heads, False)


def test_more_dense_layers_than_layers_are_all_of_them():
    config = random_peer(*CASES["glm4_moe"]).config.to_dict() | {"first_k_dense_replace": 2**31 - 1}
    made = find_architecture(config).Config.from_dict(config)
    assert not any(made.is_moe(layer) for layer in range(made.num_hidden_layers))


def test_openpangu_embedded_is_llama_with_biases_of_attention():
    """By the vendor's modeling file: transformers has no class of its own for it."""
    peer = random_peer("Llama", {"attention_bias": True})
    config = {key: value for key, value in peer.config.to_dict().items() if key != "attention_bias"}
    config |= {"model_type": "PanguEmbedded", "bias": True}
    check_logits(peer, config, checkpoint_tensors(peer), [20])
    architecture = find_architecture(config)
    for key in ("mlp_bias", "param_sink_number"):
        with refused(key):
            architecture.Config.from_dict({**config, key: True})
    with refused("rope_theta"):
        architecture.Config.from_dict(
            {key: value for key, value in config.items() if key != "rope_parameters"}
        )


def test_what_config_json_lacks_is_named():
    llama = random_peer("Llama", {}).config.to_dict()
    architecture = find_architecture(llama)
    del llama["rms_norm_eps"]
    with refused("rms_norm_eps"):
        architecture.Config.from_dict(llama)
    with refused(r"mamba.*deepseek_v3"):
        find_architecture({"model_type": "mamba"})
