"""Llama, Qwen2, Qwen3 and Qwen3-MoE against transformers, in float32 on tiny random models."""

from typing import Any

import pytest
import torch
import transformers
from plain_weights import PlainWeights
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext

SHARED = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0]}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "attention_factor": 1.4,
    "truncate": False,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS}),
    # Tied, one key and value head, heads that are not hidden_size / heads wide.
    "llama-tied-mqa": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 80, "rope_parameters": YARN_ROPE}),
    "qwen2-mqa": ("Qwen2", {"hidden_size": 448, "num_key_value_heads": 1, "rope_parameters": YARN_ROPE}),
    "qwen3-tied-mqa": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 112}),
    "qwen3_moe-tied-mqa": ("Qwen3Moe", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 96, **EXPERTS}),
}


def random_peer(kind: str, extra: dict[str, Any]) -> Any:
    """A transformers model with every parameter drawn at random, biases and norms included."""
    config = getattr(transformers, f"{kind}Config")(**{**SHARED, **extra})
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        matrix, noise = parameter.ndim > 1, torch.randn_like(parameter)
        parameter.data = noise * 1.6 / parameter.shape[-1] ** 0.5 if matrix else 1 + noise * 0.3
    return model


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict in the names of published checkpoints: transformers holds experts stacked."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            prefix = name.rpartition(".")[0]
            for expert, weight in enumerate(tensor):
                parts = {"gate_proj": weight.chunk(2)[0], "up_proj": weight.chunk(2)[1]} if "gate_up" in name else {"down_proj": weight}
                tensors.update({f"{prefix}.{expert}.{side}.weight": part for side, part in parts.items()})
        else:
            tensors[name] = tensor
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    peer = random_peer(*CASES[case])
    config_dict = peer.config.to_dict()
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    tensors = checkpoint_tensors(peer)
    token_ids = torch.randint(0, 211, (2, 40))
    with torch.no_grad():
        expected = peer(token_ids).logits
        model = architecture.Model(config, PlainWeights(tensors))
        logits = model.logits(model(token_ids.flatten(), CausalContext([40, 40]))).view_as(expected)
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() < 1e-4

    table = {row.name: row.shape for row in architecture.parameters(config)}
    held = {name: tuple(tensor.shape) for name, tensor in tensors.items() if not (config.tie_word_embeddings and name == "lm_head.weight")}
    assert table == held


@pytest.mark.parametrize("case", CASES)
def test_folding_a_group_keeps_the_logits(case: str) -> None:
    """Each group lists every reader of its producer: scaling producer and consumers by hand changes nothing."""
    peer = random_peer(*CASES[case])
    config_dict = peer.config.to_dict()
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    tensors = checkpoint_tensors(peer)
    token_ids = torch.randint(0, 211, (30,))

    def logits(weights: dict[str, Tensor]) -> Tensor:
        model = architecture.Model(config, PlainWeights(weights))
        return model.logits(model(token_ids, CausalContext([30])))

    expected = logits(tensors)
    folded = dict(tensors)
    for layer in range(config.num_hidden_layers):
        for group in architecture.scale_groups(config, layer):
            producer = folded[f"{group.producer}.weight"]
            scale = torch.rand(producer.shape[0]) + 0.5
            folded[f"{group.producer}.weight"] = producer / (scale if group.producer_is_norm else scale[:, None])
            for consumer in group.consumers:
                folded[f"{consumer}.weight"] = folded[f"{consumer}.weight"] * scale
    assert (logits(folded) - expected).abs().max() < 1e-3 * expected.abs().max()
    assert not torch.equal(folded["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_fields_that_config_json_leaves_out_are_those_of_transformers(kind: str) -> None:
    """rope_theta, the width of Qwen3's heads, and a window that use_sliding_window: false turns off."""
    peer = getattr(transformers, f"{kind}Config")(num_experts=8, num_key_value_heads=8)
    config = {key: value for key, value in peer.to_dict().items() if key not in ("rope_parameters", "head_dim", "tie_word_embeddings")}
    config |= {"use_sliding_window": False, "sliding_window": 4096, "moe_intermediate_size": 64}
    ours = find_architecture(config).Config.from_dict(config)
    heads = getattr(peer, "head_dim", None) or peer.hidden_size // peer.num_attention_heads
    assert (ours.rope.theta, ours.head_dim, ours.tie_word_embeddings) == (10000.0, heads, False)


def test_unsupported_settings_are_refused() -> None:
    llama = random_peer("Llama", {}).config.to_dict()
    architecture = find_architecture(llama)
    others: dict[str, Any] = {
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
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
    for key, value in {"use_sliding_window": False, "layer_types": ["full_attention"] * 3, "final_logit_softcapping": None}.items():
        architecture.Config.from_dict({**llama, key: value})
    del llama["rms_norm_eps"]
    with pytest.raises(QuantkitError, match="rms_norm_eps"):
        architecture.Config.from_dict(llama)
    with pytest.raises(QuantkitError, match=r"mamba.*deepseek_v3"):
        find_architecture({"model_type": "mamba"})
