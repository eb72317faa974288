"""Write tiny-r1 exactly as DeepSeek-R1 lies on disk, and read it back for the judge.

Linears: float8_e4m3fn `weight` with float32 `weight_scale_inv` over 128 x 128 blocks. Embedding,
head, norms, router, eh_proj: bfloat16.
e_score_correction_bias: float32. The MTP layer is layer `num_hidden_layers`, with its own copies of
embedding and head.

    python export.py WEIGHTS... --out quantkit/builtin/tiny-r1       the shipped model from the files of train.py
    python export.py --random --out DIR                              the same layout with untrained weights
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizer
import torch
from model import Config, DecoderLayer, FeedForward, Moe, TinyR1
from safetensors.torch import load_file, save_file
from salience import Salience, rescale
from torch import Tensor

BLOCK = 128
SHARDS = 3
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def config_json(c: Config) -> dict[str, Any]:
    """config.json with DeepSeek-R1's keys."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": c.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "kv_lora_rank": c.kv_lora_rank,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": c.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": c.n_group,
        "n_routed_experts": c.n_routed_experts,
        "n_shared_experts": c.n_shared_experts,
        "norm_topk_prob": True,
        "num_attention_heads": c.num_attention_heads,
        "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": c.q_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": {
            "beta_fast": int(c.beta_fast),
            "beta_slow": int(c.beta_slow),
            "factor": int(c.rope_factor),
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": c.rope_original,
            "type": "yarn",
        },
        "rope_theta": int(c.rope_theta),
        "routed_scaling_factor": c.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": c.topk_group,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.3",
        "use_cache": True,
        "v_head_dim": c.v_head_dim,
        "vocab_size": c.vocab_size,
    }


def encode_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, K] -> float8_e4m3fn [N, K] and the multiplier of each block, float32
    [ceil(N/128), ceil(K/128)]."""
    n, k = w.shape
    blocks = torch.zeros(-(-n // BLOCK) * BLOCK, -(-k // BLOCK) * BLOCK)
    blocks[:n, :k] = w
    blocks = blocks.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k]
    return codes.to(torch.float8_e4m3fn), scale


def decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_fp8`, up to its rounding."""
    n, k = codes.shape
    return codes.float() * scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def _mlp(prefix: str, mlp: FeedForward, width: int, index: int = 0) -> Iterator[tuple[str, Tensor]]:
    part = slice(index * width, (index + 1) * width)
    for name in PROJECTIONS:
        weight = getattr(mlp, name)
        yield f"{prefix}.{name}", weight[:, part] if name == "down_proj" else weight[part]


def linears(prefix: str, layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    """(module name, weight view) of every FP8 linear of a decoder layer; writing into the view
    writes into the model."""
    for name in ATTENTION:
        yield f"{prefix}.self_attn.{name}", getattr(layer.self_attn, name)
    if isinstance(layer.mlp, Moe):
        width = layer.mlp.c.moe_intermediate_size
        for e in range(layer.mlp.c.n_routed_experts):
            yield from _mlp(f"{prefix}.mlp.experts.{e}", layer.mlp.experts, width, e)
        yield from _mlp(f"{prefix}.mlp.shared_experts", layer.mlp.shared_experts, width)
    else:
        yield from _mlp(f"{prefix}.mlp", layer.mlp, layer.mlp.up_proj.shape[0])


def others(prefix: str, layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    """(tensor name, view) of what a decoder layer keeps out of FP8."""
    yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
    yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    yield f"{prefix}.self_attn.q_a_layernorm.weight", layer.self_attn.q_a_layernorm.weight
    yield f"{prefix}.self_attn.kv_a_layernorm.weight", layer.self_attn.kv_a_layernorm.weight
    if isinstance(layer.mlp, Moe):
        yield f"{prefix}.mlp.gate.weight", layer.mlp.gate
        yield f"{prefix}.mlp.gate.e_score_correction_bias", layer.mlp.bias


def decoder_layers(model: TinyR1) -> list[tuple[str, DecoderLayer]]:
    """Every decoder layer with its name, the MTP layer last."""
    return [
        (f"model.layers.{i}", layer) for i, layer in enumerate((*model.layers, model.mtp.layer))
    ]


def _model_level(model: TinyR1) -> Iterator[tuple[str, Tensor]]:
    mtp = f"model.layers.{model.c.num_hidden_layers}"
    yield "model.embed_tokens.weight", model.embed
    yield "model.norm.weight", model.norm.weight
    yield "lm_head.weight", model.lm_head
    yield f"{mtp}.embed_tokens.weight", model.embed
    yield f"{mtp}.enorm.weight", model.mtp.enorm.weight
    yield f"{mtp}.hnorm.weight", model.mtp.hnorm.weight
    yield f"{mtp}.eh_proj.weight", model.mtp.eh_proj
    yield f"{mtp}.shared_head.norm.weight", model.mtp.norm.weight
    yield f"{mtp}.shared_head.head.weight", model.lm_head


@torch.no_grad()
def to_tensors(model: TinyR1) -> dict[str, Tensor]:
    """The model as R1's tensors. A constant raises the correction biases of a layer above 0; no
    choice changes."""
    tensors: dict[str, Tensor] = {}
    for prefix, layer in decoder_layers(model):
        for module, weight in linears(prefix, layer):
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"] = encode_fp8(weight)
        for name, value in others(prefix, layer):
            bias = name.endswith("bias")
            tensors[name] = value - value.min().clamp(max=0) if bias else value.to(torch.bfloat16)
    tensors |= {name: value.to(torch.bfloat16) for name, value in _model_level(model)}
    return {name: value.detach().clone().contiguous() for name, value in tensors.items()}


@torch.no_grad()
def from_checkpoint(directory: Path) -> TinyR1:
    """The training formulation with the float32 values of a checkpoint written by `write`."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    model = TinyR1(Config())
    for prefix, layer in decoder_layers(model):
        for module, weight in linears(prefix, layer):
            weight.copy_(
                decode_fp8(tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"])
            )
        for name, value in others(prefix, layer):
            value.copy_(tensors[name])
    for name, value in _model_level(model):
        value.copy_(tensors[name])
    return model


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Embedding and first layers, ..., last layers and head: `SHARDS` parts of about equal bytes in
    the model's order."""

    def place(name: str) -> tuple[int, str]:
        parts = name.split(".")
        if parts[0] == "lm_head" or name == "model.norm.weight":
            return 10**6, name
        return (int(parts[2]) if parts[1] == "layers" else -1), name

    total = sum(t.nbytes for t in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    done = 0
    for name in sorted(tensors, key=place):
        shards[min(done * SHARDS // total, SHARDS - 1)][name] = tensors[name]
        done += tensors[name].nbytes
    return shards


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write(model: TinyR1, directory: Path) -> None:
    """Write shards, index, config, generation config and tokenizer, all readable by everyone."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    weight_map: dict[str, str] = {}
    tensors = to_tensors(model)
    for i, shard in enumerate(_shards(tensors)):
        name = f"model-{i + 1:05d}-of-{SHARDS:06d}.safetensors"
        save_file(shard, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(t.nbytes for t in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    _write_json(directory / "config.json", config_json(model.c))
    _write_json(
        directory / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": 0,
            "do_sample": True,
            "eos_token_id": 1,
            "temperature": 0.6,
            "top_p": 0.95,
        },
    )
    tokenizer.save(directory)
    for file in directory.iterdir():
        file.chmod(0o644)


def load_training(files: list[Path]) -> TinyR1:
    """The model that train.py saved in parts."""
    model = TinyR1(Config())
    state: dict[str, Tensor] = {}
    for file in files:
        state |= load_file(file)
    model.load_state_dict(state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", nargs="*", type=Path)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sigma", type=float, default=Salience.sigma)
    parser.add_argument("--boost", type=float, default=Salience.boost)
    args = parser.parse_args()
    torch.manual_seed(1)
    model = TinyR1(Config()) if args.random else load_training(args.weights)
    rescale(model, Salience(sigma=args.sigma, boost=args.boost))
    write(model, args.out)


if __name__ == "__main__":
    main()
