"""The model of make_model, rounded to nearest and written in one of the formats: what engines,
convert and judges are tested on.

write_packed(path, config, tensors, awq.FORMAT, grid)       # every linear the format takes, quantized
write_packed(..., quantizes=lambda row: row.expert is not None)
"""

import json
from dataclasses import replace

import torch
from make_model import CONFIGS, write_dense, write_tokenizer
from nearest import quantize_fp4, quantize_int, quantize_mx
from safetensors.torch import save_file

from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.nvfp4 import Nvfp4Grid, global_scale, input_divisor
from quantkit.models import find_architecture

LARGEST_INPUT = 16.0
"""That inputs rounded to NVFP4 are calibrated for."""


def rounded(weight, format, grid, amax):
    """`weight` [N, K] on the grid; `amax` is the largest magnitude of it and its fused siblings."""
    if isinstance(grid, Nvfp4Grid):
        packed = quantize_fp4(weight.float(), global_scale=global_scale(amax))
        return (
            packed
            if grid.activation_bits == 16
            else replace(packed, input_divisor=input_divisor(torch.tensor(LARGEST_INPUT)))
        )
    if grid.power_scales:
        return quantize_mx(weight, grid)
    return quantize_int(weight.float(), grid, scale_dtype=format.scale_dtype)


def write_packed(path, config, tensors, format, grid, quantizes=None, share_scales=True):
    """A checkpoint directory in `format`. Fused siblings share the FP4 global scale unless
    `share_scales` is false."""
    architecture = find_architecture(config)
    rows = {row.name: row for row in architecture.parameters(architecture.Config.from_dict(config))}
    taken = {
        name
        for name, row in rows.items()
        if name in tensors and format.quantizes(row.module, row.role, mtp=row.mtp)
    }
    if quantizes is not None:
        taken = {name for name, row in rows.items() if name in tensors and quantizes(row)}
    stored = {}
    quantized = {}
    plain = []
    for name, tensor in tensors.items():
        if name not in taken:
            stored[name] = tensor
            plain.append(TensorSpec(name, tensor.dtype, tuple(tensor.shape)))
            continue
        row = rows[name]
        siblings = (
            [tensors[other] for other in taken if rows[other].fused == row.fused]
            if row.fused and share_scales
            else [tensor]
        )
        amax = torch.stack([sibling.float().abs().max() for sibling in siblings]).max()
        stored |= format.pack(row.module, rounded(tensor, format, grid, amax))
        quantized[row.module] = grid
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    block = format.config_block(grid, quantized, plain)
    described = {**config, **({"quantization_config": block} if block else {})}
    (path / "config.json").write_text(json.dumps(described, indent=2))
    for file, content in format.extra_files(grid, quantized, plain).items():
        (path / file).write_bytes(content)
    write_tokenizer(path, config["vocab_size"])
    return path


GROUPED = CONFIGS["grouped"]


def write_random(path, config, seed=5):
    """Not packed: BF16 weights of every row of an architecture's table, which keep the size of
    hidden states."""
    architecture, rng = find_architecture(config), torch.Generator().manual_seed(seed)
    rows = architecture.parameters(architecture.Config.from_dict(config))
    scales = {
        row.name: 1.0 if row.role in ("embedding", "head") else row.shape[-1] ** -0.5
        for row in rows
    }
    return write_dense(
        path,
        config,
        {
            row.name: torch.randn(row.shape, generator=rng).mul_(scales[row.name]).bfloat16()
            for row in rows
        },
    )
