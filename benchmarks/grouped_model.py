"""Models with grouped-query attention on one device: time of a decode step, by concurrency and
context, against the bytes it must read.

    python benchmarks/grouped_model.py [--model qwen3-8b|qwen3-30b-a3b] [--concurrency 1,8,32,64]
    [--context 128,1024,4096,16384]
        [--prefill 4096,16384] [--backend NAME] [--layers N] [--bits 16] [--cache int8] [--kernels]
        [--out FILE.json]

Weights are made up on the device, 4 bits in groups of 128 or all 16 (r1_synthetic.py); the
executor's own model, cache and captured decode step compute. TPOT is the wall clock from one step's
tokens on the host to the next's; TTFT is that of one prompt in chunks of 2048 tokens.
Left out: tokenizer and server. Cases whose cache does not fit the device are not run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from command import measured, numbers, parser
from published_sizes import QWEN3_8B, QWEN3_30B_A3B
from quantkit_kernels import CODES, prefer
from quantkit_kernels.timing import read_bandwidth
from r1_synthetic import CountedExperts, SyntheticWeights, fill_cache

from quantkit.executor.cache.cache import BLOCK_SIZE, CacheCodes, PagedCache, cache_dtype
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import DecodeSteps, DeviceCapture, compute
from quantkit.executor.runner.prefill_graphs import PrefillChunk, PrefillRunner
from quantkit.models import gqa, qwen3, qwen3_moe

MODELS = {"qwen3-8b": (qwen3, QWEN3_8B), "qwen3-30b-a3b": (qwen3_moe, QWEN3_30B_A3B)}
STEPS, CHUNK = 12, 2048


class GroupedBench:
    """A model and room for its cache."""

    def __init__(
        self,
        name: str,
        layers: int,
        device: torch.device,
        codes: torch.dtype | None = None,
        bits: int = 4,
    ) -> None:
        architecture, fields = MODELS[name]
        self.config: gqa.Config = architecture.Config.from_dict(
            fields | ({"num_hidden_layers": layers} if layers else {})
        )
        self.device, self.codes = device, codes
        self.token_bytes = self.config.num_hidden_layers * self.config.cache.token_bytes(
            16 if codes is None else 8
        )
        self.weights = SyntheticWeights(
            self.config, 1, device, architecture.parameters(self.config), bits
        )
        self.model = architecture.Model(self.config, self.weights)

    def cache(self, tokens: int) -> PagedCache:
        """Full of something, for `tokens` tokens."""
        width, blocks = self.config.cache_width, -(-tokens // BLOCK_SIZE) + 1
        half = width // 2
        layers = self.config.num_hidden_layers
        cache = PagedCache(
            layers,
            blocks,
            width,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=self.device,
            parts=(half, half),
            codes=None
            if self.codes is None
            else CacheCodes(self.codes, self.config.cache.kv_heads),
        )
        fill_cache(cache)
        return cache

    def decode(
        self, concurrency: int, context: int, bandwidth: float, *, kernels: bool = False
    ) -> dict[str, Any]:
        """TPOT, the step's time by the device's clock, and what it cannot but read. kernels: also
        `launches_of` it."""
        per_row = -(-(context + STEPS + 1) // BLOCK_SIZE)
        cache = self.cache(concurrency * per_row * BLOCK_SIZE)
        steps = DecodeSteps(self.model, cache, DeviceCapture(self.device))
        tables = (1 + np.arange(concurrency * per_row, dtype=np.int32)).reshape(
            concurrency, per_row
        )

        def rows(token_ids: list[int], position: int) -> DecodeRows:
            positions = np.full(concurrency, position)
            slots = (
                tables[np.arange(concurrency), positions // BLOCK_SIZE].astype(np.int64)
                * BLOCK_SIZE
                + positions % BLOCK_SIZE
            )
            return DecodeRows(np.array(token_ids), positions, slots, tables)

        token_ids = torch.randint(0, self.config.vocab_size, (concurrency,)).tolist()
        steps.run(rows(token_ids, context - 1)).greedy.tolist()
        walls = []
        for step in range(STEPS):
            began = time.perf_counter()
            token_ids = steps.run(rows(token_ids, context + step)).greedy.tolist()
            walls.append(time.perf_counter() - began)
        last = rows(token_ids, context + STEPS)
        buffers, step_again = steps.prepare(last)
        captured = step_again().hidden.clone()
        CountedExperts.distinct = []
        eager = compute(self.model, buffers.inputs, buffers.context(cache)).hidden
        distinct = statistics.mean(CountedExperts.distinct or [0.0])
        CountedExperts.distinct = None
        read = sum(self.weights.read(distinct).values()) + concurrency * context * self.token_bytes
        return {
            "concurrency": concurrency,
            "context": context,
            "tpot_ms": statistics.median(walls) * 1e3,
            "device_ms": self.device_ms(step_again),
            "kernels": launches_of(step_again) if kernels else [],
            "floor_ms": read / bandwidth * 1e3,
            "captured_against_eager": float(
                (captured.float() - eager.float()).norm() / eager.float().norm()
            ),
            "why_eager": steps.failure,
        }

    def device_ms(self, step: Any) -> float:
        times = []
        for _ in range(7):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times)

    def first_token_ms(self, length: int) -> float:
        """From a prompt's token ids on the host to its first answer token there: the median of
        three, after two to warm up."""
        cache = self.cache(length)
        passes = PrefillRunner(self.model, cache, DeviceCapture(self.device))
        blocks, times = list(range(1, -(-length // BLOCK_SIZE) + 1)), []
        for _ in range(5):
            token_ids = torch.randint(0, self.config.vocab_size, (length,)).tolist()
            began = time.perf_counter()
            for start in range(0, length, CHUNK):
                hidden = passes.run(
                    None, [PrefillChunk(token_ids[start : start + CHUNK], start, blocks)]
                )
            self.model.logits(hidden[-1:]).argmax(dim=-1).tolist()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:]) * 1e3


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


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    torch.cuda.empty_cache()
    prefer(options.backend, device)
    bench = GroupedBench(
        options.model, options.layers, device, cache_dtype(options.cache), options.bits
    )
    report: dict[str, Any] = {
        "model": options.model,
        "layers": bench.config.num_hidden_layers,
        "backends": sorted(
            {op.backend for ops in bench.weights.linears.values() for op in ops}
            | {op.backend for op in bench.weights.moe}
        ),
        "cache": options.cache or "bf16",
        "device": torch.cuda.get_device_name(),
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "rows": [],
    }
    print({key: value for key, value in report.items() if key != "rows"}, flush=True)
    for context in options.context:
        for concurrency in options.concurrency:
            needed = concurrency * (context + 128) * bench.token_bytes
            if needed > 0.95 * torch.cuda.mem_get_info()[0]:
                print(
                    f"concurrency {concurrency}, context {context}: {needed / 1e9:.0f} GB of cache "
                    "do not fit",
                    flush=True,
                )
                continue
            row = bench.decode(concurrency, context, bandwidth, kernels=options.kernels)
            report["rows"].append(row)
            told = {key: value for key, value in row.items() if key != "kernels"}
            print(
                "  ".join(
                    f"{key} {value if isinstance(value, str) else round(value, 4)}"
                    for key, value in told.items()
                ),
                flush=True,
            )
            for name, count, ms in row["kernels"][:16]:
                print(f"  {ms:>8.3f} ms {count:>6} {name}", flush=True)
            torch.cuda.empty_cache()
    report["ttft_ms"] = {length: bench.first_token_ms(length) for length in options.prefill}
    print("TTFT ms", report["ttft_ms"])
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="qwen3-8b")
    options.add_argument("--concurrency", type=numbers, default=[1, 8, 32, 64])
    options.add_argument("--context", type=numbers, default=[128, 1024, 4096, 16384])
    options.add_argument("--prefill", type=numbers, default=[4096, 16384])
    options.add_argument("--cache", choices=CODES)
    options.add_argument(
        "--backend", default="auto", help="of kernels: serves every operator that it has"
    )
    options.add_argument("--layers", type=int, default=0, help="of the model's; all by default")
    options.add_argument(
        "--bits", type=int, choices=(4, 16), default=4, help="of linears and experts"
    )
    options.add_argument(
        "--kernels", action="store_true", help="also the launches of each step, the longest first"
    )
    measured(run, options)


if __name__ == "__main__":
    main()
