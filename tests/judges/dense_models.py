"""Small models with random weights, in shapes that vLLM takes: what the judges compare engines on.

DENSE are dense, for vLLM on CPU: DeepSeek-V3 with first_k_dense_replace = layers and the head
sizes vLLM's MLA wants; Llama, Qwen2 and Qwen3 with grouped heads, and again with what small
releases have: the head tied to the embedding, one key and value head for all queries, heads of 80,
96 and 112 channels. Qwen2's have biases. EXPERTS are mixtures of experts, for vLLM on CUDA.
"""

import math

import torch
from make_model import CONFIGS

from quantkit.models import find_architecture

DENSE = CONFIGS["dense"]
EXPERTS = CONFIGS["experts"]


def random_weights(config, seed=0):
    """BF16 tensors of every row of the architecture's table; logits come out with a standard
    deviation of about 4.

    The head is scaled up so that most positions have a clear first choice: near ties tell nothing
    about an engine.
    """
    architecture = find_architecture(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
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
