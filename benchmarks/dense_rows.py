"""16-bit linears of a decode step: the Triton kernel that begins while the launch before it ends,
beside the vendor's library.

    quantkit kernels --tune --model MODEL                                  first: the plans of a model in 16 bits, kept on this machine
    python benchmarks/dense_rows.py [--rows 1,8,32,64] [--out FILE.json]

A layer of Qwen3-8B without attention: norms, four linears and SiLU. Times are of graph replays over
weights beyond the cache, both sides in turns. Each linear is held against float64 first. Figures of
an H200 by the plans of that night stand in docs/lab/2026-11-28-beside-vllm-at-once.md.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from command import measured, numbers, parser
from quantkit_kernels import add_rms_norm, prepare_dense, rms_norm, silu_and_mul
from quantkit_kernels.linear import Linear
from quantkit_kernels.samples import TOLERANCE, distance
from quantkit_kernels.sizes import QWEN3_8B_LINEARS
from quantkit_kernels.timing import seconds_in_turns
from quantkit_kernels.triton.cards import architecture, dense_plan
from torch import Tensor

LAYERS = 4
"""1.5 GB of weights."""
HIDDEN, EPS = 4096, 1e-6


class DenseLayer:
    """Of Qwen3-8B, by one backend. weights: [N, K] by the linear's name."""

    def __init__(self, weights: dict[str, Tensor], backend: str) -> None:
        self._linears: dict[str, Linear] = {
            name: prepare_dense(weight, backend=backend) for name, weight in weights.items()
        }

    def __call__(self, x: Tensor, gain: Tensor) -> Tensor:
        normed = rms_norm(x, gain, EPS)
        self._linears["qkv"](normed)
        normed, x = add_rms_norm(self._linears["o"](rms_norm(normed, gain, EPS)), x, gain, EPS)
        return self._linears["down"](silu_and_mul(self._linears["gate_up"](normed)))

    def check(self, weights: dict[str, Tensor], rows: int) -> None:
        """Raises AssertionError where a linear is further from float64 than every other may be."""
        for name, linear in self._linears.items():
            x = torch.randn(rows, linear.in_features, device=linear.device).to(linear.dtype)
            error = distance(linear(x).cpu(), (x.double() @ weights[name].double().T).cpu())
            assert error < TOLERANCE[linear.dtype], (name, rows, error)


def layers_of(layers: list[DenseLayer], x: Tensor, gain: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        hidden = x
        for layer in layers:
            hidden = layer(hidden, gain)
        return hidden

    return run


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device, found = torch.device("cuda"), []
    made = partial(torch.randn, device=device)
    weights = [
        {name: (made(n, k) / k**0.5).bfloat16() for name, (n, k) in QWEN3_8B_LINEARS.items()}
        for _ in range(LAYERS)
    ]
    sides = [
        [DenseLayer(of_layer, backend) for of_layer in weights]
        for backend in ("expanded", "triton")
    ]
    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    for rows in options.rows:
        sides[1][0].check(weights[0], rows)
        x = made(rows, HIDDEN).bfloat16()
        library, ours = (
            seconds * 1e6 / LAYERS
            for seconds in seconds_in_turns([[layers_of(side, x, gain)] for side in sides], device)
        )
        plans = {
            name: str(dense_plan(architecture(device), n, k, rows))
            for name, (n, k) in QWEN3_8B_LINEARS.items()
        }
        found.append({"rows": rows, "library_us": library, "us": ours, "plans": plans})
        print(f"{rows} rows, a layer: library {library:.1f} us, ours {ours:.1f}", flush=True)
    return {"device": torch.cuda.get_device_name(), "rows": found}


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--rows", type=numbers, default="1,8,32,64")
    measured(run, options)
