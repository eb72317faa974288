"""Checkpoints that the judges of engines are given: small models of dense_models.py and
middle_models.py, and tiny-r1, as `quantkit quantize` writes them.

    write(DIRECTORY, "deepseek_v3", "awq")

What is there is not written again.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

from dense_models import EXPERTS, random_weights
from make_model import CONFIGS, write_dense
from middle_models import MIDDLE, weights
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import find_scheme
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert
from quantkit.quantization.mixed_precision import Mixture, read_overrides

TINY_R1 = Path(quantkit.__file__).parent / "builtin" / "tiny-r1"
DENSE = {f"{name}-dense": config for name, config in CONFIGS["dense"].items()}
MODELS = {**DENSE, **EXPERTS, **MIDDLE}
SOURCE = "source"  # tiny-r1's is FP8 blocks, the others' BF16
PLAIN = "plain"  # tiny-r1 in BF16
MIXTURE = "ct-mixture"
SHIFTED = "shifted"  # a control: AWQ with zero points one off
FORMATS = {
    "awq": ("awq-w4a16", "awq"),
    "ct-w4a16": ("awq-w4a16", "compressed-tensors"),
    "ct-w4a16-symmetric": ("awq-w4a16", "compressed-tensors"),
    "ct-w8a8": ("int8-a8w8c16", "compressed-tensors"),
    "ct-nvfp4": ("fp4-w4a16", "compressed-tensors"),
    "modelopt": ("fp4-w4a16", "modelopt"),
    MIXTURE: ("awq-w4a16", "compressed-tensors"),
    "awq-head": ("awq-w4a16", "awq"),
    "ct-head": ("awq-w4a16", "compressed-tensors"),
    "ct-head8": ("awq-w4a16", "compressed-tensors"),
    "ct-ends": ("awq-w4a16", "compressed-tensors"),
}
HEADS = {  # rounded, too
    "awq-head": ["lm_head bits=4"],
    "ct-head": ["lm_head bits=4"],
    "ct-head8": ["lm_head bits=8"],
    "ct-ends": ["lm_head bits=8 group_size=64", "model.embed_tokens bits=4 group_size=64"],
}
# Marlin multiplies by matrices of a multiple of 64 rows, and tiny-r1's kv_a_proj_with_mqa has 160.
# SGLang's profile leaves it plain in compressed-tensors of 4 bits, and the other formats are
# converted from those.
CONVERTED = {
    ("tiny-r1", "awq"): ("ct-w4a16", "awq"),
    ("tiny-r1", "modelopt"): ("ct-nvfp4", "modelopt"),
    ("llama-dense", "ct-w4a16-from-awq"): ("awq", "compressed-tensors"),
}


def write(directory, model, format, device="cpu"):
    """DIRECTORY/MODEL/FORMAT. Models of middle size are rounded to nearest, on `device`."""
    out = directory / model / format
    if (out / "config.json").exists():
        return out
    if format == SOURCE:
        if model == "tiny-r1":
            return Path(shutil.copytree(TINY_R1, out))
        drawn = weights if model in MIDDLE else random_weights
        return write_dense(out, MODELS[model], drawn(MODELS[model]))
    if format == SHIFTED:
        return shift_zero_points(shutil.copytree(write(directory, model, "awq"), out))
    if format == PLAIN:
        convert(TINY_R1, out, dtype="bfloat16")
    elif (model, format) in CONVERTED:
        other, written = CONVERTED[model, format]
        convert(write(directory, model, other), out, format=written)
    else:
        _quantize(directory, model, format, device)
    return out


def _quantize(directory, model, format, device):
    source, out = write(directory, model, SOURCE), directory / model / format
    scheme, written = FORMATS[format]
    recipe = Recipe(
        scheme=scheme, calibration=str(text(directory)), samples=8, held_out=2, seq_len=64
    )
    if model in MIDDLE:
        scheme = scheme.replace("awq-", "rtn-")
        recipe = Recipe(scheme=scheme)
    asked = find_scheme(scheme)
    if model in MIDDLE:
        asked = replace(asked, methods=())
    if format.endswith("symmetric"):
        assert isinstance(asked.weight, IntGrid), asked
        asked = replace(asked, weight=replace(asked.weight, symmetric=True))
    options = {"engine": "vllm", "device": device}
    if model == "tiny-r1" and format != "ct-w8a8":
        options["engine"] = "sglang"
    if format in HEADS:
        options |= {"mixture": Mixture(override=read_overrides(HEADS[format]))}
    if format == MIXTURE:
        options |= {"mixture": Mixture(bits=5.5)}
        first = quantize(source, out.with_name("first"), asked, written, recipe, **options).out
        measured = without_nvfp4(first / "sensitivities.json")
        options |= {"mixture": Mixture(bits=5.5, sensitivities=measured)}
    quantize(source, out, asked, written, recipe, **options)
    if format in HEADS:
        assert "lm_head" in Checkpoint.open(out).linears
    if format == MIXTURE:
        assert len({linear.grid for linear in Checkpoint.open(out).linears.values()}) > 1


def without_nvfp4(measured):
    """Sensitivities with which a mixture has int4 in groups of 128 and of 32, and int8: vLLM has no
    NVFP4 on CPUs."""
    found = json.loads(measured.read_text())
    for costs in found["kl"].values():
        costs["nvfp4"] = 1e3
    measured.write_text(json.dumps(found))
    return measured


def text(directory):
    """What is calibrated on."""
    path = directory / "calibration.jsonl"
    numbers = (" ".join(str(i * j % 97) for j in range(60)) for i in range(12))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in numbers))
    return path


def shift_zero_points(path):
    """Make the AWQ model slightly wrong, as a reader with another convention would."""
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith(".qzeros"):
                tensors[name] = tensors[name] ^ 0x11111111
        save_file(tensors, shard, metadata={"format": "pt"})
    return path


def digest(path):
    """Of the tensors: two machines must judge the same."""
    found = hashlib.sha256()
    for shard in sorted(path.glob("*.safetensors")):
        found.update(shard.read_bytes())
    return found.hexdigest()[:16]
