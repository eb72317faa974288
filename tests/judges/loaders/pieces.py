"""What an engine's parameters mean, by the checkpoint's modules: the words that loaders of every
engine tell their judge.

A piece is named MODULE|KIND. Kinds of a quantized linear [N, K] of one rank: codes, signed [N, K];
zero, as codes, [N, G]; scale [N, G]; global, the multiplier of FP4 scales []; scale_bias [N, 1].
value is a tensor that is not quantized.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Pieces = dict[str, Tensor]
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)


def linear_names(name):
    """The checkpoint's modules in an engine's linear, in the order of its rows."""
    parent, _, own = name.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED[own]] if own in FUSED else [name]


def int4_along_last(words):
    """int32 [..., n] to int8 [..., 8 n]: eight codes a word, the first in the low bits, two's
    complement."""
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return torch.where(nibbles > 7, nibbles - 16, nibbles).flatten(-2).to(torch.int8)


def unsigned_along_last(words, order=(), bits=4):
    """int32 [..., n] to int8 [..., 32 n / bits], made signed: those from the low bits up are
    numbers `order` of a word's codes."""
    fields = words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)
    fields &= 2**bits - 1
    codes = torch.empty_like(fields)
    codes[..., list(order) or slice(None)] = fields
    return (codes.flatten(-2) - 2 ** (bits - 1)).to(torch.int8)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def e2m1_along_last(pairs):
    """uint8 [..., n] to the values [..., 2 n], the first of two in the low bits."""
    return E2M1[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).long()]


def plain_pieces(name, module):
    own = dict(module.named_parameters(recurse=False))
    return {
        f"{name}.{key}".removesuffix(".weight").lstrip(".") + "|value": value
        for key, value in own.items()
    }


def sides(held):
    """Of experts' parameters those of w13, and those of w2."""
    return [
        {key.removeprefix(one): value for key, value in held.items() if key.startswith(one)}
        for one in ("w13_", "w2_")
    ]


def expert_pieces(name, w13, w2):
    """Parts [E, N, ...] of all experts; gate before up."""
    found = {}
    for kind, tensor in w13.items():
        for expert, both in enumerate(tensor):
            gate, up = both.chunk(2) if both.dim() else (both, both)
            found |= {
                f"{name}.{expert}.gate_proj|{kind}": gate,
                f"{name}.{expert}.up_proj|{kind}": up,
            }
    for kind, tensor in w2.items():
        found |= {f"{name}.{expert}.down_proj|{kind}": down for expert, down in enumerate(tensor)}
    return found


def run_forked(
    jobs,
    load,
):
    """Each job in a process of its own, forked after everything was imported: engines keep a
    model's settings in globals."""
    for job in jobs:
        child = os.fork()
        if child == 0:
            _run(job, load)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)
        if not Path(job["out"] + ".json").exists():
            Path(job["out"] + ".json").write_text(json.dumps({"error": "the process ended"}))


def _run(job, load):
    gc.disable()
    try:
        told, found = load(job)
        save_file(
            {name: tensor.detach().clone().contiguous() for name, tensor in found.items()},
            job["out"] + ".safetensors",
        )
    except Exception as fault:
        traceback.print_exc()
        told = {"error": f"{type(fault).__name__}: {fault}"}
    Path(job["out"] + ".json").write_text(json.dumps(told))
