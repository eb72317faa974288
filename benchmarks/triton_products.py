# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Triton's products on one card, by the plans that the backend takes, next to the CUDA kernels,
vLLM's and torch's libraries in one run.

    python benchmarks/triton_products.py [--vllm SITE-PACKAGES/vllm] [--kinds int8,fp4,int4]
    [--experts fp4,int4] [--open]
        [--seconds 200] [--out FILE.json]

Linears of DeepSeek-R1 and Qwen3-8B and routed experts of R1, whole and of a rank of four. Times are
graph replays over weights that rotate beyond the cache, all sides in turns, the median of 15.
vLLM's: Marlin for fp4 and int4, for int8 CUTLASS after quantizing the activations.
library: int4 and fp4 decoded to 16 bits for cuBLAS; int8 torch._int_mm after quantizing, and one
kernel that scales. Kernels are compiled first, by several processes, which hold every product
against float64: those that are timed, and products of odd sizes.

--open: of FP4 only the products that missed the target on 23 November. After --seconds no further
product is begun.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from core import measured, numbers, parser, words
from quantkit_kernels import ExpertsBuilder, prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.linear import Linear
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.sizes import QWEN3_8B_LINEARS, R1_LINEARS
from quantkit_kernels.timing import copies_beyond_cache, seconds_in_turns
from quantkit_kernels.triton import rows as row_kernels
from quantkit_kernels.triton.cards import architecture, linear_plan, multiprocessors
from quantkit_kernels.triton.tune import linears as triton_copies
from quantkit_kernels.weights import rows
from torch import Tensor

GRIDS = {"int8": "int8", "fp4": "fp4", "int4": "int4-asym-128"}
LINEARS = R1_LINEARS | {f"Qwen {name}": size for name, size in QWEN3_8B_LINEARS.items()}
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
OPEN_FP4 = {
    **{
        "shared_gu": (1, 64),
        "Qwen down": (1, 64),
        "shared_dn": (32,),
        "q_a+kv_a": (32,),
        "Qwen qkv": (32, 64),
        "Qwen o": (32, 64, 128),
    },
    "dense_gu": (1, 4, 64, 128),
}
ODD = (
    *(
        ("int8", 70, 1152, 1),
        ("int8", 33, 40016, 129),
        ("int8", 5120, 5120, 777),
        ("int8", 12345, 432, 20),
        ("int8", 1000, 1664, 300),
    ),
    *(
        ("fp4", 200, 1152, 3),
        ("fp4", 33, 5504, 40),
        ("fp4", 5160, 640, 130),
        ("fp4", 1000, 1664, 300),
        ("fp4", 7000, 3456, 700),
    ),
    *(
        ("int4-asym-128", 200, 1152, 3),
        ("int4-asym-64", 1000, 1664, 70),
        ("int4-sym-128", 5160, 640, 300),
    ),
    *(
        ("int4-asym-32", 70, 1152, 1),
        ("int4-asym-32", 1000, 1664, 33),
        ("int4-asym-32", 5160, 640, 200),
        ("int4-asym-32", 4104, 2944, 513),
    ),
)
"""Grid, N, K and tokens: N that are no multiples of 64, K of odd multiples of 128 or 16, groups of
32."""
EXPERTS = {"experts": (256, 7168, 2048, 8), "experts of a rank of four": (256, 7168, 512, 8)}
"""How many, hidden and intermediate size, experts of a token."""
EXPERT_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
SAMPLED = 384
PROCESS_BYTES = 12 << 30
"""Of a process that lays out the largest weight."""
FEWEST_INT_MM = 17
"""Rows that torch._int_mm takes, at least."""
Call = Callable[[], object]

if find_spec("triton"):  # --help works without it
    import triton
    import triton.language as tl

    @triton.jit
    def scale_sums(sums, x_scale, scale, y, n, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < n
        value = tl.load(sums + row * n + column, mask=inside).to(tl.float32)
        value = value * tl.load(x_scale + row) * tl.load(scale + column, mask=inside)
        tl.store(y + row * n + column, value.to(y.dtype.element_ty), mask=inside)


class Product(NamedTuple):
    kind: str
    linear: str
    tokens: int


def products(kinds: Sequence[str], token_counts: Sequence[int], only_open: bool) -> list[Product]:
    """A kind's after those of the kind before, a linear's side by side."""
    found = [
        Product(kind, name, count) for kind in kinds for name in LINEARS for count in token_counts
    ]
    return [
        one
        for one in found
        if not (only_open and one.kind == "fp4") or one.tokens in OPEN_FP4.get(one.linear, ())
    ]


def errors_of(
    what: tuple[str, str, int, Sequence[tuple[str, int, int]]],
) -> list[tuple[str, int, int, int, float]]:
    """Of products of so many tokens by weights (grid, n, k) the distance to float64: the last rows
    of the weight, and others."""
    device_name, _, tokens, shapes = what
    device, found = torch.device(device_name), []
    rng = torch.Generator(device).manual_seed(tokens)
    for grid, n, k in shapes:
        weight = random_weight(grid, n, k, rng)
        x = torch.randn(tokens, k, generator=rng, device=device).bfloat16()
        y = prepare(weight, backend="triton")(x)
        parts = [(0, min(SAMPLED, n)), (max(0, n - SAMPLED), n)]
        worst = max(
            distance(y[:, start:stop], exact_linear(x, rows(weight, start, stop)))
            for start, stop in parts
        )
        found.append((grid, n, k, tokens, worst))
    return found


def compiled(
    device: torch.device, wanted: Sequence[Product]
) -> list[tuple[str, int, int, int, float]]:
    """Every kernel that will be timed, made by running it once; and the error of every product, odd
    ones too."""
    work: list[tuple[str, str, int, list[tuple[str, int, int]]]] = []
    for kind, tokens in dict.fromkeys((one.kind, one.tokens) for one in wanted):
        names = [one.linear for one in wanted if (one.kind, one.tokens) == (kind, tokens)]
        halves = (names[::2], names[1::2])
        work += [
            (str(device), kind, tokens, [(GRIDS[kind], *LINEARS[name]) for name in half])
            for half in halves
            if half
        ]
    work += [(str(device), grid, tokens, [(grid, n, k)]) for grid, n, k, tokens in ODD]
    if device.type == "cpu":
        return [found for one in work for found in errors_of(one)]
    work.sort(key=lambda one: -one[2])
    room = torch.cuda.mem_get_info()[0] // PROCESS_BYTES
    with multiprocessing.get_context("spawn").Pool(
        max(1, min((os.cpu_count() or 2) - 2, room))
    ) as pool:
        return [found for part in pool.imap_unordered(errors_of, work) for found in part]


def scaled_by_library(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """W8A8 by torch: x quantized by our kernel, int8 by cuBLASLt into int32, and a kernel that
    scales."""
    x_codes, x_scale = row_kernels.quantize_rows(x)
    return scaled(torch._int_mm(x_codes, codes.T), x_scale, scale, x.dtype)


def scaled(sums: Tensor, x_scale: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """sums int32 [M, N] times the scale of each row and column, in one launch on a GPU."""
    if sums.device.type == "cpu":
        return (sums.float() * x_scale[:, None] * scale.T).to(dtype)
    y = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    scale_sums[(sums.shape[0], -(-sums.shape[1] // 2048))](
        sums, x_scale, scale, y, sums.shape[1], BLOCK=2048
    )
    return y


def sides(
    kind: str, n: int, k: int, rng: torch.Generator, peer: Any
) -> Callable[[Tensor], dict[str, list[Call]]]:
    """Of every side its weights, enough to leave the cache; of x[M, k] a call for each."""
    device = rng.device
    ours = triton_copies(kind, n, k, rng)
    weight = random_weight(GRIDS[kind], n, k, rng)
    cuda: list[Linear] = []
    if (
        device.type == "cuda"
        and why_unusable(f"linear_{kind}", "cuda", device, torch.bfloat16, ((n, k),)) is None
    ):
        first = prepare(weight, backend="cuda")
        cuda = [
            first,
            *(
                prepare(weight, backend="cuda")
                for _ in range(copies_beyond_cache(first.nbytes, device) - 1)
            ),
        ]
    theirs = peer.linears(kind, n, k) if peer else None
    plain = (
        [torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device) for _ in ours]
        if kind == "int8"
        else []
    )

    def calls(x: Tensor) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {"triton": [partial(one, x) for one in ours]}
        if cuda:
            found["cuda"] = [partial(one, x) for one in cuda]
        if theirs is not None:
            found["vllm"] = theirs(x)
        if kind == "int8" and len(x) >= FEWEST_INT_MM:
            found["library"] = [
                partial(scaled_by_library, x, codes, torch.ones(n, 1, device=device))
                for codes in plain
            ]
        elif kind != "int8" and len(x) >= 32:
            found["library"] = [partial(one.expand, x) for one in ours]
        return found

    return calls


def working(calls: dict[str, list[Call]], device: torch.device) -> dict[str, list[Call]]:
    """Without other people's kernels that do not start here, which is said."""
    found = {}
    for side, some in calls.items():
        try:
            some[0]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[side] = some
        except RuntimeError as fault:
            if side in ("triton", "cuda"):
                raise
            print(
                f"{side} does not start, and is left out: {str(fault).splitlines()[0]}", flush=True
            )
    return found


def timed_linears(
    device: torch.device, wanted: Sequence[Product], peer: Any, until: float
) -> Iterator[dict[str, Any]]:
    rng = torch.Generator(device).manual_seed(1)
    name, processors = architecture(device), multiprocessors(device)
    for kind, linear in dict.fromkeys((one.kind, one.linear) for one in wanted):
        if time.monotonic() > until:
            return
        n, k = LINEARS[linear]
        make = sides(kind, n, k, rng, peer)
        for tokens in (one.tokens for one in wanted if (one.kind, one.linear) == (kind, linear)):
            plan = linear_plan(name, processors, kind, n, k, tokens)
            calls = working(
                make(torch.randn(tokens, k, generator=rng, device=device).bfloat16()), device
            )
            same = plan is None and calls.pop("library", None) is not None
            times = dict(
                zip(
                    calls,
                    (1e6 * one for one in seconds_in_turns(list(calls.values()), device)),
                    strict=True,
                )
            )
            if same:  # the same launches
                times["library"] = times["triton"]
            yield {
                "kind": kind,
                "linear": linear,
                "n": n,
                "k": k,
                "tokens": tokens,
                "plan": str(plan),
                **times,
            }
        del make
        if device.type == "cuda":
            torch.cuda.empty_cache()


def layer_of_experts(
    kind: str, sizes: tuple[int, int, int, int], backend: str, rng: torch.Generator
) -> Any:
    """Experts that are four in turns."""
    count, hidden, intermediate, _ = sizes
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    few = [[random_weight(GRIDS[kind], n, k, rng) for n, k in shapes] for _ in range(4)]
    builder = ExpertsBuilder(count, backend=backend, device=rng.device)
    for index in range(count):
        builder.add(index, *few[index % 4])
    return builder.finish()


def timed_experts(
    device: torch.device, kinds: Sequence[str], peer: Any, until: float
) -> Iterator[dict[str, Any]]:
    for kind, (name, sizes) in product(kinds, EXPERTS.items()):
        if time.monotonic() > until:
            return
        count, hidden, intermediate, top_k = sizes
        layers = {}
        for backend in ("triton", "cuda") if device.type == "cuda" else ("triton",):
            rng = torch.Generator(device).manual_seed(2)
            layers[backend] = layer_of_experts(kind, sizes, backend, rng)
        theirs = (
            peer.experts(kind, count, hidden, intermediate) if peer and kind != "int8" else None
        )
        for tokens in EXPERT_TOKENS:
            x = torch.randn(tokens, hidden, generator=rng, device=device).bfloat16()
            ids = [
                torch.rand(tokens, count, generator=rng, device=device)
                .topk(top_k, dim=-1)
                .indices.int()
                for _ in range(4)
            ]
            weights = torch.rand(tokens, top_k, generator=rng, device=device)
            calls: dict[str, list[Call]] = {
                side: [partial(layer, x, one, weights) for one in ids]
                for side, layer in layers.items()
            }
            first, *others = (layer(x, ids[0], weights).float() for layer in layers.values())
            apart = max((float((first - one).norm() / one.norm()) for one in others), default=0.0)
            if theirs is not None:
                calls["vllm"] = [partial(theirs, x, one, weights) for one in ids]
            calls = working(calls, device)
            times = dict(
                zip(
                    calls,
                    (1e6 * one for one in seconds_in_turns(list(calls.values()), device)),
                    strict=True,
                )
            )
            yield {"kind": kind, "linear": name, "tokens": tokens, "apart": apart, **times}
        del layers, theirs, calls
        if device.type == "cuda":
            torch.cuda.empty_cache()


def target(cell: dict[str, Any]) -> tuple[float, float] | None:
    """What is asked for, and what Triton takes, each of the best of the others'; None where there is
    no other."""
    names = ("vllm",) if cell["linear"] in EXPERTS else ("vllm", "library")
    others = [cell[name] for name in names if name in cell]
    asked = 1.2 if cell["linear"] in EXPERTS else 1.15 if cell["tokens"] <= 16 else 1.1
    return (asked, cell["triton"] / min(others)) if others else None


def shown(cell: dict[str, Any]) -> str:
    times = ", ".join(
        f"{side} {cell[side]:.1f}" for side in ("triton", "cuda", "vllm", "library") if side in cell
    )
    asked = target(cell)
    ratio = (
        "" if asked is None else f" ratio {asked[1]:.2f}{' BEYOND' if asked[1] > asked[0] else ''}"
    )
    return (
        f"{cell['kind']} {cell['linear']} of {cell['tokens']}: {times}{ratio} "
        f"{cell.get('plan', cell.get('apart'))}"
    )


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    device = torch.device(options.device)
    wanted, until = products(options.kinds, options.tokens, options.open), began + options.seconds
    report: dict[str, Any] = {}
    report["errors"] = [] if options.checked else compiled(device, wanted)
    beyond = [one for one in report["errors"] if one[4] > TOLERANCE[torch.bfloat16]]
    print(
        f"{time.monotonic() - began:.0f} s: {len(report['errors'])} products against float64, "
        f"beyond the tolerance: {beyond}",
        flush=True,
    )
    print(
        "largest:",
        {
            kind: max((one[4] for one in report["errors"] if kind in one[0]), default=None)
            for kind in GRIDS
        },
        flush=True,
    )
    peer = None
    if options.vllm is not None:
        try:
            from vllm_kernels import VllmKernels

            peer = VllmKernels(options.vllm)
        except (OSError, RuntimeError) as fault:
            print(f"vLLM's kernels cannot be loaded, all else is timed: {fault}", flush=True)
    report["cells"] = []
    timed = (
        timed_linears(device, wanted, peer, until),
        timed_experts(device, options.experts, peer, until),
    )
    for cell in (cell for part in timed for cell in part):
        report["cells"].append(cell)
        print(shown(cell), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report))
    for kind in dict.fromkeys(cell["kind"] for cell in report["cells"]):
        held = [
            one
            for cell in report["cells"]
            if cell["kind"] == kind and (one := target(cell)) is not None
        ]
        print(
            f"{kind}: {sum(ratio <= asked for asked, ratio in held)} of {len(held)} within what is "
            "asked"
        )
    print(f"{time.monotonic() - began:.0f} s in all")
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kinds", type=words, default=list(GRIDS))
    options.add_argument("--experts", type=words, default=[])
    options.add_argument("--tokens", type=numbers, default=list(TOKENS))
    options.add_argument("--open", action="store_true")
    options.add_argument(
        "--checked", action="store_true", help="compiled and held against float64 by an earlier run"
    )
    options.add_argument("--vllm", type=Path)
    options.add_argument("--seconds", type=float, default=200.0)
    options.add_argument("--device", default="cuda")
    measured(run, options)


if __name__ == "__main__":
    main()
