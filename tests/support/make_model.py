"""A small random DeepSeek-V3 checkpoint, written as DeepSeek-R1 is published.

Names, shapes and layout are spelled out here by hand and written with safetensors alone, so that a
test of quantkit's parameter table, reader or forward has something of its own to agree with.
Weights are random: the model computes, but says nothing.

    config = tiny_config()                      # config.json of R1 with small sizes, MTP layer included
    tensors = random_tensors(config, seed=0)    # float32 (router bias) and bfloat16, R1's names
    write_fp8(path, config, tensors)            # R1's layout: FP8 blocks with weight_scale_inv, shards, index, tokenizer
    write_dense(path, config, tensors)          # the same model unquantized
    random_fp8(path, **changes)                 # all of it in one: random weights of such a config
"""

import copy
import json
import math
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT, "<think>", "</think>")
CONFIGS = yaml.safe_load(Path(__file__).with_name("configs.yaml").read_text())
FP8_BLOCK = 128
FP8_MAX = 448.0
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] }}"
    "{% else %}{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token }}{% "
    "endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)

FEW_EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
"""Changes of `tiny_config`: four experts in two groups, of which a token asks two of one group."""
NARROW = FEW_EXPERTS | {"hidden_size": 128, "intermediate_size": 128}
"""The same with one group of 128 inputs a linear, so that calibrating takes seconds."""


def tiny_config(**changes):
    """R1's config.json with small sizes; every input dimension of a linear is a multiple of 128."""
    return copy.deepcopy(CONFIGS["tiny"]) | changes


def tensor_shapes(config):
    """Every tensor of the unquantized checkpoint, MTP layer included."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers, mtp = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers + mtp):
        p = f"model.layers.{layer}"
        if layer >= layers:
            shapes |= {
                f"{p}.embed_tokens.weight": (vocab, hidden),
                f"{p}.eh_proj.weight": (hidden, 2 * hidden),
            }
            shapes |= {
                f"{p}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")
            }
            shapes[f"{p}.shared_head.head.weight"] = (vocab, hidden)
        shapes |= {f"{p}.{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _layer_shapes(config, layer):
    hidden, heads, q_lora, kv_lora = (
        config[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, v = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (q_lora, hidden),
        "self_attn.q_a_layernorm.weight": (q_lora,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_lora),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_lora + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_lora,),
        "self_attn.kv_b_proj.weight": (heads * (nope + v), kv_lora),
        "self_attn.o_proj.weight": (hidden, heads * v),
    }
    mlps = {"mlp": config["intermediate_size"]}
    if layer >= config["first_k_dense_replace"]:
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        shapes |= {
            "mlp.gate.weight": (experts, hidden),
            "mlp.gate.e_score_correction_bias": (experts,),
        }
        mlps = {f"mlp.experts.{expert}": width for expert in range(experts)}
        mlps["mlp.shared_experts"] = width * config["n_shared_experts"]
    for prefix, width in mlps.items():
        shapes |= {f"{prefix}.{side}_proj.weight": (width, hidden) for side in ("gate", "up")}
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)
    return shapes


def random_tensors(config, seed=0):
    """Random weights of a size that keeps activations near 1, gains away from 1, router biases that
    change the choice of experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = noise * 0.1
        elif len(shape) == 1:
            tensors[name] = (1 + 0.2 * noise).bfloat16()
        elif "embed_tokens" in name:
            tensors[name] = noise.bfloat16()
        else:
            tensors[name] = (noise / math.sqrt(shape[1])).bfloat16()
    return tensors


def is_fp8(name):
    """Whether R1 keeps the tensor in FP8: the linears of the decoder layers, not the router, heads,
    embeddings or eh_proj."""
    return (name.endswith("_proj.weight") and "eh_proj" not in name) or name.endswith(
        "kv_a_proj_with_mqa.weight"
    )


def fp8_blocks(weight):
    """weight [N, K] -> float8_e4m3fn [N, K] and the float32 multiplier [ceil(N/128), ceil(K/128)]
    (block amax / 448)."""
    n, k = weight.shape
    rows, columns = math.ceil(n / FP8_BLOCK), math.ceil(k / FP8_BLOCK)
    padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
    padded[:n, :k] = weight.float()
    blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_MAX
    codes = (blocks / scale[:, None, :, None]).view_as(padded)[:n, :k]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale


def fp8_values(tensors):
    """What the FP8 checkpoint of `tensors` stands for: FP8 linears rounded and decoded to float32,
    the rest as it is."""
    values = {}
    for name, tensor in tensors.items():
        if is_fp8(name):
            codes, scale = fp8_blocks(tensor)
            full = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[
                : codes.shape[0], : codes.shape[1]
            ]
            values[name] = codes.float() * full
        else:
            values[name] = tensor
    return values


def write_fp8(path, config, tensors, shards=3):
    """A checkpoint directory in R1's layout. Returns `path`."""
    stored = {}
    for name, tensor in tensors.items():
        if is_fp8(name):
            stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(tensor)
        else:
            stored[name] = tensor
    block = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    return _write(path, {**config, "quantization_config": block}, stored, shards)


def write_dense(path, config, tensors, shards=1):
    """An unquantized checkpoint directory. Returns `path`."""
    return _write(path, config, tensors, shards)


def random_fp8(path, shards=3, **changes):
    """A checkpoint of random weights in R1's layout. changes: of `tiny_config`. Returns `path`."""
    config = tiny_config(**changes)
    return write_fp8(path, config, random_tensors(config), shards)


def random_dense(path, shards=1, **changes):
    """The same, unquantized."""
    config = tiny_config(**changes)
    return write_dense(path, config, random_tensors(config), shards)


def _write(path, config, tensors, shards):
    write_shards(path, tensors, shards)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(path, config["vocab_size"])
    return path


def write_shards(path, tensors, shards):
    """As many files, one after the other, and their index."""
    path.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(tensors), {}
    per_shard = math.ceil(len(names) / shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:06d}.safetensors"
        own = names[shard * per_shard : (shard + 1) * per_shard]
        part = {name: tensors[name].contiguous() for name in own}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(path, vocab_size=320):
    """A byte-level tokenizer with R1's special tokens first, and a chat template that prefills
    <think> as R1's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL_TOKENS, *alphabet]
    names += [f"<unused{i}>" for i in range(vocab_size - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS[:4]]
    )
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS[4:]])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.95})
    )
