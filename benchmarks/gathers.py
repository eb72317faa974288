"""Gathers of R1's logits over the GPUs of one host: through the memory that ranks open to each
other, beside NCCL.

    torchrun --nproc-per-node 4 benchmarks/gathers.py [--rows 1,8,32,33,48,64,96,128] [--out
    FILE.json]
    torchrun --nproc-per-node 2 benchmarks/gathers.py --tiny             on a CPU (gloo): a test of the script

Each rank has bfloat16 [rows, 129280 / ranks]. First both are compared: the same bytes on every
rank, which are those of each rank's part. Then microseconds of one gather in a captured chain of
fifty, the largest of the ranks' medians, in two turns.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command import numbers
from made_engine import joined_ranks, report_of_ranks
from r1_box import chain
from torch import Tensor

from quantkit.executor.ranks.parallel import Parallel

VOCAB = 129280


def part_of(rank: int, size: int, rows: int, vocab: int, device: torch.device) -> Tensor:
    """Of a rank: other numbers than any other's."""
    places = torch.arange(rows * vocab, device=device).view(rows, vocab)[
        :, rank * vocab // size : (rank + 1) * vocab // size
    ]
    return (places * 31 % 8191).to(torch.bfloat16)


def compared(
    parallel: Parallel,
    methods: dict[str, Callable[[Tensor], Tensor]],
    rows: int,
    vocab: int,
    device: torch.device,
) -> None:
    """AssertionError where a gather has other bytes than the parts side by side."""
    whole = torch.cat(
        [part_of(rank, parallel.size, rows, vocab, device) for rank in range(parallel.size)], dim=1
    )
    own = part_of(parallel.rank, parallel.size, rows, vocab, device)
    for name, method in methods.items():
        for _ in range(3):
            assert torch.equal(method(own).view(torch.int16), whole.view(torch.int16)), (
                f"{name} of {rows} rows"
            )


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    parallel, device = joined_ranks(options.tiny)
    vocab = 4096 if options.tiny else VOCAB
    peers, found = parallel.peers, list[dict[str, Any]]()

    def by_library(x: Tensor) -> Tensor:
        parallel.peers = None
        try:
            return parallel.all_gather(x)
        finally:
            parallel.peers = peers

    methods: dict[str, Callable[[Tensor], Tensor]] = {"library": by_library}
    if peers is not None:
        methods["ours"] = peers.all_gather
    for rows in options.rows:
        x = part_of(parallel.rank, parallel.size, rows, vocab, device)
        own = {
            name: method
            for name, method in methods.items()
            if name == "library" or peers.gathers(x)
        }
        compared(parallel, own, rows, vocab, device)
        row: dict[str, Any] = {"rows": rows, "bytes_of_all": rows * vocab * 2}
        for turn in (1, 2):
            for name, method in own.items():
                times = parallel.gather(chain(partial(method, x), device))
                row[f"{name}, turn {turn}, us"] = max(times)
        found.append(row)
        if parallel.rank == 0:
            print("  ".join(f"{key} {value:.5g}" for key, value in row.items()), flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "ranks": parallel.size, "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 33, 48, 64, 96, 128])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    report_of_ranks(run, parser.parse_args())


if __name__ == "__main__":
    main()
