"""From an empty cache of kernels to the first product of a linear, and to the first step of a
model: what a new machine waits for.

    python benchmarks/first_use.py                  with what the machine has: nvcc compiles the CUDA kernels
    python benchmarks/first_use.py --hide-nvcc      as on a machine without a CUDA toolkit

A process of its own with caches of its own; time runs from a device that is there. The model: four
layers of Qwen3-8B's shapes in W4A16, a prompt of 300 tokens and a decode step; then two layers of
DeepSeek-R1 as a rank of four holds them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from command import measured, parser

NVCC = ("CUDA_HOME", "CUDA_PATH")


def inside() -> None:
    """In the process: prints a line of JSON."""
    import torch
    from quantkit_kernels import prepare
    from quantkit_kernels.cuda.build import find_nvcc
    from quantkit_kernels.samples import random_weight

    device = torch.device("cuda")
    rng = torch.Generator(device).manual_seed(0)
    weight, x = (
        random_weight("int4-asym-128", 4096, 4096, rng),
        torch.randn(1, 4096, device=device).bfloat16(),
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    linear = prepare(weight)
    linear(x)
    torch.cuda.synchronize()
    found: dict[str, Any] = {
        "nvcc": find_nvcc(),
        "backend": linear.backend,
        "linear_s": time.perf_counter() - began,
    }
    from triton_steps import Step

    for model in ("qwen3-8b", "r1"):
        step = Step(model, "int4-asym-128", 4, "auto", device, 1024)
        step.wall_ms(1, 300)
        torch.cuda.synchronize()
        found[f"{model}_s"] = time.perf_counter() - began
    print(json.dumps(found), flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        caches = {
            "XDG_CACHE_HOME": made,
            "TRITON_CACHE_DIR": f"{made}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{made}/inductor",
        }
        environment = os.environ | caches
        if options.hide_nvcc:
            shown = [
                one for one in environment["PATH"].split(":") if not os.path.exists(f"{one}/nvcc")
            ]
            environment |= {"PATH": ":".join(shown), **{name: f"{made}/none" for name in NVCC}}
        done = subprocess.run(
            [sys.executable, __file__, "--inside"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--hide-nvcc", action="store_true")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    if "--inside" in sys.argv:
        inside()
    else:
        measured(run, options)


if __name__ == "__main__":
    main()
