"""A small checkpoint in any quantized format, written with safetensors alone, for tests of what
reads such checkpoints.

One decoder layer with a quantized MLP and attention, an unquantized kv_b_proj and router, and an
MTP layer that is all BF16:

    modules, tensors = quantized_tensors(format, grid)      # Weight by module; every stored tensor by name
    path = write(tmp_path / "model", format, grid)          # two shards, index, config.json, side files
"""

import json
from dataclasses import replace

import torch
from make_model import write_shards
from nearest import quantize_fp4, quantize_fp8, quantize_int, quantize_mx

from quantkit.checkpoint.formats.base import output_config
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.fp8_block import Fp8BlockGrid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.mxfp8 import Mxfp8Grid
from quantkit.grids.nvfp4 import Nvfp4Grid, input_divisor

LAYER, MTP = "model.layers.3", "model.layers.4"
QUANTIZED = {
    f"{LAYER}.self_attn.q_a_proj": (16, 128),
    f"{LAYER}.self_attn.kv_a_proj_with_mqa": (24, 128),
    f"{LAYER}.self_attn.o_proj": (128, 64),
    f"{LAYER}.mlp.experts.0.gate_proj": (64, 128),
    f"{LAYER}.mlp.experts.0.up_proj": (64, 128),
    f"{LAYER}.mlp.experts.0.down_proj": (128, 64),
}
PLAIN = {
    "model.embed_tokens.weight": (40, 128),
    "lm_head.weight": (40, 128),
    "model.norm.weight": (128,),
    f"{LAYER}.self_attn.kv_b_proj.weight": (48, 64),
    f"{LAYER}.mlp.gate.weight": (8, 128),
    f"{LAYER}.mlp.gate.e_score_correction_bias": (8,),
    f"{MTP}.eh_proj.weight": (128, 256),
    f"{MTP}.mlp.experts.0.gate_proj.weight": (64, 128),
    f"{MTP}.mlp.experts.0.up_proj.weight": (64, 128),
}


def quantize(format, grid, w):
    """W on the grid, rounded to nearest."""
    match grid:
        case IntGrid():
            return quantize_int(w, grid, scale_dtype=format.scale_dtype)
        case Nvfp4Grid(activation_bits=bits):
            weight = quantize_fp4(w)
            return (
                weight
                if bits == 16
                else replace(weight, input_divisor=input_divisor(torch.tensor(3.7)))
            )
        case Mxfp4Grid() | Mxfp8Grid():
            return quantize_mx(w, grid)
        case Fp8BlockGrid():
            return quantize_fp8(w, grid)
        case _:
            return w.bfloat16()


def quantized_tensors(format, grid, seed=0):
    """Weights by module, and all stored tensors by name."""
    generator = torch.Generator().manual_seed(seed)
    modules = {
        name: quantize(format, grid, torch.randn(shape, generator=generator))
        for name, shape in QUANTIZED.items()
    }
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in PLAIN.items()
    }
    for name, weight in modules.items():
        tensors |= format.pack(name, weight)
    return modules, tensors


def description(format, grid):
    """config.json and the files beside it."""
    plain = [TensorSpec(name, torch.bfloat16, shape) for name, shape in PLAIN.items()]
    quantized = dict.fromkeys(QUANTIZED, grid)
    config = output_config(
        {"model_type": "deepseek_v3", "num_hidden_layers": 4},
        format.config_block(grid, quantized, plain),
    )
    return config, format.extra_files(grid, quantized, plain)


def write(path, format, grid):
    """The checkpoint directory."""
    _, tensors = quantized_tensors(format, grid)
    config, files = description(format, grid)
    write_tensors(path, tensors)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def write_stored(path, tensors, block=None, side=None):
    """A folder with these tensors in one shard, described by `block` in config.json, or by the files
    of `side`."""
    path.mkdir(exist_ok=True)
    write_shards(path, tensors, 1)
    described = {"quantization_config": block} if block else {}
    (path / "config.json").write_text(json.dumps({"model_type": "nobody", **described}))
    for name, content in (side or {}).items():
        (path / name).write_text(json.dumps(content))
    return path


def write_tensors(path, tensors):
    """Two shards and their index; parts of a linear lie in both."""
    names = sorted(tensors)
    write_shards(path, {name: tensors[name] for name in (*names[::2], *names[1::2])}, 2)
