"""Loading one rank's share of DeepSeek-R1's shapes: bytes read, seconds, and the most host memory
that loading took.

    python benchmarks/load_rank.py [--format awq] [--tp 4] [--layers 2] [--device cuda]              rank 0 alone
    torchrun --nproc-per-node 4 benchmarks/load_rank.py --tp 4                                       all ranks at once
    python benchmarks/load_rank.py --tiny --device cpu                                               a test of the script

The checkpoint is of the format's true layout, one dense layer and then MoE layers, and its files
are holes, which read as zeros and take no
disk: what is measured is everything but the disk. Host memory is the process's peak (VmHWM) less
what it held before the checkpoint was opened, with PyTorch and the device set up. On a CPU the
prepared weights are part of it.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from quantkit_kernels import Int4, prepare
from r1_synthetic import R1, TINY

from quantkit.checkpoint.formats import awq, compressed_int4, compressed_int8, modelopt
from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.header import TensorSpec, encode_header
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.weights.load import load_model
from quantkit.grids.base import Grid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.models import deepseek_v3

FORMATS: dict[str, tuple[Format, Grid]] = {
    "awq": (awq.FORMAT, IntGrid(4, 128, False)),
    "compressed-tensors": (compressed_int4.FORMAT, IntGrid(4, 128, True)),
    "int8": (compressed_int8.FORMAT, IntGrid(8, None, True)),
    "modelopt": (modelopt.FORMAT, Nvfp4Grid()),
}


def write_holes(path: Path, config: dict[str, Any], format: Format, grid: Grid) -> Path:
    """A checkpoint of one shard with a true header."""
    specs, plain, quantized = [], [], {}
    for row in deepseek_v3.parameters(deepseek_v3.Config.from_dict(config)):
        if format.quantizes(row.module, row.role, mtp=row.mtp):
            specs += format.specs(row.module, (row.shape[0], row.shape[1]), grid)
            quantized[row.module] = grid
        else:
            plain.append(
                TensorSpec(
                    row.name,
                    torch.float32 if row.role == "router_bias" else torch.bfloat16,
                    row.shape,
                )
            )
    header, placed = encode_header(sorted([*specs, *plain], key=lambda spec: -spec.dtype.itemsize))
    path.mkdir(exist_ok=True)
    with (path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(placed[-1].offset + placed[-1].nbytes)
    block = format.config_block(grid, quantized, plain)
    (path / "config.json").write_text(
        json.dumps({**config, **({"quantization_config": block} if block else {})})
    )
    for name, content in format.extra_files(grid, quantized, plain).items():
        (path / name).write_bytes(content)
    return path


def status_gb(key: str) -> float:
    """VmRSS or VmHWM of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024 / 1e9


def warm_up(device: torch.device) -> None:
    """Sets up the device, and builds what the first packed linear would build."""
    weight = Int4(
        torch.zeros(256, 512, dtype=torch.int8),
        torch.ones(256, 4),
        torch.zeros(256, 4, dtype=torch.int8),
    )
    prepare(weight, dtype=torch.bfloat16, device=device)(
        torch.zeros(1, 512, dtype=torch.bfloat16, device=device)
    )


def measure(path: Path, parallel: Parallel, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    warm_up(torch.device(device))
    before = status_gb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    began = time.perf_counter()
    loaded = load_model(path, device=device, dtype="bfloat16", parallel=parallel)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "rank": parallel.rank,
        "file_gb": (path / "model.safetensors").stat().st_size / 1e9,
        "read_gb": loaded.checkpoint.bytes_read / 1e9,
        "held_gb": loaded.nbytes / 1e9,
        "seconds": seconds,
        "host_before_gb": before,
        "host_peak_gb": status_gb("VmHWM") - before,
        "device_peak_gb": torch.cuda.max_memory_allocated() / 1e9
        if device == "cuda"
        else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", choices=FORMATS, default="awq")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2, help="the first is dense")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    config = (TINY if options.tiny else R1) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": options.layers,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = write_holes(Path(folder) / "holes", config, *FORMATS[options.format])
        found = measure(path, Parallel(int(os.environ.get("RANK", 0)), options.tp), options.device)
    print(
        options.format, "  ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True
    )


if __name__ == "__main__":
    main()
