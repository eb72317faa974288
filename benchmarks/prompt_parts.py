"""Where a prompt's time goes on one tensor-parallel rank of DeepSeek-R1, by part, for passes of
some sizes.

    python benchmarks/prompt_parts.py [--lengths 16384,61440,30720,8192] [--chunks 4096,8192] [--tp
    4] [--layers N] [--rounds 3]
        [--seconds 240] [--out FILE.json]
    python benchmarks/prompt_parts.py --tiny            the same on a CPU in seconds, with small sizes: a test of the script

The weights are those of r1_synthetic.py, the model and its passes the executor's own. Two tables:
seconds to the first token, whole, sizes of passes in turns, the median of some prompts after one;
then milliseconds by part of one prompt more, by events around each operator. A part holds what no
other part inside it holds; TFLOP/s are of products alone, causal ones for attention. Sums over
ranks, tokenizer and server are left out.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from command import measured, numbers, parser
from quantkit_kernels.cuda.experts import sorted as sorted_experts
from quantkit_kernels.cuda.linears import linear as cuda_linear
from quantkit_kernels.cuda.linears import tiles
from quantkit_kernels.triton.attention import prefill
from r1_rank import Rank, first_token
from r1_synthetic import R1, TINY

from quantkit.executor.runner import attention_context
from quantkit.models import decoder, deepseek_v3, mlp

TIMED: tuple[tuple[Any, str, str], ...] = (
    (prefill, "mla_prefill", "queries turned, parts merged"),
    (prefill, "entries", "latents gathered"),
    (prefill, "_launch", "attention"),
    (attention_context, "mla_prepare", "latents stored"),
    (cuda_linear.CudaLinear, "rows", "linears: decoded"),
    (mlp.MoeMlp, "choose", "router"),
    (sorted_experts, "sort_pairs", "experts: sorted"),
    (sorted_experts, "multiply_tiles", "experts: products"),
    (tiles, "_arrange", "experts: arranged"),
    (sorted_experts, "sum_rounded_pairs", "experts: summed"),
    (decoder, "add_rms_norm", "norms"),
    (decoder, "rms_norm", "norms"),
)
"""Whose attribute is a part, and the part's name."""
MULTIPLIED: tuple[tuple[Any, str], ...] = (
    (prefill, "latents expanded"),
    (cuda_linear, "linears: products"),
)
"""Modules whose `F.linear`, all they use of `F`, is a part."""


class Clock:
    """Times of parts that lie inside one another, by the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, int, Any, Any]] = []
        """Of each its part, the span around it or -1, begin and end."""
        self._open: list[int] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            number, begin = len(self._spans), self._now()
            self._spans.append((part, self._open[-1] if self._open else -1, begin, begin))
            self._open.append(number)
            result = function(*args, **named)
            self._spans[self._open.pop()] = (*self._spans[number][:3], self._now())
            return result

        return call

    def milliseconds(self) -> dict[str, float]:
        """Of each part what lies in no other part inside it."""
        if self._cuda:
            torch.cuda.synchronize()
        own: dict[str, float] = defaultdict(float)
        for part, around, begin, end in self._spans:
            took = begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3
            own[part] += took
            if around >= 0:
                own[self._spans[around][0]] -= took
        return dict(own)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def by_part(clock: Clock) -> Iterator[None]:
    """While it lasts, operators note when they begin and end."""
    places: list[tuple[Any, str, Any]] = [
        (owner, name, clock.timed(part, getattr(owner, name))) for owner, name, part in TIMED
    ]
    places += [
        (owner, "F", SimpleNamespace(linear=clock.timed(part, F.linear)))
        for owner, part in MULTIPLIED
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, timed in places:
            setattr(owner, name, timed)
        yield
    finally:
        for owner, name, own in before:
            setattr(owner, name, own)


def parts_of(rank: Rank, length: int, chunk: int) -> dict[str, float]:
    """Milliseconds by part, the rest and the whole of one prompt."""
    clock, token_ids = Clock(rank.device), rank.first_tokens(length)
    with by_part(clock):
        clock.timed("the rest", first_token)(rank, token_ids, chunk)
    parts = clock.milliseconds()
    return dict(sorted(parts.items(), key=lambda one: -one[1])) | {"all": sum(parts.values())}


def products(rank: Rank, tp: int, length: int, chunk: int) -> dict[str, float]:
    """FLOP of a prompt by part."""
    config, layers = rank.config, rank.config.num_hidden_layers
    heads, rows = config.num_attention_heads // tp, config.qk_nope_head_dim + config.v_head_dim
    ends = [min(start + chunk, length) for start in range(0, length, chunk)]
    pairs = length * (length + 1) // 2
    linears = [op for part, ops in rank.weights.linears.items() if part != "head" for op in ops]
    routed = sum(isinstance(layer.mlp, mlp.MoeMlp) for layer in rank.model.layers)
    expert = 3 * config.hidden_size * config.moe_intermediate_size // tp
    return {
        "attention": 2.0 * layers * heads * (config.qk_head_dim + config.v_head_dim) * pairs,
        "latents expanded": 2.0 * layers * heads * rows * config.kv_lora_rank * sum(ends),
        "linears: products": 2.0 * length * sum(op.in_features * op.out_features for op in linears),
        "experts: products": 2.0
        * routed
        * length
        * (config.num_experts_per_tok + config.n_shared_experts)
        * expert,
    }


def whole(rank: Rank, length: int, chunks: list[int], rounds: int) -> dict[int, float]:
    """Seconds to the first token by the size of a pass: the median of some prompts after one, in
    turns."""
    times: dict[int, list[float]] = {chunk: [] for chunk in chunks}
    for _ in range(rounds + 1):
        for chunk in chunks:
            token_ids = rank.first_tokens(length)
            began = time.perf_counter()
            first_token(rank, token_ids, chunk)
            times[chunk].append(time.perf_counter() - began)
    return {chunk: statistics.median(took[1:]) for chunk, took in times.items()}


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    began = time.perf_counter()
    device = torch.device("cpu" if options.tiny else "cuda")
    fields = (TINY if options.tiny else R1) | (
        {"num_hidden_layers": options.layers} if options.layers else {}
    )
    config = deepseek_v3.Config.from_dict(fields)
    lengths, chunks = ([48, 20], [16, 32]) if options.tiny else (options.lengths, options.chunks)
    rank = Rank(config, options.tp, max(lengths), device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tp": options.tp,
        "layers": config.num_hidden_layers,
        "rows": [],
    }
    print(", ".join(f"{key} {value}" for key, value in report.items() if key != "rows"), flush=True)
    for length in lengths:
        if time.perf_counter() - began > options.seconds:
            print(f"no time left for {length} tokens and what comes after")
            break
        seconds = whole(rank, length, chunks, options.rounds)
        for chunk in chunks:
            parts, work = parts_of(rank, length, chunk), products(rank, options.tp, length, chunk)
            rates = {part: flop / parts[part] / 1e9 for part, flop in work.items() if part in parts}
            peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
            row = {
                "tokens": length,
                "chunk": chunk,
                "seconds": seconds[chunk],
                "parts_ms": parts,
                "tflops": rates,
                "peak_gb": peak,
            }
            report["rows"].append(row)
            print(
                f"\n{length} tokens in passes of {chunk}: {seconds[chunk]:.4f} s; ms by part "
                f"(TFLOP/s), {parts['all']:.1f} in all"
            )
            for part, took in parts.items():
                print(
                    f"  {part:<32}{took:>9.2f}  {f'{rates[part]:.0f}' if part in rates else ''}",
                    flush=True,
                )
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--lengths", type=numbers, default=[16384, 61440, 30720, 8192])
    options.add_argument("--chunks", type=numbers, default=[4096, 8192], help="tokens of a pass")
    options.add_argument("--tp", type=int, default=4)
    options.add_argument("--layers", type=int, default=0, help="of the model's; all by default")
    options.add_argument(
        "--rounds", type=int, default=3, help="prompts that are timed, after one that is not"
    )
    options.add_argument(
        "--seconds", type=float, default=240, help="no prompt length begins after so many"
    )
    options.add_argument("--tiny", action="store_true")
    measured(run, options)


if __name__ == "__main__":
    main()
