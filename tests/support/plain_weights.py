"""Model weights held as a plain dict of full-precision tensors: the simplest answer to what a
forward asks."""

from itertools import count, takewhile
from types import SimpleNamespace

import torch
from quantkit_kernels import SILU, add_rms_norm
from torch.nn import functional as F

from quantkit.models.mlp import PROJ_NAMES

TOKENS = torch.arange(512)
"""Of an n-gram table that hashes classes of tokens: each is its own."""


class PlainWeights:
    def __init__(self, tensors, names=PROJ_NAMES):
        """names: of the routed experts' linears."""
        self.tensors, self.names = tensors, names

    def tensor(self, name):
        return self.tensors[name]

    def has(self, name):
        return name in self.tensors

    def input_rotation(self, module):
        return 0

    def dequantized(self, module):
        return self.tensors[f"{module}.weight"]

    def linear(self, module):
        weight = self.dequantized(module)
        return lambda x: F.linear(x, weight)

    def fused_linear(self, modules):
        weight = torch.cat([self.dequantized(module) for module in modules])
        return lambda x: F.linear(x, weight)

    def mla_prolog(self, modules, kv_b, gains, eps, rope):
        return None

    def ngram_table(self, module):
        names = (f"{module}.shard_{part}.weight" for part in count())
        names = [*takewhile(self.has, names)] or [f"{module}.weight"]
        table = torch.cat([self.tensors[name] for name in names])
        if self.has(f"{module}.scale"):
            scales = self.tensors[f"{module}.scale"]
            table = table * scales.repeat_interleave(table.shape[1] // scales.shape[1], dim=1)
        return SimpleNamespace(rows=lambda numbers: table[numbers], classes=lambda: TOKENS)

    def experts(self, prefix, num_experts, gating=SILU):
        def run(x, topk_ids, topk_weights):
            out = torch.zeros_like(x)
            for expert in range(num_experts):
                modules = self.names.modules(f"{prefix}.{expert}")
                gate, up, down = (
                    (self.dequantized(module), self.tensors.get(f"{module}.bias"))
                    for module in modules
                )
                gated = gating.rotated(self.input_rotation(modules[2]))
                share = (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True)
                out += share * F.linear(gated(F.linear(x, *gate), F.linear(x, *up)), *down)
            return out

        return run

    def experts_with_shared(self, prefix, num_experts, shared):
        return None

    def all_reduce(self, x):
        return x

    def add_rms_norm(self, x, residual, gain, eps):
        return add_rms_norm(x, residual, gain, eps)
