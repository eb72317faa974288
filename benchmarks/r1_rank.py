"""One tensor-parallel rank of DeepSeek-R1 on one device: time of a decode step against the bytes it
must read, and time to first token.

    python benchmarks/r1_rank.py [--tp 4] [--concurrency 1,8,32] [--context 640] [--long 30000]
    [--prefill 128,4096] [--chunk 8192]
        [--cache int8] [--backend NAME] [--layers N] [--out FILE.json]
    python benchmarks/r1_rank.py --tiny                 the same on a CPU in seconds, with small sizes: a test of the script
    python benchmarks/r1_rank.py --prefill-profile      also where the host spends a prompt's time

The weights are those of r1_synthetic.py, all 61 layers: a step streams what it needs of 88 GB at tp
4, far beyond any cache. The executor's own model, cache and captured decode step compute.

What a whole box would add is left out and said so: the all-reduces (2 a layer; the partial sums go
straight into the residual), the all-gather of the logits, tokenizer and server. TPOT is the wall
clock from one step's tokens on the host to the next's.

Last, the step with one guess of the MTP layer: two rows a sequence, then the layer over both, one
wait of the host. Time per token follows from an acceptance, which made-up weights do not have.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from command import measured, numbers, parser
from grouped_model import launches_of
from quantkit_kernels import CODES, add_rms_norm, prefer
from quantkit_kernels.timing import read_bandwidth, seconds_per_call
from r1_synthetic import R1, TINY, CountedExperts, SyntheticWeights, fill_cache
from torch import Tensor

from quantkit.executor.cache.cache import BLOCK_SIZE, CacheCodes, PagedCache, cache_dtype
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import DecodeSteps, DeviceCapture, compute
from quantkit.executor.runner.prefill_graphs import PrefillChunk, PrefillRunner
from quantkit.models import deepseek_v3
from quantkit.models.mlp import MoeMlp

ACCEPTANCE = 0.7
"""Share of guesses taken to be right."""

STEPS = 32
"""Tokens generated for one TPOT figure, after as many warm-up steps as it takes to capture."""


class Rank:
    """The model with a cache whose every slot holds something."""

    def __init__(
        self,
        config: deepseek_v3.Config,
        tp: int,
        tokens: int,
        device: torch.device,
        codes: torch.dtype | None = None,
    ) -> None:
        self.config, self.device = config, device
        self.token_bytes = config.cache.token_bytes(16 if codes is None else 8)
        self.weights = SyntheticWeights(config, tp, device)
        self.model = deepseek_v3.Model(config, self.weights)
        blocks = -(-tokens // BLOCK_SIZE) + 1
        self.cache = PagedCache(
            config.num_hidden_layers + 1,
            blocks,
            config.cache_width,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=device,
            parts=()
            if codes is None
            else (config.kv_lora_rank, config.cache_width - config.kv_lora_rank),
            codes=None if codes is None else CacheCodes(codes, 0),
        )
        fill_cache(self.cache)
        self._capture = (
            DeviceCapture(device) if device.type == "cuda" else lambda step, lengths: step
        )
        self.steps = DecodeSteps(self.model, self.cache, self._capture)
        self.prompts = PrefillRunner(self.model, self.cache, self._capture)

    def draft_steps(self) -> DecodeSteps:
        """Of an MTP layer, made now."""
        return DecodeSteps(
            deepseek_v3.MtpLayer(self.config, self.weights), self.cache, self._capture
        )

    def rows(self, token_ids: Sequence[int], position: int, room: int, each: int = 1) -> DecodeRows:
        """`each` rows per sequence, at `position` and after it; each sequence has blocks of its own
        for `room` tokens."""
        count, per_row = len(token_ids) // each, -(-room // BLOCK_SIZE)
        tables = (1 + np.arange(count * per_row).reshape(count, per_row)).repeat(each, axis=0)
        assert tables[-1, -1] < self.cache.num_blocks, (tables[-1, -1], self.cache.num_blocks)
        positions = position + np.tile(np.arange(each), count)
        slots = (
            tables[np.arange(count * each), positions // BLOCK_SIZE] * BLOCK_SIZE
            + positions % BLOCK_SIZE
        )
        return DecodeRows(np.array(token_ids), positions, slots, tables)

    def first_tokens(self, count: int) -> list[int]:
        return torch.randint(0, self.config.vocab_size, (count,)).tolist()


def decode_row(rank: Rank, concurrency: int, context: int, bandwidth: float) -> dict[str, Any]:
    """TPOT at a context, and what the step read."""
    room = context + STEPS + 1
    token_ids = rank.first_tokens(concurrency)
    began = time.perf_counter()
    rank.steps.run(rank.rows(token_ids, context, room)).greedy.tolist()
    capture_s = time.perf_counter() - began
    walls = []
    for step in range(STEPS):
        began = time.perf_counter()
        token_ids = rank.steps.run(rank.rows(token_ids, context + step, room)).greedy.tolist()
        walls.append(time.perf_counter() - began)
    last = rank.rows(token_ids, context + STEPS, room)
    difference, distinct = compare(rank, last)
    read = rank.weights.read(distinct)
    read["latents"] = concurrency * context * rank.token_bytes * rank.config.num_hidden_layers
    total = sum(read.values())
    wall = statistics.median(walls)
    return {
        "concurrency": concurrency,
        "context": context,
        "tpot_ms": wall * 1e3,
        "device_ms": device_seconds(rank, rank.steps.prepare(last)[1]) * 1e3,
        "slowest_ms": max(walls) * 1e3,
        "tokens_per_s": concurrency / wall,
        "gb_read": total / 1e9,
        "floor_ms": total / bandwidth * 1e3,
        "share_of_bandwidth": total / bandwidth / wall,
        "distinct_experts": distinct,
        "capture_s": capture_s,
        "captured_against_eager": difference,
        "read_gb": {part: nbytes / 1e9 for part, nbytes in read.items()},
    }


def drafted_row(
    rank: Rank, drafts: DecodeSteps, concurrency: int, context: int, plain_ms: float
) -> dict[str, Any]:
    """A step that verifies one guess a sequence and makes the next; plain_ms: the step without."""
    room = context + 2 * STEPS + 4
    token_ids, walls = rank.first_tokens(2 * concurrency), []
    for step in range(STEPS):
        rows = rank.rows(token_ids, context + 2 * step, room, each=2)
        began = time.perf_counter()
        result = rank.steps.run(rows)
        guessed = drafts.run(rows, result.greedy, result.hidden)
        both = torch.cat((result.greedy, guessed.greedy)).tolist()
        walls.append(time.perf_counter() - began)
        token_ids = [
            token
            for pair in zip(both[1 : 2 * concurrency : 2], both[2 * concurrency + 1 :: 2])
            for token in pair
        ]
    wall = statistics.median(walls[4:]) * 1e3
    return {
        "concurrency": concurrency,
        "context": context,
        "step_ms": wall,
        "verify_device_ms": device_seconds(rank, rank.steps.prepare(rows)[1]) * 1e3,
        "guess_device_ms": device_seconds(
            rank, drafts.prepare(rows, result.greedy, result.hidden)[1]
        )
        * 1e3,
        "distinct_experts": compare(rank, rows)[1],
        "tpot_ms": wall / (1 + ACCEPTANCE),
        "gain": plain_ms * (1 + ACCEPTANCE) / wall,
        "why_eager": rank.steps.failure or drafts.failure,
    }


def compare(rank: Rank, rows: DecodeRows) -> tuple[float, float]:
    """How far the captured step's hidden states are from an eager one's (relative), and how many
    distinct experts a layer used."""
    buffers, step = rank.steps.prepare(rows)
    captured = step().hidden.clone()
    CountedExperts.distinct = []
    eager = compute(rank.model, buffers.inputs, buffers.context(rank.cache)).hidden
    distinct = statistics.mean(CountedExperts.distinct)
    CountedExperts.distinct = None
    assert eager.isfinite().all(), "the step computed something that is not finite"
    return float((captured.float() - eager.float()).norm() / eager.float().norm()), distinct


def device_seconds(rank: Rank, step: Callable[[], object]) -> float:
    """A step without the host: replays back to back, by the device's clock."""
    if rank.device.type != "cuda":
        return float("nan")
    times = []
    for _ in range(9):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def part_row(rank: Rank, row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by part: each part of all layers in a graph of its own. The last is
    what they leave of the step."""
    count, config = row["concurrency"], rank.config
    rows = rank.rows(rank.first_tokens(count), row["context"], row["context"] + STEPS + 1)
    buffers, _ = rank.steps.prepare(rows)
    context = buffers.context(rank.cache)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=rank.device)

    def milliseconds(calls: Sequence[Callable[[], object]]) -> float:
        return seconds_per_call(calls, rank.device) * len(calls) * 1e3

    x = random(count, config.hidden_size)
    parts = {}
    for part, linears in rank.weights.linears.items():
        inputs = random(count, linears[0].in_features)
        parts[part] = milliseconds([partial(op, inputs) for op in linears])
    layers = rank.model.layers
    moe = [layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp)]
    parts["router"] = milliseconds([partial(mlp.choose, x) for mlp in moe])
    # Each layer's own choice for other tokens: as many distinct experts as in a step.
    choices = [mlp.choose(random(count, config.hidden_size)) for mlp in moe]
    parts["experts"] = milliseconds(
        [partial(mlp.experts, x, *choice) for mlp, choice in zip(moe, choices)]
    )
    qkv_a = random(count, config.q_lora_rank + config.cache_width)
    q = random(count, layers[0].attention.kv_b.shape[0], config.qk_head_dim)
    attention = [layer.attention for layer in layers]
    store = [partial(context.store_mla, a.layer, qkv_a, a.norms, config.rope) for a in attention]
    parts["mla_prepare"] = milliseconds(store)
    attend = [
        partial(context.attend_mla, a.layer, q, a.kv_b, config.rope, config.softmax_scale)
        for a in attention
    ]
    parts["mla_decode"] = milliseconds(attend)
    gains = [gain for layer in layers for gain in (layer.input_norm, layer.mlp_norm)]
    parts["add_rms_norm"] = milliseconds(
        [partial(add_rms_norm, x, x, gain, config.rms_norm_eps) for gain in gains]
    )
    step = row["tpot_ms"] if rank.device.type == "cpu" else row["device_ms"]
    parts["embedding, angles, argmax, the rest"] = step - sum(parts.values())
    parts["host"] = row["tpot_ms"] - step
    return parts


def kernel_table(rank: Rank, concurrency: int, context: int) -> list[tuple[str, int, float]]:
    """The launches of one replay: name, count, milliseconds together; the longest first."""
    _, step = rank.steps.prepare(
        rank.rows(rank.first_tokens(concurrency), context, context + STEPS + 1)
    )
    return launches_of(step)


def time_to_first_token(rank: Rank, length: int, chunk: int) -> float:
    """Seconds from a prompt's token ids on the host to its first answer token there: the median of
    five, after two to warm up."""
    times = []
    for _ in range(7):
        token_ids = rank.first_tokens(length)
        began = time.perf_counter()
        first_token(rank, token_ids, chunk)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def first_token(rank: Rank, token_ids: list[int], chunk: int) -> None:
    """A prompt in passes of `chunk` tokens, as an engine computes them: short ones captured."""
    blocks = list(range(1, -(-len(token_ids) // BLOCK_SIZE) + 1))
    for start in range(0, len(token_ids), chunk):
        hidden = rank.prompts.run(
            None, [PrefillChunk(token_ids[start : start + chunk], start, blocks)]
        )
    rank.model.logits(hidden[-1:]).argmax(dim=-1).tolist()


def print_prefill_profile(rank: Rank, length: int, chunk: int) -> None:
    """Where a prompt's time goes: on the host by function, and on the device in all."""
    token_ids = rank.first_tokens(length)
    profiler = cProfile.Profile()
    profiler.runcall(first_token, rank, token_ids, chunk)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    if rank.device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            first_token(rank, token_ids, chunk)
            torch.cuda.synchronize()
        found = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
        print(
            f"{sum(one.count for one in found)} launches, "
            f"{sum(one.self_device_time_total for one in found) / 1e3:.2f} ms in kernels"
        )
        for one in found[:20]:
            print(f"  {one.self_device_time_total / 1e3:>8.3f} ms {one.count:>6} {one.key[:90]}")


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cpu" if options.tiny else "cuda")
    fields = (TINY if options.tiny else R1) | (
        {"num_hidden_layers": options.layers} if options.layers else {}
    )
    config = deepseek_v3.Config.from_dict(fields)
    prefer(options.backend, device)
    bandwidth = read_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    began = time.perf_counter()
    tokens = max(
        max(options.concurrency) * (options.context + 2 * STEPS + BLOCK_SIZE + 4),
        options.long + STEPS + BLOCK_SIZE + 1,
        *options.prefill,
    )
    rank = Rank(config, options.tp, tokens, device, cache_dtype(options.cache))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tp": options.tp,
        "cache": options.cache or "bf16",
        "layers": config.num_hidden_layers,
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "weights_gb": sum(rank.weights.read(config.n_routed_experts).values()) / 1e9,
        "cache_gb": rank.cache.nbytes / 1e9,
        "device_gb": torch.cuda.memory_allocated() / 1e9 if device.type == "cuda" else float("nan"),
        "made_s": time.perf_counter() - began,
    }
    backends = {part: ops[0].backend for part, ops in rank.weights.linears.items()} | {
        "experts": rank.weights.moe[0].backend
    }
    print(
        ", ".join(
            f"{key} {value if isinstance(value, (str, int)) else round(value, 2)}"
            for key, value in report.items()
        )
    )
    print(
        "backends:",
        ", ".join(f"{part} {backend}" for part, backend in backends.items()),
        flush=True,
    )
    report["rows"] = []
    for concurrency, context in [
        *((batch, options.context) for batch in options.concurrency),
        (1, options.long),
    ]:
        row = decode_row(rank, concurrency, context, bandwidth)
        row["why_eager"] = rank.steps.failure
        report["rows"].append(row)
        print(
            "  ".join(
                f"{key} {value:.4g}"
                for key, value in row.items()
                if isinstance(value, (int, float))
            ),
            rank.steps.failure,
            flush=True,
        )
    report["ttft_ms"] = {
        length: time_to_first_token(rank, length, options.chunk) * 1e3 for length in options.prefill
    }
    longer = report["rows"][-1]["tpot_ms"] / report["rows"][0]["tpot_ms"]
    print(
        "TTFT",
        ", ".join(f"of {length} tokens {ms:.1f} ms" for length, ms in report["ttft_ms"].items()),
    )
    print(f"TPOT at {options.long} / at {options.context}: {longer:.2f}", flush=True)
    for row in report["rows"]:
        row["parts_ms"] = part_row(rank, row)
        print(f"\nconcurrency {row['concurrency']}, context {row['context']}: ms by part (floor)")
        for part, value in row["parts_ms"].items():
            print(
                f"  {part:<38}{value:>8.3f}  {floor_of(part, row['read_gb'], bandwidth):>8}",
                flush=True,
            )
    if device.type == "cuda":
        for row in report["rows"]:
            _print_kernels(rank, row)
    if options.prefill_profile:
        print_prefill_profile(rank, options.prefill[-1], options.chunk)
    drafts = rank.draft_steps()
    report["drafted_rows"] = []
    for row in report["rows"]:
        drafted = drafted_row(rank, drafts, row["concurrency"], row["context"], row["tpot_ms"])
        report["drafted_rows"].append(drafted)
        print(
            "one guess: "
            + "  ".join(
                f"{key} {value:.4g}" if isinstance(value, (int, float)) else str(value)
                for key, value in drafted.items()
            )
        )
    return report


def _print_kernels(rank: Rank, row: dict[str, Any]) -> None:
    row["kernels"] = kernel_table(rank, row["concurrency"], row["context"])
    launches = sum(count for _, count, _ in row["kernels"])
    row["launches_per_layer"] = launches / rank.config.num_hidden_layers
    busy = sum(ms for _, _, ms in row["kernels"])
    head = (
        f"concurrency {row['concurrency']}, context {row['context']}: {launches} launches, "
        f"{row['launches_per_layer']:.1f} a layer"
    )
    print(f"\n{head}, {busy:.2f} ms in kernels")
    for name, count, ms in row["kernels"][:14]:
        print(f"  {ms:>8.3f} ms {count:>6} {name}", flush=True)


def floor_of(part: str, read_gb: dict[str, float], bandwidth: float) -> str:
    """Milliseconds that reading the part's bytes takes; empty for parts that read next to
    nothing."""
    gb = read_gb.get(part, 0.0)
    if part == "mla_decode":
        gb = read_gb["kv_b"] + read_gb["latents"]
    return f"{gb * 1e12 / bandwidth:.3f}" if gb else ""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tp", type=int, default=4)
    options.add_argument("--concurrency", type=numbers, default=[1, 8, 32])
    options.add_argument("--context", type=int, default=640)
    options.add_argument("--long", type=int, default=30000)
    options.add_argument("--prefill", type=numbers, default=[128])
    options.add_argument("--chunk", type=int, default=8192, help="tokens of a prompt in a pass")
    options.add_argument("--prefill-profile", action="store_true")
    options.add_argument("--cache", choices=CODES)
    options.add_argument(
        "--backend", default="auto", help="of kernels: serves every operator that it has"
    )
    options.add_argument("--layers", type=int, default=0, help="of the model's; all by default")
    options.add_argument("--tiny", action="store_true")
    measured(run, options)


if __name__ == "__main__":
    main()
