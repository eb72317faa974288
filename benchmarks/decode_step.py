"""A captured decode step on one device, by concurrency and context, against the bytes it must read:
one tensor-parallel rank of DeepSeek-R1, V3.2 or GLM-5, or another model whole.

    python benchmarks/decode_step.py [--model r1|deepseek-v3.2|glm-5|...] [--tp 4] [--backends cuda,triton]
        [--concurrency 1,8,32] [--context 640,30000] [--prefill 128,4096] [--chunk 8192] [--bits 16]
        [--grid int4-asym-128] [--cache int8] [--layers N] [--experts N] [--parts] [--out FILE.json]
    python benchmarks/decode_step.py --tiny            the same on a CPU in seconds, with small sizes: a test of the script

Weights are made up (made_weights.py), each layer with memory of its own, so that a step streams
what it needs far beyond any cache. The executor's own model, cache and captured decode step
compute. TPOT is the wall clock from one step's tokens on the host to the next's, device the same
step by the device's clock; TTFT is that of one prompt in passes of --chunk tokens, the last layer's
MLP for the last token of each. Left out: a box's all-reduces (partial sums go into the residual) and
gathering of logits, tokenizer and server. A case whose cache does not fit the device is not run.

--backends: several hold the same weights, one after the other, and their steps are replayed in
turns; the last line is each one's time over the first's. --parts: also the launches of a step, and
of R1 milliseconds by part, each part of all layers in a graph of its own, and the step with one
draft of the MTP layer: two rows a sequence, then the layer over both, one wait of the host.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from core import Spread, measured, numbers, parser, words
from made_weights import (
    DEEPSEEK_V4_FLASH,
    GLM_5,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
    R1,
    SMOLLM2,
    TINY,
    V32,
    CountedExperts,
    SyntheticWeights,
    fill_cache,
)
from quantkit_kernels import CODES, Weight, add_rms_norm, prefer
from quantkit_kernels.samples import random_weight
from quantkit_kernels.timing import read_bandwidth, seconds_per_call
from torch import Tensor

from quantkit.executor.cache.cache import (
    BLOCK_SIZE,
    CacheCodes,
    OtherCaches,
    PagedCache,
    cache_dtype,
)
from quantkit.executor.cache.compressed_kv import CompressedKVCache
from quantkit.executor.cache.sequence_state import RecurrentStates
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import DecodeSteps, DeviceCapture, compute
from quantkit.executor.runner.prefill_graphs import PrefillChunk, PrefillRunner
from quantkit.models import (
    deepseek_v3,
    deepseek_v32,
    find_architecture,
    llama,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from quantkit.models.architecture import CompressedCache
from quantkit.models.mlp import MoeMlp

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "r1": (deepseek_v3, R1),
    "deepseek-v3.2": (deepseek_v32, V32),
    "glm-5": (find_architecture({"model_type": "glm_moe_dsa"}), GLM_5),
    "deepseek-v4-flash": (find_architecture({"model_type": "deepseek_v4"}), DEEPSEEK_V4_FLASH),
    "qwen3-8b": (qwen3, QWEN3_8B),
    "qwen3-30b-a3b": (qwen3_moe, QWEN3_30B_A3B),
    "qwen3-next": (qwen3_next, QWEN3_NEXT_80B),
    "smollm2": (llama, SMOLLM2),
}
ACCEPTANCE = 0.7
"""Share of drafts taken to be right."""
STEPS, REPLAYS = 32, 31
"""Tokens generated for one TPOT figure, after the step that captures; replays of a step."""


class GridWeights(SyntheticWeights):
    """Made-up weights on any grid."""

    grid = "int4-asym-128"

    def _weight(self, n: int, k: int) -> Weight:
        if self.bits == 16 or self.grid == "int4-asym-128":
            return super()._weight(n, k)
        seed = int(torch.randint(1 << 30, (1,)))
        return random_weight(self.grid, n, k, torch.Generator(self.device).manual_seed(seed))


class StepBench:
    """A model of one backend with a cache of so many tokens, whose every slot holds something."""

    def __init__(
        self, options: argparse.Namespace, backend: str, tokens: int, device: torch.device
    ) -> None:
        self.backend, self.device = backend, device
        codes = cache_dtype(options.cache)
        prefer(backend, device)
        torch.manual_seed(0)  # the same weights of every backend
        architecture, fields = MODELS[options.model]
        asked = {"num_hidden_layers": options.layers, "n_routed_experts": options.experts}
        fields = (TINY if options.tiny else fields) | {
            name: count for name, count in asked.items() if count
        }
        self.config: Any = architecture.Config.from_dict(fields)
        latent = isinstance(self.config, deepseek_v3.Config)
        rows = architecture.parameters(self.config)
        self.weights = GridWeights(
            self.config, options.tp if latent else 1, device, rows, options.bits
        )
        self.weights.grid = options.grid
        self.model: Any = architecture.Model(self.config, self.weights)
        held, layers = self.config.cache, self.config.num_cached_layers
        width, blocks = held.width, -(-tokens // BLOCK_SIZE) + 1
        net = None if latent else self.config.recurrent
        self.token_bytes = layers * self.config.cache.token_bytes(16 if codes is None else 8)
        rank = getattr(self.config, "kv_lora_rank", 0)
        halves = (rank, width - rank) if latent else (width // 2, width // 2)
        index_dim = held.index_dim if latent else 0
        compressed = isinstance(held, CompressedCache) and CompressedKVCache(
            held, blocks, BLOCK_SIZE, max(options.concurrency), torch.bfloat16, device
        )
        self.cache = PagedCache(
            0 if compressed else layers + 1,
            blocks,
            width,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=device,
            parts=() if compressed or (latent and codes is None) else halves,
            codes=None
            if codes is None
            else CacheCodes(codes, 0 if latent else self.config.cache.kv_heads),
            layer_index=net and net.attention_layer_places(self.config.num_hidden_layers),
            index_dim=index_dim,
            others=OtherCaches(
                net and RecurrentStates(net, max(options.concurrency), device), compressed or None
            ),
        )
        fill_cache(self.cache, layers if index_dim else 0)
        self._capture = (
            DeviceCapture(device) if device.type == "cuda" else lambda step, lengths: step
        )
        self.steps = DecodeSteps(self.model, self.cache, self._capture)
        self.prompts = PrefillRunner(self.model, self.cache, self._capture)
        self.prompts.keep_all_hidden = False
        self.backends = {part: ops[0].backend for part, ops in self.weights.linears.items()}
        if self.weights.moe:
            self.backends["experts"] = self.weights.moe[0].backend

    def draft_steps(self) -> DecodeSteps:
        """Of an MTP layer, made now."""
        layer = deepseek_v3.MtpLayer(self.config, self.weights)
        return DecodeSteps(layer, self.cache, self._capture)

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
        states = np.arange(1, count + 1).repeat(each)
        return DecodeRows(np.array(token_ids), positions, slots, tables, states)

    def first_tokens(self, count: int) -> list[int]:
        """The same of every backend, so that the same experts are asked for."""
        generator = torch.Generator().manual_seed(count)
        return torch.randint(0, self.config.vocab_size, (count,), generator=generator).tolist()

    def replay(self, concurrency: int, context: int) -> Callable[[], object]:
        prefer(self.backend, self.device)  # norms, attention and routing are found at the call
        tokens = self.first_tokens(concurrency)
        return self.steps.prepare(self.rows(tokens, context, context + STEPS + 1))[1]


def decode_row(
    bench: StepBench, concurrency: int, context: int, bandwidth: float
) -> dict[str, Any]:
    """TPOT at a context, and what the step read."""
    prefer(bench.backend, bench.device)
    room = context + STEPS + 1
    token_ids = bench.first_tokens(concurrency)
    began = time.perf_counter()
    bench.steps.run(bench.rows(token_ids, context, room)).greedy.tolist()
    capture_s = time.perf_counter() - began
    walls = []
    for step in range(STEPS):
        began = time.perf_counter()
        token_ids = bench.steps.run(bench.rows(token_ids, context + step, room)).greedy.tolist()
        walls.append((time.perf_counter() - began) * 1e3)
    last = bench.rows(token_ids, context + STEPS, room)
    difference, distinct = compare(bench, last)
    read = bench.weights.read(distinct)
    read["cache"] = concurrency * context * bench.token_bytes
    total, wall = sum(read.values()), Spread.of(walls)
    return {
        "backend": bench.backend,
        "concurrency": concurrency,
        "context": context,
        "tpot_ms": wall,
        "device_ms": device_ms(bench.steps.prepare(last)[1], bench.device),
        "tokens_per_s": concurrency / wall.median * 1e3,
        "gb_read": total / 1e9,
        "floor_ms": total / bandwidth * 1e3,
        "share_of_bandwidth": total / bandwidth / wall.median * 1e3,
        "distinct_experts": distinct,
        "capture_s": capture_s,
        "captured_against_eager": difference,
        "why_eager": bench.steps.failure,
        "read_gb": {part: nbytes / 1e9 for part, nbytes in read.items()},
    }


def drafted_row(
    bench: StepBench, drafts: DecodeSteps, concurrency: int, context: int, plain_ms: float
) -> dict[str, Any]:
    """A step that verifies one draft a sequence and makes the next; plain_ms: the step without."""
    room = context + 2 * STEPS + 4
    token_ids, walls = bench.first_tokens(2 * concurrency), []
    for step in range(STEPS):
        rows = bench.rows(token_ids, context + 2 * step, room, each=2)
        began = time.perf_counter()
        result = bench.steps.run(rows)
        drafted = drafts.run(rows, result.greedy, result.hidden)
        both = torch.cat((result.greedy, drafted.greedy)).tolist()
        walls.append((time.perf_counter() - began) * 1e3)
        token_ids = [
            token
            for pair in zip(both[1 : 2 * concurrency : 2], both[2 * concurrency + 1 :: 2])
            for token in pair
        ]
    wall = Spread.of(walls[4:])
    layer = drafts.prepare(rows, result.greedy, result.hidden)[1]
    return {
        "concurrency": concurrency,
        "context": context,
        "step_ms": wall,
        "verify_device_ms": device_ms(bench.steps.prepare(rows)[1], bench.device),
        "draft_device_ms": device_ms(layer, bench.device),
        "distinct_experts": compare(bench, rows)[1],
        "tpot_ms": wall.median / (1 + ACCEPTANCE),
        "gain": plain_ms * (1 + ACCEPTANCE) / wall.median,
        "why_eager": bench.steps.failure or drafts.failure,
    }


def compare(bench: StepBench, rows: DecodeRows) -> tuple[float, float]:
    """How far the captured step's hidden states are from an eager one's (relative), and how many
    distinct experts a layer used."""
    buffers, step = bench.steps.prepare(rows)
    captured = step().hidden.clone()
    CountedExperts.distinct = []
    eager = compute(bench.model, buffers.inputs, buffers.context(bench.cache)).hidden
    distinct = statistics.mean(CountedExperts.distinct or [0.0])
    CountedExperts.distinct = None
    assert eager.isfinite().all(), "the step computed something that is not finite"
    return float((captured.float() - eager.float()).norm() / eager.float().norm()), distinct


def replay_ms(step: Callable[[], object], device: torch.device) -> float:
    """By the device's clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return (time.perf_counter() - began) * 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def device_ms(step: Callable[[], object], device: torch.device) -> Spread:
    return Spread.of([replay_ms(step, device) for _ in range(9)])


def in_turns(benches: dict[str, StepBench], concurrency: int, context: int) -> dict[str, Any]:
    """The same step by each backend, in turns; every other turn in the other order."""
    steps = {name: bench.replay(concurrency, context) for name, bench in benches.items()}
    device, turns = next(iter(benches.values())).device, []
    for turn in range(REPLAYS + 2):
        order = list(steps) if turn % 2 else list(steps)[::-1]
        turns.append({name: replay_ms(steps[name], device) for name in order})
    times = {name: Spread.of([one[name] for one in turns[2:]]) for name in steps}
    first = next(iter(times.values())).median
    ratios = {name: round(one.median / first, 3) for name, one in times.items()}
    return {"concurrency": concurrency, "context": context, "device_ms": times, "ratio": ratios}


def part_row(bench: StepBench, row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of R1's step by part: each part of all layers in a graph of its own. The last is
    what they leave of the step."""
    count, config, device = row["concurrency"], bench.config, bench.device
    rows = bench.rows(bench.first_tokens(count), row["context"], row["context"] + STEPS + 1)
    buffers, _ = bench.steps.prepare(rows)
    context = buffers.context(bench.cache)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    def milliseconds(calls: Sequence[Callable[[], object]]) -> float:
        return seconds_per_call(calls, device) * len(calls) * 1e3

    x = random(count, config.hidden_size)
    parts = {}
    for part, linears in bench.weights.linears.items():
        inputs = random(count, linears[0].in_features)
        parts[part] = milliseconds([partial(op, inputs) for op in linears])
    layers = bench.model.layers
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
    wall = row["tpot_ms"].median
    step = wall if device.type == "cpu" else row["device_ms"].median
    parts["embedding, angles, argmax, the rest"] = step - sum(parts.values())
    parts["host"] = wall - step
    return parts


def floor_of(part: str, read_gb: dict[str, float], bandwidth: float) -> str:
    """Milliseconds that reading the part's bytes takes; empty for parts that read next to
    nothing."""
    gb = read_gb.get(part, 0.0)
    if part == "mla_decode":
        gb = read_gb["kv_b"] + read_gb["cache"]
    return f"{gb * 1e12 / bandwidth:.3f}" if gb else ""


def launches_of(step: Callable[[], object]) -> list[tuple[str, int, float]]:
    """The launches of one replay: name, count, milliseconds together; the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found = [
        (one.key[:90], one.count, one.self_device_time_total / 1e3)
        for one in profile.key_averages()
        if one.self_device_time_total
    ]
    return sorted(found, key=lambda one: -one[2])


def first_token_ms(bench: StepBench, length: int, chunk: int) -> Spread:
    """From a prompt's token ids on the host to its first answer token there: five prompts after two
    that warm up, in passes as an engine computes them, short ones captured."""
    blocks, times = list(range(1, -(-length // BLOCK_SIZE) + 1)), []
    for turn in range(7):
        run = bench.prompts.run if turn else bench.prompts.capture
        token_ids = torch.randint(0, bench.config.vocab_size, (length,)).tolist()
        began = time.perf_counter()
        for start in range(0, length, chunk):
            passed = PrefillChunk(token_ids[start : start + chunk], start, blocks, 1)
            hidden = run(None, [passed])
        bench.model.logits(hidden[-1:]).argmax(dim=-1).tolist()
        times.append((time.perf_counter() - began) * 1e3)
    return Spread.of(times[2:])


def print_parts(bench: StepBench, row: dict[str, Any], bandwidth: float) -> None:
    row["parts_ms"] = part_row(bench, row)
    print(f"\nconcurrency {row['concurrency']}, context {row['context']}: ms by part (floor)")
    for part, value in row["parts_ms"].items():
        floor = floor_of(part, row["read_gb"], bandwidth)
        print(f"  {part:<38}{value:>8.3f}  {floor:>8}", flush=True)


def print_launches(bench: StepBench, row: dict[str, Any]) -> None:
    if bench.device.type != "cuda":
        return
    row["kernels"] = launches_of(bench.replay(row["concurrency"], row["context"]))
    launches = sum(count for _, count, _ in row["kernels"])
    print(f"{launches} launches, {launches / bench.config.num_hidden_layers:.1f} a layer")
    for name, count, ms in row["kernels"][:14]:
        print(f"  {ms:>8.3f} ms {count:>6} {name}", flush=True)


def show(row: dict[str, Any]) -> dict[str, Any]:
    texts = {
        key: f"{value:.4g}" if isinstance(value, float) else value
        for key, value in row.items()
        if key != "read_gb"
    }
    print("  ".join(f"{key} {text}" for key, text in texts.items()), flush=True)
    return row


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    cases = [(one, context) for context in options.context for one in options.concurrency]
    bandwidth = read_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    tokens = max(
        *(one * (context + 2 * STEPS + BLOCK_SIZE + 4) for one, context in cases), *options.prefill
    )
    benches = {name: StepBench(options, name, tokens, device) for name in options.backends}
    bench = next(iter(benches.values()))
    report: dict[str, Any] = {
        "model": options.model,
        "tp": options.tp,
        "grid": "bf16" if options.bits == 16 else options.grid,
        "cache": options.cache or "bf16",
        "layers": bench.config.num_hidden_layers,
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "cache_gb": bench.cache.nbytes / 1e9,
        "backends": {name: one.backends for name, one in benches.items()},
    }
    print(report, flush=True)
    report["rows"] = [
        show(decode_row(one, concurrency, context, bandwidth))
        for concurrency, context in cases
        for one in benches.values()
    ]
    if len(benches) > 1:
        report["in_turns"] = [show(in_turns(benches, *case)) for case in cases]
    report["ttft_ms"] = {
        length: first_token_ms(bench, length, options.chunk) for length in options.prefill
    }
    for length, spread in report["ttft_ms"].items():
        print(f"TTFT of {length} tokens: {spread} ms", flush=True)
    if options.parts:
        for row in report["rows"]:
            print_launches(benches[row["backend"]], row)
    if options.parts and options.model == "r1":
        for row in report["rows"]:
            print_parts(benches[row["backend"]], row, bandwidth)
        drafts = bench.draft_steps()
        report["drafted_rows"] = [
            show(drafted_row(bench, drafts, *case, row["tpot_ms"].median))
            for case, row in zip(cases, report["rows"][:: len(benches)])
        ]
    return report


class _Tiny(argparse.Action):
    """Small sizes on a CPU."""

    def __call__(self, _: Any, given: argparse.Namespace, *unused: Any) -> None:
        given.tiny, given.device, given.concurrency = True, "cpu", [1, 2]
        given.context, given.prefill = [48], [32]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="r1")
    options.add_argument("--tp", type=int, default=4, help="ranks of R1, V3.2, GLM-5; this is one")
    options.add_argument("--concurrency", type=numbers, default=[1, 8, 32])
    options.add_argument("--context", type=numbers, default=[640])
    options.add_argument("--prefill", type=numbers, default=[128])
    options.add_argument("--chunk", type=int, default=8192, help="tokens of a prompt in a pass")
    options.add_argument("--grid", default="int4-asym-128", help="of linears and experts")
    options.add_argument("--bits", type=int, choices=(4, 16), default=4, help="16: BF16 weights")
    options.add_argument("--cache", choices=CODES)
    options.add_argument("--backends", type=words, default=["auto"], help="of kernels, in turns")
    options.add_argument("--layers", type=int, default=0, help="of the model's; all by default")
    options.add_argument("--experts", type=int, default=0, help="routed ones; all by default")
    options.add_argument("--parts", action="store_true")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action=_Tiny, nargs=0, default=False)
    measured(run, options)


if __name__ == "__main__":
    main()
