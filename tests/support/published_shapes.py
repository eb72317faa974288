"""Models of published sizes: facts of their config.json, by name.

    config(name)                   few layers, experts and tokens, every other size as published
    narrow(name)                   the widths smaller, each divided by the same powers of two
    cut(name)                      as published where that is small, else narrow
    write(path, config)            random weights
    write_headers(path, config)    no weights: the shard is a sparse file

Sizes are in published_shapes.yaml.
"""

import json
import math
from pathlib import Path

import torch
import transformers
import yaml
from make_model import write_dense, write_tokenizer
from r1_headers import write_sparse
from tiny_models import CONFIGS, random_tensors
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers_peers import checkpoint_tensors

from quantkit.models import find_architecture, is_known

_MODELS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["models"]
NAMES = tuple(_MODELS)
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_SIZES += ("moe_intermediate_size",)
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "ffn_dim")
_WIDTHS += ("shared_expert_intermediate_size", "word_embed_proj_dim")
_CUT = {"num_hidden_layers": 2, "vocab_size": 320, "max_position_embeddings": 1024}
_IDS = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}
_HEAD = 32
_SMALL = 8_000_000
"""Weights that take seconds to calibrate."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def config(name):
    """config.json of a model, cut in layers, experts and vocabulary."""
    family, sizes = _sizes(name)
    return _made(family, sizes)


def narrow(name):
    """The same with smaller widths, that of all heads of an attention included. Each keeps its
    greatest common divisor with 128, and whether it is a power of two."""
    family, sizes = _sizes(name)
    found = {key: _narrower(sizes[key]) for key in _WIDTHS if key in sizes}
    if "num_attention_heads" in sizes and not sizes.keys() & {"q_lora_rank", "kv_lora_rank"}:
        heads, alike = sizes["num_attention_heads"], sizes.get("num_key_value_heads")
        count = _narrower(heads * sizes["head_dim"]) // _HEAD
        few = count if alike in (heads, None) else 1
        found |= {"num_attention_heads": count, "num_key_value_heads": few, "head_dim": _HEAD}
        found |= {"rotary_dim": 16} if "rotary_dim" in sizes else {}
    if "n_head" in sizes:
        found |= {"n_head": found["hidden_size"] // _HEAD}
    kept = {key: value for key, value in sizes.items() if isinstance(value, bool)}
    return _made(family, found | kept)


def cut(name):
    """`config` of at most _SMALL weights, else `narrow`."""
    made = config(name)
    weights = sum(math.prod(shape) for shape in _shapes(made)[1].values())
    return made if weights <= _SMALL else narrow(name)


def _narrower(size):
    divisor = math.gcd(size, 128)
    return divisor * (1 if size & (size - 1) == 0 else 3)


def _sizes(name):
    entry = dict(_MODELS[name])
    family, sizes = entry.pop("family"), entry.pop("sizes", [])
    if len(sizes) == 4:
        entry = {"head_dim": sizes[0] // sizes[2], **entry}
    if entry or sizes:
        return family, dict(zip(_SIZES, sizes)) | entry
    made = transformers.AutoConfig.for_model(family)
    default = getattr(made, "text_config", made).to_dict()
    wanted = (*_SIZES, "shared_expert_intermediate_size", *_LATENT, "head_dim")
    return family, {key: default[key] for key in wanted if default.get(key)}


def _made(family, sizes):
    if family not in CONFIGS and family != "deepseek_v3":
        settings = {**_CUT, "n_layer": 2, **_IDS, **sizes}
        if family in _NO_HEAD_DIM:
            del settings["head_dim"]
        return transformers.AutoConfig.for_model(family, **settings).to_dict()
    base = {**CONFIGS["kimi_k2" if family == "deepseek_v3" else family], "model_type": family}
    base.pop("architectures", None)  # of the family whose sizes these are
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        base["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    if "text_config" in base:
        return {**base, "text_config": {**base["text_config"], **sizes}}
    return {**base, **sizes}


_NO_HEAD_DIM = {"phi", "phi3", "starcoder2", "granite", "gpt_neox", "falcon", "stablelm", "opt"}
_NO_HEAD_DIM |= {"smollm3", "nemotron", "apertus"}
"""Heads there are as wide as hidden_size makes them."""


def write(path, made):
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


def write_headers(path, made):
    """A checkpoint without weights: a sparse file, which reads as zeros."""
    path.mkdir(parents=True)
    made, shapes = _shapes(made)
    entries = [(name, "BF16", shape) for name, shape in shapes.items()]
    write_sparse(path / "model.safetensors", entries)
    (path / "config.json").write_text(json.dumps(made))
    write_tokenizer(path)
    return path


def _shapes(made):
    """config.json as it is saved, and the shapes of the tensors."""
    if is_known(made):
        architecture = find_architecture(made)
        rows = architecture.parameters(architecture.Config.from_dict(made))
        return made, {row.name: tuple(row.shape) for row in rows}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**made), dtype=torch.bfloat16
        )
    tensors = checkpoint_tensors(model)
    return json.loads(model.config.to_json_string()), {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
