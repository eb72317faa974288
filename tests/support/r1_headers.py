"""A checkpoint with DeepSeek-R1's config.json and headers, and no weights: its shards are sparse
files.

    write_headers(path, r1_config())

Every tensor of R1 has its name, dtype and shape; reading one gives zeros, and the disk holds a few
megabytes.
"""

import copy
import json
import math

import make_model

from quantkit.models import deepseek_v3

SHARDS = 163


def r1_config(**changes):
    """config.json of DeepSeek-R1."""
    return copy.deepcopy(make_model.CONFIGS["r1"]) | changes


R1 = deepseek_v3.Config.from_dict(r1_config())
R1_TABLE = deepseek_v3.parameters(R1)


def write_headers(path, config, shards=SHARDS):
    """The directory of a checkpoint in R1's FP8 layout, with a small tokenizer. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, shape in make_model.tensor_shapes(config).items():
        fp8 = make_model.is_fp8(name)
        kind = "F8_E4M3" if fp8 else "F32" if name.endswith("correction_bias") else "BF16"
        entries.append((name, kind, shape))
        if fp8:
            blocks = [math.ceil(size / make_model.FP8_BLOCK) for size in shape]
            entries.append((f"{name}_scale_inv", "F32", blocks))
    per_shard = math.ceil(len(entries) / shards)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:06d}.safetensors"
        own = entries[shard * per_shard : (shard + 1) * per_shard]
        write_sparse(path / file, own)
        weight_map |= {name: file for name, _, _ in own}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config))
    make_model.write_tokenizer(path)
    return path


def write_sparse(file, entries):
    """A shard of tensors (name, dtype, shape), which reads as zeros and takes no room."""
    header, end = {}, 0
    for name, kind, shape in entries:
        start, end = end, end + math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
