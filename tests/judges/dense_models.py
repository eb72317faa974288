"""Small models with random weights, in shapes that vLLM takes: what the judges compare engines on.

CONFIGS are dense, for vLLM on CPU: DeepSeek-V3 with first_k_dense_replace = layers and the head
sizes vLLM's MLA wants; Llama, Qwen2 and Qwen3 with grouped heads, and again with what small
releases have: the head tied to the embedding, one key and value head for all queries, heads of 80,
96 and 112 channels. Qwen2's have biases. EXPERTS are mixtures of experts, for vLLM on CUDA.
"""

import math
from typing import Any

import torch
from make_model import tiny_config
from torch import Tensor

from quantkit.models import find_architecture

_GROUPED: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

_LATENT = tiny_config(
    num_hidden_layers=2,
    num_nextn_predict_layers=0,  # an MTP layer has experts, and vLLM on CPU takes none quantized
    first_k_dense_replace=2,
    intermediate_size=512,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT,
    "llama": {**_GROUPED, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {**_GROUPED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {
        **_GROUPED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
    },
}
MISTRAL: dict[str, Any] = {
    **_GROUPED,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 8,
}
"""For transformers; vLLM on a CPU was not tried with it."""
_TIED: dict[str, Any] = {"tie_word_embeddings": True, "num_key_value_heads": 1}
CONFIGS |= {
    "llama-tied": {**CONFIGS["llama"], **_TIED, "num_attention_heads": 8, "head_dim": 80},
    "qwen2-tied": {
        **CONFIGS["qwen2"],
        **_TIED,
        "hidden_size": 384,
    },  # 4 heads of 96: Qwen2 has no head_dim
    "qwen3-tied": {**CONFIGS["qwen3"], **_TIED, "num_attention_heads": 8, "head_dim": 112},
}

_UNGROUPED = {
    key: value
    for key, value in _LATENT.items()
    if key not in ("rope_scaling", "n_group", "topk_group", "topk_method")
}
PANGU: dict[str, Any] = {
    **_UNGROUPED,
    "architectures": ["PanguUltraMoEForCausalLM"],
    "model_type": "pangu_ultra_moe",
    "first_k_dense_replace": 1,  # vLLM's class wants experts somewhere
    "sandwich_norm": True,
    "router_enable_expert_bias": True,
    "rope_interleave": True,  # vLLM's convention
}
"""Not dense: for engines that run experts unquantized."""

_WIDE = {"first_k_dense_replace": 1, "moe_intermediate_size": 256}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, **_WIDE, "num_nextn_predict_layers": 1},
    "qwen3_moe": {
        **_GROUPED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "pangu_ultra_moe": {**PANGU, **_WIDE},
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """BF16 tensors of every row of the architecture's table; logits come out with a standard
    deviation of about 4.

    The head is scaled up so that most positions have a clear first choice: near ties tell nothing
    about an engine.
    """
    architecture = find_architecture(config)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    rows = architecture.parameters(architecture.Config.from_dict(config))
    embedding = (
        "embedding" if any(row.role == "head" for row in rows) else "head"
    )  # what it is drawn as
    for row in rows:
        noise = torch.randn(row.shape, generator=generator)
        match embedding if row.role == "embedding" else row.role:
            case "norm":
                tensors[row.name] = (1 + 0.2 * noise).bfloat16()
            case "router_bias":
                tensors[row.other_name or row.name] = (
                    noise * 0.1
                )  # vLLM reads the second of openPangu's spellings
            case "bias" | "embedding":
                tensors[row.name] = noise.bfloat16()
            case "head":
                tensors[row.name] = (noise * 4 / math.sqrt(row.shape[1])).bfloat16()
            case _:
                tensors[row.name] = (noise / math.sqrt(row.shape[1])).bfloat16()
    return tensors
