"""Decoders with grouped-query attention against transformers, in float32 on tiny random models."""

from typing import Any

import pytest
import torch
import transformers
from plain_weights import PlainWeights
from quantkit_kernels.backends import asked
from scaled_groups import drawn_scale
from torch import Tensor
from transformers_peers import CASES, checkpoint_tensors, random_peer
from ulp_bound import assert_near, movement

from quantkit.common.errors import QuantkitError
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    peer = random_peer(*CASES[case])
    config_dict = peer.config.to_dict()
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    tensors = checkpoint_tensors(peer)
    token_ids = torch.randint(0, 211, (2, 40))
    with torch.no_grad(), asked("reference"):
        expected = peer(token_ids).logits
        model = architecture.Model(config, PlainWeights(tensors, config.mixture.linears))
        logits = model.logits(model(token_ids.flatten(), CausalContext([40, 40]))).view_as(expected)
        moved = movement(lambda: peer(token_ids).logits, peer.parameters())
    assert expected.abs().max() > 1
    assert_near(logits, expected, moved)

    table = {row.name: row.shape for row in architecture.parameters(config)}
    held = {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    assert table == held


@pytest.mark.parametrize("case", CASES)
def test_folding_a_group_keeps_the_logits(case: str) -> None:
    """Each group lists every reader of its producer: scaling producer and consumers by hand changes
    nothing."""
    peer = random_peer(*CASES[case])
    config_dict = peer.config.to_dict()
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    tensors = checkpoint_tensors(peer)
    token_ids = torch.randint(0, 211, (30,))

    def logits(weights: dict[str, Tensor]) -> Tensor:
        model = architecture.Model(config, PlainWeights(weights, config.mixture.linears))
        return model.logits(model(token_ids, CausalContext([30])))

    expected = logits(tensors)
    folded = dict(tensors)
    offsets = {row.name: row.gain_offset for row in architecture.parameters(config)}
    for layer in range(config.num_hidden_layers):
        for group in architecture.scale_groups(config, layer):
            producer, offset = (
                folded[f"{group.producer}.weight"],
                offsets[f"{group.producer}.weight"],
            )
            by, scale = drawn_scale(group, len(producer), lambda count: torch.rand(count) + 0.5)
            folded[f"{group.producer}.weight"] = (producer + offset) / (
                by if group.producer_is_norm else by[:, None]
            ) - offset
            for consumer in group.consumers:
                folded[f"{consumer}.weight"] = folded[f"{consumer}.weight"] * scale
    assert (logits(folded) - expected).abs().max() < 1e-3 * expected.abs().max()
    first = architecture.scale_groups(config, 0)[0].consumers[0]
    assert not torch.equal(folded[f"{first}.weight"], tensors[f"{first}.weight"])


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_fields_that_config_json_leaves_out_are_those_of_transformers(kind: str) -> None:
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


def test_more_dense_layers_than_layers_are_all_of_them() -> None:
    config = random_peer(*CASES["glm4_moe"]).config.to_dict() | {"first_k_dense_replace": 2**31 - 1}
    made = find_architecture(config).Config.from_dict(config)
    assert not any(made.is_moe(layer) for layer in range(made.num_hidden_layers))


def test_a_minimax_of_another_kind_is_refused() -> None:
    peer = random_peer(*CASES["minimax_m2"]).config.to_dict()
    architecture = find_architecture(peer)
    published = {
        "attn_type_list": [1, 1, 1],
        "use_mtp": True,
        "num_mtp_modules": 3,
        "use_routing_bias": True,
        "sliding_window": None,
    }
    architecture.Config.from_dict({**peer, **published})
    others = {
        "attn_type_list": [1, 0, 1],
        "use_routing_bias": False,
        "shared_intermediate_size": 64,
        "scoring_func": "softmax",
    }
    for key, value in others.items():
        with pytest.raises(QuantkitError, match=key):
            architecture.Config.from_dict({**peer, key: value})


def test_openpangu_embedded_is_llama_with_biases_of_attention() -> None:
    """By the vendor's modeling file: transformers has no class of its own for it."""
    peer = random_peer("Llama", {"attention_bias": True})
    config = {key: value for key, value in peer.config.to_dict().items() if key != "attention_bias"}
    config |= {"model_type": "PanguEmbedded", "bias": True}
    architecture, token_ids = find_architecture(config), torch.randint(0, 211, (20,))
    with torch.no_grad():
        model = architecture.Model(
            architecture.Config.from_dict(config), PlainWeights(checkpoint_tensors(peer))
        )
        assert (
            model.logits(model(token_ids, CausalContext([20]))) - peer(token_ids[None]).logits[0]
        ).abs().max() < 1e-4
    for key in ("mlp_bias", "param_sink_number"):
        with pytest.raises(QuantkitError, match=key):
            architecture.Config.from_dict({**config, key: True})
    with pytest.raises(QuantkitError, match="rope_theta"):
        architecture.Config.from_dict(
            {key: value for key, value in config.items() if key != "rope_parameters"}
        )


def test_unsupported_settings_are_refused() -> None:
    llama = random_peer("Llama", {}).config.to_dict()
    architecture = find_architecture(llama)
    others: dict[str, Any] = {
        "hidden_act": "gelu",
        "attention_bias": "yes",
        "mlp_bias": 1,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "attention_chunk_size": 8192,
        "logit_scale": 0.0625,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 3,
    }
    for key, value in others.items():
        with pytest.raises(QuantkitError, match=key):
            architecture.Config.from_dict({**llama, key: value})
    for key, value in {
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 3,
        "final_logit_softcapping": None,
    }.items():
        architecture.Config.from_dict({**llama, key: value})
    del llama["rms_norm_eps"]
    with pytest.raises(QuantkitError, match="rms_norm_eps"):
        architecture.Config.from_dict(llama)
    with pytest.raises(QuantkitError, match=r"mamba.*deepseek_v3"):
        find_architecture({"model_type": "mamba"})
