"""Models of published sizes: facts of their config.json, by name.

    config(name)                   few layers, experts and tokens, every other size as published
    narrow(name)                   the widths smaller, each divided by the same powers of two
    write(path, config)            random weights
    write_headers(path, config)    no weights: the shard is a sparse file

Sizes are from memory of the releases, those of `_DEFAULTS` from transformers' configuration classes.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from make_model import write_dense, write_tokenizer
from tiny_models import CONFIGS, random_tensors
from transformers_peers import checkpoint_tensors

from quantkit.models import find_architecture, is_known

_DENSE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_MOE = (*_DENSE, "moe_intermediate_size")


def _dense(*sizes: int, **more: Any) -> dict[str, Any]:
    """hidden_size, intermediate_size, heads, key and value heads."""
    return dict(zip(_DENSE, sizes)) | {"head_dim": sizes[0] // sizes[2]} | more


def _moe(*sizes: int, **more: Any) -> dict[str, Any]:
    """As `_dense`, and moe_intermediate_size."""
    return dict(zip(_MOE, sizes)) | more


_NEXT = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": ("llama", _dense(576, 1536, 9, 3)),
    "SmolLM2-360M": ("llama", _dense(960, 2560, 15, 5)),
    "TinyLlama-1.1B": ("llama", _dense(2048, 5632, 32, 4)),
    "Llama-2-7B": ("llama", _dense(4096, 11008, 32, 32)),
    "Llama-2-13B": ("llama", _dense(5120, 13824, 40, 40)),
    "Llama-3.1-8B": ("llama", _dense(4096, 14336, 32, 8)),
    "OpenLLaMA-3B": ("llama", _dense(3200, 8640, 32, 32)),
    "Falcon3-7B": ("llama", _dense(3072, 23040, 12, 4)),
    "openPangu-Embedded-1B": ("PanguEmbedded", _dense(1536, 6144, 12, 6)),
    "openPangu-Embedded-7B": ("PanguEmbedded", _dense(4096, 12800, 32, 8)),
    "Mistral-7B": ("mistral", _dense(4096, 14336, 32, 8)),
    "Mistral-Nemo": ("mistral", _dense(5120, 14336, 32, 8) | {"head_dim": 128}),
    "Mixtral-8x7B": ("mixtral", _dense(4096, 14336, 32, 8)),
    "Qwen2.5-0.5B": ("qwen2", _dense(896, 4864, 14, 2)),
    "Qwen2.5-1.5B": ("qwen2", _dense(1536, 8960, 12, 2)),
    "Qwen2.5-7B": ("qwen2", _dense(3584, 18944, 28, 4)),
    "Qwen2.5-72B": ("qwen2", _dense(8192, 29568, 64, 8)),
    "Qwen3-0.6B": ("qwen3", _dense(1024, 3072, 16, 8) | {"head_dim": 128}),
    "Qwen3-4B": ("qwen3", _dense(2560, 9728, 32, 8) | {"head_dim": 128}),
    "Qwen3-30B-A3B": ("qwen3_moe", _moe(2048, 6144, 32, 4, 768, head_dim=128)),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        _moe(2048, 5632, 16, 16, 1408, shared_expert_intermediate_size=5632, head_dim=128),
    ),
    "Qwen2-57B-A14B": (
        "qwen2_moe",
        _moe(3584, 18944, 28, 4, 2560, shared_expert_intermediate_size=20480, head_dim=128),
    ),
    "gpt-oss-20b": ("gpt_oss", _dense(2880, 2880, 64, 8) | {"head_dim": 64}),
    "GLM-4.5-Air": ("glm4_moe", _moe(4096, 10944, 96, 8, 1408, head_dim=128)),
    "GLM-4.5": ("glm4_moe", _moe(5120, 12288, 96, 8, 1536, head_dim=128)),
    "MiniMax-M2": ("minimax_m2", _dense(3072, 1536, 48, 8) | {"head_dim": 128, "rotary_dim": 64}),
    "Qwen3-Next-80B": (
        "qwen3_next",
        _moe(2048, 5120, 16, 2, 512, head_dim=256, shared_expert_intermediate_size=512, **_NEXT),
    ),
    "DeepSeek-V3.2": ("deepseek_v32", _moe(7168, 18432, 128, 128, 2048, **_LATENT)),
    "GLM-5": ("glm_moe_dsa", _moe(6144, 12288, 64, 64, 2048, **_LATENT)),
    "Kimi-K2": ("kimi_k2", _moe(7168, 18432, 64, 64, 2048, **_LATENT)),
    "Kimi-K2.5": ("kimi_k25", _moe(7168, 18432, 64, 64, 2048, **_LATENT)),
    "DeepSeek-R1": ("deepseek_v3", _moe(7168, 18432, 128, 128, 2048, **_LATENT)),
    "openPangu-Ultra-MoE": ("pangu_ultra_moe", _moe(7680, 18432, 128, 128, 2048, **_LATENT)),
    "openPangu-2.0-Flash": ("openpangu_v2", _moe(4096, 12288, 64, 64, 1536, **_LATENT)),
    "DeepSeek-V4-Flash": (
        "deepseek_v4",
        {"hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 2048}
        | {"head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024}
        | {"qk_rope_head_dim": 64},
    ),
}
"""By architectures that quantkit has a file for."""
_DEFAULTS = {"Hy3": "hy_v3", "Solar-Open": "solar_open"} | {
    "Qwen3.5": "qwen3_5",
    "Qwen3.5-MoE": "qwen3_5_moe",
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-2-2b": ("gemma2", _dense(2304, 9216, 8, 4) | {"head_dim": 256}),
    "gemma-3-1b": ("gemma3_text", _dense(1152, 6912, 4, 1) | {"head_dim": 256}),
    "gemma-3-270m": ("gemma3_text", _dense(640, 2048, 4, 1) | {"head_dim": 256}),
    "phi-2": ("phi", _dense(2560, 10240, 32, 32)),
    "Phi-3-mini": ("phi3", _dense(3072, 8192, 32, 32)),
    "phi-4": ("phi3", _dense(5120, 17920, 40, 10)),
    "starcoder2-3b": ("starcoder2", _dense(3072, 12288, 24, 2)),
    "granite-3.1-8b": ("granite", _dense(4096, 12800, 32, 8)),
    "pythia-160m": ("gpt_neox", _dense(768, 3072, 12, 12)),
    "falcon-7b": ("falcon", _dense(4544, 18176, 71, 71) | {"new_decoder_architecture": False}),
    "stablelm-3b": ("stablelm", _dense(2560, 6912, 32, 32)),
    "glm-4-9b": ("glm", _dense(4096, 13696, 32, 2)),
    "SmolLM3-3B": ("smollm3", _dense(2048, 11008, 16, 4)),
    "Nemotron-Mini-4B": ("nemotron", _dense(3072, 9216, 24, 8)),
    "opt-1.3b": (
        "opt",
        _dense(2048, 8192, 32, 32) | {"ffn_dim": 8192, "word_embed_proj_dim": 2048},
    ),
    "bloom-560m": ("bloom", {"hidden_size": 1024, "n_head": 16}),
    "Seed-OSS-36B": ("seed_oss", _dense(5120, 27648, 80, 8) | {"head_dim": 128}),
    "Hunyuan-0.5B": ("hunyuan_v1_dense", _dense(1024, 3584, 16, 8) | {"head_dim": 128}),
    "Apertus-8B": ("apertus", _dense(4096, 21504, 32, 8)),
}
"""By architectures that quantkit has no file for."""
NAMES = (*KNOWN, *_DEFAULTS, *OTHERS)

_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "ffn_dim")
_WIDTHS += ("shared_expert_intermediate_size", "word_embed_proj_dim")
_CUT = {"num_hidden_layers": 2, "vocab_size": 320, "max_position_embeddings": 1024}
_IDS = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}
_HEAD = 32


def config(name: str) -> dict[str, Any]:
    """config.json of a model, cut in layers, experts and vocabulary."""
    family, sizes = _sizes(name)
    return _made(family, sizes)


def narrow(name: str) -> dict[str, Any]:
    """The same with smaller widths, that of all heads of an attention included. Each keeps its
    greatest common divisor with 128, and whether it is a power of two."""
    family, sizes = _sizes(name)
    found = {key: _narrower(sizes[key]) for key in _WIDTHS if key in sizes}
    if "num_attention_heads" in sizes and "q_lora_rank" not in sizes:
        heads, alike = sizes["num_attention_heads"], sizes.get("num_key_value_heads")
        count = _narrower(heads * sizes["head_dim"]) // _HEAD
        few = count if alike in (heads, None) else 1
        found |= {"num_attention_heads": count, "num_key_value_heads": few, "head_dim": _HEAD}
        found |= {"rotary_dim": 16} if "rotary_dim" in sizes else {}
    if "n_head" in sizes:
        found |= {"n_head": found["hidden_size"] // _HEAD}
    kept = {key: value for key, value in sizes.items() if isinstance(value, bool)}
    return _made(family, found | kept)


def _narrower(size: int) -> int:
    divisor = math.gcd(size, 128)
    return divisor * (1 if size & (size - 1) == 0 else 3)


def _sizes(name: str) -> tuple[str, dict[str, Any]]:
    if name in OTHERS:
        return OTHERS[name]
    if name in KNOWN:
        return KNOWN[name]
    family = _DEFAULTS[name]
    made = transformers.AutoConfig.for_model(family)
    default = getattr(made, "text_config", made).to_dict()
    wanted = (*_MOE, "shared_expert_intermediate_size", "head_dim")
    return family, {key: default[key] for key in wanted if default.get(key)}


def _made(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    if family not in CONFIGS and family != "deepseek_v3":
        settings = {**_CUT, "n_layer": 2, **_IDS, **sizes}
        if family in _NO_HEAD_DIM:
            del settings["head_dim"]
        return transformers.AutoConfig.for_model(family, **settings).to_dict()
    base = {**CONFIGS["kimi_k2" if family == "deepseek_v3" else family], "model_type": family}
    if "text_config" in base:
        return {**base, "text_config": {**base["text_config"], **sizes}}
    return {**base, **sizes}


_NO_HEAD_DIM = {"phi", "phi3", "starcoder2", "granite", "gpt_neox", "falcon", "stablelm", "opt"}
_NO_HEAD_DIM |= {"smollm3", "nemotron", "apertus"}
"""Heads there are as wide as hidden_size makes them."""


def write(path: Path, made: dict[str, Any]) -> Path:
    """A checkpoint with random weights."""
    if is_known(made):
        return write_dense(path, made, random_tensors(made))
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**made), dtype=torch.bfloat16
    )
    tensors = checkpoint_tensors(model)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return write_dense(path, json.loads(model.config.to_json_string()), tensors)


def write_headers(path: Path, made: dict[str, Any]) -> Path:
    """A checkpoint without weights: a sparse file, which reads as zeros."""
    path.mkdir(parents=True)
    if is_known(made):
        architecture = find_architecture(made)
        rows = architecture.parameters(architecture.Config.from_dict(made))
        shapes = {row.name: tuple(row.shape) for row in rows}
    else:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**made), dtype=torch.bfloat16
            )
        made = json.loads(model.config.to_json_string())
        shapes = {name: tuple(t.shape) for name, t in checkpoint_tensors(model).items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    (path / "config.json").write_text(json.dumps(made))
    write_tokenizer(path)
    return path
