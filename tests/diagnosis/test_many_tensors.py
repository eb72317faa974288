"""Headers that list many tensors: work grows with their number, not with its square."""

import json
import shutil
import time

import pytest
from edited import edited
from sample_sizes import sized

from quantkit.common.assets import builtin_model
from quantkit.diagnosis.diagnose import diagnose

CPU_S = 30.0
"""Of a processor that others use too; 300,000 take 8 to 13."""
NAMES = {
    "experts of every layer": (
        "BF16",
        lambda n: f"model.layers.{n % 50}.mlp.experts.{n}.x.weight_scale",
    ),
    "scales": ("F8_E4M3", lambda n: f"a.{n}.weight_scale_inv"),
    "unknown": ("F32", lambda n: f"unknown.{n}.weight"),
    "layers beyond": ("F32", lambda n: f"model.layers.{n + 9}.self_attn.q_proj.weight"),
    "experts beyond": ("F32", lambda n: f"model.layers.1.mlp.experts.{n + 99}.up_proj.weight"),
    "mtp": ("F32", lambda n: f"model.layers.{n + 9}.eh_proj.weight"),
    "kinds": ("F32", lambda n: f"model.layers.{n % 3}.new{n // 3}.weight"),
    "other prefix": ("F32", lambda n: f"p{n}.model.layers.0.self_attn.q_proj.weight"),
    "codes": ("I32", lambda n: f"model.layers.0.x{n}.qweight"),
    "packed": ("I32", lambda n: f"model.layers.0.x{n}.weight_packed"),
}


def write(folder, kind, count):
    """tiny-r1 with one more shard of `count` tensors of one value."""
    shutil.copytree(builtin_model("tiny-r1"), folder)
    dtype, name = NAMES[kind]
    size = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1}[dtype]
    entries = {
        name(n): {"dtype": dtype, "shape": [1], "data_offsets": [size * n, size * (n + 1)]}
        for n in range(count)
    }
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size * count)
    (folder / "more.safetensors").write_bytes(content)
    index = folder / "model.safetensors.index.json"
    with edited(index) as listed:
        listed["weight_map"] |= dict.fromkeys(entries, "more.safetensors")
    return folder


@pytest.mark.parametrize("kind", list(NAMES)[: sized(2, len(NAMES))])
def test_check_is_linear_in_tensors(tmp_path, kind):
    """With work that grows with the square, the smaller number takes a minute."""
    folder, started = write(tmp_path / "m", kind, sized(60_000, 300_000)), time.process_time()
    assert diagnose(str(folder), depth="headers").to_json()["verdict"] != "good"
    assert time.process_time() - started < CPU_S
