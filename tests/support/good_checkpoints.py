"""Good checkpoints to make faults on: three models in every format, rounded to nearest.

for name, path in write_all(folder): ...
"""

import math

import make_model
import torch
from packed_model import write_packed

from quantkit.checkpoint.formats import (
    awq,
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    gptq,
    modelopt,
    modelslim,
)
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.assets import builtin_model
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.models import find_architecture

FORMATS = {
    "awq": (awq.FORMAT, IntGrid(4, 128, False)),
    "gptq": (gptq.FORMATS[0], IntGrid(4, 64, False)),
    "gptq-sym": (gptq.FORMATS[0], IntGrid(4, 128, True)),
    "gptq-v2": (gptq.FORMATS[1], IntGrid(4, 128, False)),
    "gptq-int8": (gptq.FORMATS[0], IntGrid(8, 128, True)),
    "ct-int4": (compressed_int4.FORMAT, IntGrid(4, 32, True)),
    "ct-int4-asym": (compressed_int4.FORMAT, IntGrid(4, 128, False)),
    "ct-int4-channel": (compressed_int4.FORMAT, IntGrid(4, None, True)),
    "ct-int8": (compressed_int8.FORMAT, IntGrid(8, None, True)),
    "ct-nvfp4": (compressed_fp4.FORMAT, Nvfp4Grid()),
    "modelopt": (modelopt.FORMAT, Nvfp4Grid()),
    "modelslim": (modelslim.FORMAT, IntGrid(8, None, True)),
    "modelslim-int4": (modelslim.FORMAT, IntGrid(4, None, True)),
}
QWEN3 = make_model.CONFIGS["qwen3"]
QWEN3_MOE = make_model.CONFIGS["qwen3_moe"]


def random_weights(config, seed=0):
    """Weights of every row of the table, channels of different sizes as trained ones have."""
    architecture = find_architecture(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    rows = architecture.parameters(architecture.Config.from_dict(config))
    for row in rows:
        noise = torch.randn(row.shape, generator=generator)
        if row.role == "router_bias":
            tensors[row.name] = noise * 0.1
        elif len(row.shape) == 1:
            tensors[row.name] = (1 + 0.2 * noise).bfloat16()
        else:
            columns = torch.exp(0.4 * torch.randn(row.shape[1], generator=generator))
            tensors[row.name] = (noise * columns / math.sqrt(row.shape[1])).bfloat16()
    for row in rows:  # an MTP layer has copies of these
        if row.mtp and row.role in ("embedding", "head"):
            tensors[row.name] = tensors[
                next(one.name for one in rows if one.role == row.role and not one.mtp)
            ].clone()
    return tensors


def tiny_r1():
    """The built-in model, decoded to BF16."""
    checkpoint = Checkpoint.open(builtin_model("tiny-r1"))
    tensors = {
        f"{m}.weight": dequantize(checkpoint.weight(m), torch.bfloat16) for m in checkpoint.linears
    }
    parts = {name for linear in checkpoint.linears.values() for name in linear.tensors}
    tensors |= {name: checkpoint.read(name) for name in checkpoint.tensors if name not in parts}
    return {
        key: value for key, value in checkpoint.config.items() if key != "quantization_config"
    }, tensors


def models():
    """config.json and BF16 tensors by name."""
    return {
        "tiny-r1": tiny_r1(),
        "qwen3": (QWEN3, random_weights(QWEN3)),
        "qwen3-moe": (QWEN3_MOE, random_weights(QWEN3_MOE, 1)),
    }


def write_all(folder, only=()):
    """(model and format, the checkpoint, its source in BF16). only: models and formats, such as
    "qwen3-moe awq"; all without."""
    for model, (config, tensors) in models().items():
        chosen = {name: FORMATS[name] for name in FORMATS if not only or f"{model} {name}" in only}
        if chosen:
            source = make_model.write_dense(folder / f"{model}-source", config, tensors)
        for name, (format, grid) in chosen.items():
            yield (
                f"{model} {name}",
                write_packed(folder / f"{model}-{name}", config, tensors, format, grid),
                source,
            )


def packed(folder, config, names, tensors=None):
    """One model in these formats: its source, and paths by the formats' names."""
    tensors = random_weights(config) if tensors is None else tensors
    source = make_model.write_dense(folder / "source", config, tensors)
    made = {name: write_packed(folder / name, config, tensors, *FORMATS[name]) for name in names}
    return source, made
