"""Write a checkpoint of a published size that takes no room: headers with every tensor's name,
dtype and shape over sparse files.

    python benchmarks/headers.py kimi-k2|deepseek-v4-pro DIR [--layers N] [--experts N]

Reading a tensor gives zeros, so plans can be made of it (`quantkit plan DIR`), and what rounding it
costs in memory and time measured; what the weights are does not matter for that. Kimi-K2 is in FP8
blocks, as published; DeepSeek-V4-Pro in its layout of FP4 experts and FP8 blocks, with sizes that
transformers' own text tells (modeling_deepseek_v4.py), 1.6e12 parameters in all.
--layers: so many, of which all but Kimi-K2's first of several have routed experts; all by default.
--experts: so many in each, 384 by default.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from r1_shape import BLOCK, is_fp8, shape_config

from quantkit.checkpoint.header import TensorSpec
from quantkit.models import find_architecture

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_PLAIN = {
    "streams": torch.float32,
    "router_bias": torch.float32,
    "indexer_gate": torch.float32,
    "router_table": torch.int64,
}
_PER_SHARD = 1000
V4_PRO = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "head_dim": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 384,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "index_topk": 1024,
    "num_nextn_predict_layers": 0,
    "vocab_size": 129280,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
    },
}


def kimi_k2(layers: int | None, experts: int) -> tuple[dict[str, Any], list[TensorSpec]]:
    config = shape_config("kimi-k2", experts, layers or 61)
    architecture, found = find_architecture(config), []
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        if is_fp8(row):
            blocks = tuple(math.ceil(size / BLOCK) for size in row.shape)
            found += [
                TensorSpec(row.name, torch.float8_e4m3fn, row.shape),
                TensorSpec(f"{row.name}_scale_inv", torch.float32, blocks),
            ]
        else:
            found.append(
                TensorSpec(
                    row.name,
                    torch.float32 if row.role == "router_bias" else torch.bfloat16,
                    row.shape,
                )
            )
    return config, found


def deepseek_v4_pro(layers: int | None, experts: int) -> tuple[dict[str, Any], list[TensorSpec]]:
    """Layers whose router is a table of ids come first, and are left out where not all are
    wanted."""
    config = (
        V4_PRO
        | {"n_routed_experts": experts}
        | ({"num_hidden_layers": layers, "num_hash_layers": 0} if layers else {})
    )
    architecture, found = find_architecture(config), []
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        rows, columns = (*row.shape, 1)[:2]
        scale = f"{row.module}.scale"
        if row.expert is not None:
            found += [
                TensorSpec(row.name, torch.int8, (rows, columns // 2)),
                TensorSpec(scale, torch.float8_e8m0fnu, (rows, columns // 32)),
            ]
        elif is_fp8(row) and ".compressor." not in row.name:
            blocks = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
            found += [
                TensorSpec(row.name, torch.float8_e4m3fn, row.shape),
                TensorSpec(scale, torch.float8_e8m0fnu, blocks),
            ]
        else:
            found.append(TensorSpec(row.name, _PLAIN.get(row.role, torch.bfloat16), row.shape))
    return config, found


SHAPES = {"kimi-k2": kimi_k2, "deepseek-v4-pro": deepseek_v4_pro}


def write(path: Path, config: dict[str, Any], specs: list[TensorSpec]) -> None:
    path.mkdir(parents=True)
    count, weight_map = math.ceil(len(specs) / _PER_SHARD), {}
    for shard in range(count):
        name, header, offset = (
            f"model-{shard + 1:05d}-of-{count:06d}.safetensors",
            dict[str, Any](),
            0,
        )
        for spec in specs[shard * _PER_SHARD : (shard + 1) * _PER_SHARD]:
            size = math.prod(spec.shape) * spec.dtype.itemsize
            header[spec.name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": [offset, offset + size],
            }
            offset, weight_map[spec.name] = offset + size, name
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with open(path / name, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + offset)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (path / "config.json").write_text(json.dumps(config, indent=2))
    total = sum(math.prod(spec.shape) for spec in specs)
    print(json.dumps({"path": str(path), "tensors": len(specs), "parameters": total}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int, default=384)
    given = parser.parse_args()
    write(given.path, *SHAPES[given.shape](given.layers, given.experts))


if __name__ == "__main__":
    main()
