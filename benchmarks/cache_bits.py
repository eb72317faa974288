"""Attention of a decode step over a cache of 16 bits and of 8, in turns, on one device.

    python benchmarks/cache_bits.py [--rows 1,8,32] [--context 4096,30000] [--heads 32] [--out
    FILE.json]

mla_decode at DeepSeek-R1's sizes with as many heads as a tensor-parallel rank has, and gqa_decode
of Qwen3-8B's (32 heads of 128 that share 8 keys). Microseconds of a call, captured, over memory
beyond the last cache; the floor is reading what the call cannot but read.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from command import measured, numbers, parser
from quantkit_kernels import (
    CODES,
    CodedKeys,
    CodedLatents,
    PagedKeys,
    PagedLatents,
    Rotation,
    gqa_decode,
    mla_decode,
)
from quantkit_kernels.paged import parts_of
from quantkit_kernels.samples import code_keys, code_latents
from quantkit_kernels.timing import copies_beyond_cache, read_bandwidth, seconds_in_turns
from torch import Tensor

BLOCK = 64
KINDS = {"bf16": None, **CODES}
KV_HEADS, WIDTH, SHARED = 8, 128, 4


def table_of(rows: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks of every row in no order, and lengths."""
    each = -(-context // BLOCK)
    table = torch.randperm(rows * each, device=device).view(rows, each).int()
    return table, torch.full((rows,), context, dtype=torch.int32, device=device)


def latent_calls(
    kind: torch.dtype | None, rows: int, context: int, heads: int, device: torch.device
) -> tuple[Sequence[Callable[[], Tensor]], int]:
    """Calls over copies of a cache, and the bytes that one reads."""
    table, lengths = table_of(rows, context, device)
    q, kv_b = (
        torch.randn(rows, heads, 192, device=device).bfloat16(),
        (torch.randn(heads, 256, 512, device=device) / 512**0.5).bfloat16(),
    )
    angles = torch.rand(rows, 32, device=device) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    plain = torch.randn(table.numel(), BLOCK, 576, device=device, dtype=torch.bfloat16)
    cache = plain if kind is None else code_latents(plain, 512, kind)
    nbytes = sum(part.nbytes for part in parts_of(cache))
    copies = [cache] + [_copied(cache) for _ in range(copies_beyond_cache(nbytes, device) - 1)]
    calls = [
        partial(mla_decode, q, kv_b, rotation, PagedLatents(one, table, lengths), scale=0.07)
        for one in copies
    ]
    return calls, nbytes + kv_b.nbytes


def grouped_calls(
    kind: torch.dtype | None, rows: int, context: int, heads: int, device: torch.device
) -> tuple[Sequence[Callable[[], Tensor]], int]:
    """As `latent_calls`."""
    table, lengths = table_of(rows, context, device)
    q = torch.randn(rows, KV_HEADS * SHARED, WIDTH, device=device).bfloat16()
    shape = (table.numel(), BLOCK, KV_HEADS, WIDTH)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    cache = (keys, values) if kind is None else code_keys(keys, values, kind)
    nbytes = sum(part.nbytes for part in cache)
    copies = [cache] + [_copied(cache) for _ in range(copies_beyond_cache(nbytes, device) - 1)]
    pages = [
        PagedKeys(
            one[0],
            one[1],
            table,
            lengths,
            scales=one.scales if isinstance(one, CodedKeys) else None,
        )
        for one in copies
    ]
    return [partial(gqa_decode, q, one, scale=WIDTH**-0.5) for one in pages], nbytes


def _copied(cache: Any) -> Any:
    """Of one tensor, of several, or of codes."""
    if isinstance(cache, Tensor):
        return cache.clone()
    parts = (part.clone() for part in cache)
    return type(cache)(*parts) if isinstance(cache, CodedLatents | CodedKeys) else tuple(parts)


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    torch.cuda.empty_cache()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_bandwidth_gb_s": bandwidth / 1e9,
    }
    report["rows"] = []
    print(report, flush=True)
    for operator, make in (("mla_decode", latent_calls), ("gqa_decode", grouped_calls)):
        for context in options.context:
            for rows in options.rows:
                made = {
                    name: make(kind, rows, context, options.heads, device)
                    for name, kind in KINDS.items()
                }
                seconds = seconds_in_turns([calls for calls, _ in made.values()], device)
                times = {
                    name: {"us": one * 1e6, "floor_us": made[name][1] / bandwidth * 1e6}
                    for name, one in zip(made, seconds)
                }
                found = {"operator": operator, "rows": rows, "context": context, "times": times}
                report["rows"].append(found)
                told = "  ".join(
                    f"{name} {one['us']:.1f} us ({one['floor_us']:.1f}) x "
                    f"{one['us'] / times['bf16']['us']:.3f}"
                    for name, one in times.items()
                )
                print(f"{operator} {rows} x {context}: {told}", flush=True)
                del made
                torch.cuda.empty_cache()
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=numbers, default=[1, 8, 32])
    options.add_argument("--context", type=numbers, default=[4096, 30000])
    options.add_argument("--heads", type=int, default=32)
    measured(run, options)


if __name__ == "__main__":
    main()
