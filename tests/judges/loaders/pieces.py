"""What an engine's parameters mean, by the checkpoint's modules: the words that loaders of every
engine tell their judge.

A piece is named MODULE|KIND. Kinds of a quantized linear [N, K] of one rank: codes, signed [N, K];
zero, as codes, [N, G]; scale [N, G]; global, the multiplier of FP4 scales []; scale_bias [N, 1].
value is a tensor that is not quantized.
"""

import gc
import json
import os
import re
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
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "fused_wkv_wgate": ("wkv", "wgate"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "qkv_conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "wk_weights_proj": ("wk", "weights_proj"),
}
# By family: what engines call modules, and the release.
_TEXT = {r"^model\.": "model.language_model."}
RELEASED = {
    "deepseek_v4": {
        r"^lm_head": "head",
        r"^model\.(embed_tokens|embed)\b": "embed",
        r"^model\.(?!layers)": "",
        r"^model\.layers": "layers",
        r"\.self_attn\.": ".attn.",
        r"\.mlp\.": ".ffn.",
        r"\.input_layernorm": ".attn_norm",
        r"\.post_attention_layernorm": ".ffn_norm",
        r"\.shared_head\.norm": ".norm",
        r"\.gate_proj": ".w1",
        r"\.down_proj": ".w2",
        r"\.up_proj": ".w3",
        r"\.gate\.e_score_correction_bias": ".gate.bias",
    },
    "glm5_next": _TEXT | {r"\.experts\.SHARED\.": ".shared_experts."},
    "qwen4_exp": {
        **_TEXT,
        r"(layers\.\d+\.)([qkvo]_(proj|norm)|indexer)": r"\1self_attn.\2",
    },
    "hy_v4": {r"\.shared_head\.norm": ".final_layernorm"},
}
MTP = {"deepseek_v4": "mtp.0.", "hy_v4": "mtp_layers.0."}
# Held a second time: the main model's head, what a recurrence reads; and parts of a table joined.
TWICE = r"shared_head\.head\||\.attn\.(A_log|dt_bias)\||\.dsa_attn\.|ngram_embedding\|"
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


def released(pieces, config):
    """By the release's names. Of DeepSeek-V4 MTP layers are apart and have no head, and sinks are of
    the rank's own heads: kernels have padded ones, and vllm-ascend's a product for each group of
    heads. SGLang makes GLM-5.3's shared expert the last of the routed ones, and has the rotated
    channels of Hy4's indexer first."""
    family = config["model_type"]
    names, found = RELEASED.get(family, {}), {}
    first = f"layers.{config.get('num_hidden_layers')}."
    shared = f".experts.{config.get('n_routed_experts')}."
    for name, tensor in pieces.items():
        name = name.replace(shared, ".experts.SHARED.")
        for engine, own in names.items():
            name = re.sub(engine, own, name)
        name = name.replace(first, MTP.get(family, first))
        if family == "hy_v4" and re.search(r"\.indexer\.(wq_b|wk|k_norm)", name):
            heads, rotated = (
                tensor.unflatten(0, (-1, config["index_head_dim"])),
                config["qk_rope_head_dim"],
            )
            tensor = heads.roll(-rotated, 1).flatten(0, 1)
        tensor = tensor[tensor.isfinite()] if name.endswith("attn_sink|value") else tensor
        if name.endswith("wo_a|value") and tensor.dim() == 3:
            tensor = tensor.mT.flatten(0, 1)
        tensor = tensor.flatten() if name.endswith("A_log|value") else tensor
        if not names or not re.search(TWICE, name):
            found[name] = tensor
    return found


def plain_pieces(name, module):
    own = dict(module.named_parameters(recurse=False))
    if name.endswith(".ple_embedding"):  # numbers of a hash
        own |= dict(module.named_buffers(recurse=False))
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
