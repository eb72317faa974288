"""Tiny random models of transformers, and their tensors as checkpoints are published: what our
forwards are held against."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from quantkit.checkpoint.tensor_aliases import aliases

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
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "attention_factor": 1.4,
    "truncate": False,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 48}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "head_dim": 24,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
}
HY_V3 = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "head_dim": 24,
    "router_scaling_factor": 1.7,
}
SOLAR = {key: value for key, value in GLM.items() if key != "num_mtp_layers"}
GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 24,
    "sliding_window": 9,
    "rope_parameters": YARN_ROPE,
}
QWEN_NEXT = {
    **EXPERTS,
    **SHARED_EXPERT,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
QWEN_3_5 = {
    key: value
    for key, value in QWEN_NEXT.items()
    if key not in ("norm_topk_prob", "mlp_only_layers")
} | {"num_hidden_layers": 4}
QWEN_3_5_DENSE = {
    key: value
    for key, value in QWEN_3_5.items()
    if "expert" not in key and key != "moe_intermediate_size"
}
LATENT = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
SPARSE = LATENT | {
    "index_topk": 7,
    "index_n_heads": 8,
    "index_head_dim": 16,
}
COMPRESSED = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 7},
    "index_n_heads": 24,
    "index_head_dim": 16,
    "index_topk": 3,
    "qk_rope_head_dim": 8,
    "num_hash_layers": 1,
    "swiglu_limit": 1.5,
}
"""DeepSeek-V4: without intermediate_size, which is another name of moe_intermediate_size there."""
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS}),
    # Tied, one key and value head, heads that are not hidden_size / heads wide.
    "llama-tied-mqa": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 80,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "qwen2-mqa": (
        "Qwen2",
        {"hidden_size": 448, "num_key_value_heads": 1, "rope_parameters": YARN_ROPE},
    ),
    "qwen3-tied-mqa": (
        "Qwen3",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 112},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": KINDS,
            "attention_bias": True,
        },
    ),
    "qwen3_moe-windows": (
        "Qwen3Moe",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, **EXPERTS},
    ),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 24}),
    "mistral-full": (
        "Mistral",
        {"sliding_window": None, "num_key_value_heads": 4, "rope_parameters": YARN_ROPE},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "mixtral-windows": (
        "Mixtral",
        {
            "num_local_experts": 6,
            "sliding_window": 8,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, **SHARED_EXPERT}),
    "qwen2_moe-windows": (
        "Qwen2Moe",
        {
            **EXPERTS,
            **SHARED_EXPERT,
            "mlp_only_layers": [],
            "use_sliding_window": True,
            "sliding_window": 6,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**GLM, "attention_bias": True, "use_qk_norm": True, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe-plain": (
        "Glm4Moe",
        {**GLM, "norm_topk_prob": False, "first_k_dense_replace": 0, "partial_rotary_factor": 0.25},
    ),
    "hy_v3": ("HYV3", HY_V3),
    "hy_v3-types": (
        "HYV3",
        {**HY_V3, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_key_value_heads": 4},
    ),
    "solar_open": (
        "SolarOpen",
        {**SOLAR, "n_group": 4, "topk_group": 2, "rope_parameters": YARN_ROPE},
    ),
    "solar_open-biases": ("SolarOpen", {**SOLAR, "attention_bias": True, "norm_topk_prob": False}),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "minimax_m2-whole": (
        "MiniMaxM2",
        {"num_local_experts": 8, "head_dim": 24, "num_key_value_heads": 4},
    ),
    "gpt_oss": ("GptOss", {**GPT_OSS, "rope_parameters": None}),
    "gpt_oss-full": (
        "GptOss",
        {
            **GPT_OSS,
            "num_key_value_heads": 4,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "qwen3_next": ("Qwen3Next", {**QWEN_NEXT, "num_hidden_layers": 4}),
    "qwen3_next-types": (
        "Qwen3Next",
        {
            **QWEN_NEXT,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "attention_bias": True,
        },
    ),
    "qwen3_moe-tied-mqa": (
        "Qwen3Moe",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 96, **EXPERTS},
    ),
}


def random_peer(kind: str, extra: dict[str, Any], model_class: str | None = None) -> Any:
    """A transformers model with every parameter drawn at random, biases and norms included.
    model_class: where it is not called so."""
    shared = {
        key: value
        for key, value in SHARED.items()
        if kind != "DeepseekV4" or key != "intermediate_size"
    }
    config = getattr(transformers, f"{kind}Config")(**{**shared, **extra})
    torch.manual_seed(7)
    model = getattr(transformers, model_class or f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        matrix, noise = parameter.ndim > 1, torch.randn_like(parameter)
        parameter.data = noise * 1.6 / parameter.shape[-1] ** 0.5 if matrix else 1 + noise * 0.3
        if name.endswith("A_log"):
            # States last. What forgets at once gives v (k q), whose norm divides by k q, which may
            # be nearly 0.
            parameter.data -= 5
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
        if name.endswith("tid2eid"):
            buffer.copy_(
                torch.rand(len(buffer), config.n_routed_experts).topk(buffer.shape[1]).indices
            )
    return model


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict in the names of published checkpoints, by transformers' own conversion: it
    holds experts stacked. Those that are published stacked too are taken apart here, by hand."""
    tensors: dict[str, Tensor] = {}
    stored = revert_weight_conversion(model, model.state_dict())
    names = aliases({"model_type": model.config.model_type}, stored)
    for name, tensor in stored.items():
        name = names.get(name, name)
        module, _, last = name.rpartition(".")
        if not module.endswith("experts"):
            tensors[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            weight = own.t() if own.dim() == 2 else own
            sides = (
                {"gate_proj": weight[::2], "up_proj": weight[1::2]}
                if last.startswith("gate_up")
                else {"down_proj": weight}
            )
            kind = "bias" if last.endswith("_bias") else "weight"
            tensors |= {
                f"{module}.{expert}.{side}.{kind}": part.contiguous()
                for side, part in sides.items()
            }
    return tensors


def whole(
    extra: dict[str, Any], kind: str = "Qwen3_5Moe"
) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """A random text model of Qwen3.5-MoE or Qwen3.5, with the config.json and the names of the
    model around it."""
    peer = random_peer(f"{kind}Text", extra, f"{kind}ForCausalLM")
    rope = {**peer.config.rope_parameters, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
    config = {
        "model_type": kind.lower().replace("moe", "_moe"),
        "text_config": {**peer.config.to_dict(), "rope_parameters": rope},
    }
    tensors = {}
    for name, tensor in checkpoint_tensors(peer).items():
        bare = name.replace("model.language_model.", "model.", 1)
        tensors[
            bare.replace("model.", "model.language_model.", 1)
            if bare.startswith("model.")
            else bare
        ] = tensor
    return peer, config, tensors
