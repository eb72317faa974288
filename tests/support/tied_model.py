"""A small Llama whose head is its embedding: what tests of tied checkpoints are made of."""

import math
from typing import Any

import torch
from torch import Tensor

from quantkit.models import find_architecture

TIED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def tied_tensors(config: dict[str, Any] = TIED, seed: int = 0) -> dict[str, Tensor]:
    """BF16 tensors of every row of the table, which has no head."""
    architecture = find_architecture(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        noise = torch.randn(row.shape, generator=generator)
        tensors[row.name] = (
            1 + 0.2 * noise if row.role == "norm" else noise * 2 / math.sqrt(row.shape[-1])
        ).bfloat16()
    return tensors
