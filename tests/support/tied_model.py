"""A small Llama whose head is its embedding: what tests of tied checkpoints are made of."""

import math

import torch
from make_model import CONFIGS

from quantkit.models import find_architecture

TIED = CONFIGS["tied"]


def tied_tensors(config=TIED, seed=0):
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
