"""While answers run a long prompt arrives: the largest gap between two tokens of an answer, and how
long the prompt takes, on one device.

    python benchmarks/mixed_steps.py [--model qwen3-8b|qwen3-30b-a3b] [--answers 32] [--context
    1024] [--prompt 16384]
        [--chunks 256,512,1024,2048] [--out FILE.json]

Weights and shapes are those of grouped_model.py. Every step of the running answers computes a chunk
of the prompt too, apart (the captured decode step, then the chunk) or in one pass. A gap is the
wall clock from one step's tokens on the host to the next's; reported are the largest, the median,
and the sum over all chunks, which is the prompt's time to its first token. `measured`: the choice
of `prefill_tuner.measure`.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from command import measured, numbers, parser
from grouped_model import MODELS, GroupedBench

from quantkit.executor.cache.cache import BLOCK_SIZE
from quantkit.executor.ranks.parallel import SINGLE
from quantkit.executor.runner import prefill_tuner
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.prefill_graphs import PrefillChunk
from quantkit.executor.runner.runner import Runner
from quantkit.executor.scheduler.scheduler import StepBudget


class MixedSteps:
    """A prompt beside `answers` rows of `context` tokens each."""

    def __init__(self, bench: GroupedBench, options: argparse.Namespace) -> None:
        self.bench, self.options = bench, options
        self.per_row = -(-(options.context + 4096) // BLOCK_SIZE)
        blocks = options.answers * self.per_row
        self.cache = bench.cache(blocks * BLOCK_SIZE + options.prompt)
        self.runner = Runner(bench.model, self.cache)
        self.tables = (1 + np.arange(blocks, dtype=np.int32)).reshape(options.answers, self.per_row)
        self.own = list(range(1 + blocks, 1 + blocks + -(-options.prompt // BLOCK_SIZE)))
        self.step = 0

    def rows(self) -> DecodeRows:
        count = self.options.answers
        positions = np.full(count, self.options.context + self.step)
        self.step += 1
        slots = (
            self.tables[np.arange(count), positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            + positions % BLOCK_SIZE
        )
        return DecodeRows(np.arange(count), positions, slots, self.tables)

    def prompt(self, start: int, length: int) -> list[PrefillChunk]:
        return [
            PrefillChunk(
                torch.randint(0, self.bench.config.vocab_size, (length,)).tolist(), start, self.own
            )
        ]

    def apart(self, start: int, length: int) -> None:
        self.runner.steps.run(self.rows()).greedy.tolist()
        hidden = self.runner.prefill_runner.run(None, self.prompt(start, length))
        self.bench.model.logits(hidden[-1:]).argmax(dim=-1).tolist()

    def mixed(self, start: int, length: int) -> None:
        hidden = self.runner.prefill_runner.run(self.rows(), self.prompt(start, length))
        self.bench.model.logits(hidden[: self.options.answers + 1]).argmax(dim=-1).tolist()

    def gaps(self, mixed: bool, chunk: int) -> list[float]:
        """Milliseconds of each step of the prompt, after two that warm up and capture."""
        compute, found = self.mixed if mixed else self.apart, []
        for _ in range(2):
            compute(0, chunk)
        self.step = 0
        for start in range(0, self.options.prompt, chunk):
            began = time.perf_counter()
            compute(start, min(chunk, self.options.prompt - start))
            found.append((time.perf_counter() - began) * 1e3)
        return found


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    steps = MixedSteps(GroupedBench(options.model, torch.device("cuda")), options)
    alone = []
    for _ in range(12):
        began = time.perf_counter()
        steps.runner.steps.run(steps.rows()).greedy.tolist()
        alone.append((time.perf_counter() - began) * 1e3)
    report: dict[str, Any] = {
        key: getattr(options, key) for key in ("model", "answers", "context", "prompt")
    }
    report |= {
        "device": torch.cuda.get_device_name(),
        "decode_ms": statistics.median(alone[2:]),
        "rows": [],
    }
    for chunk in options.chunks:
        for mixed in (False, True):
            gaps = steps.gaps(mixed, chunk)
            row = {
                "chunk": chunk,
                "mixed": mixed,
                "largest_ms": max(gaps),
                "median_ms": statistics.median(gaps),
                "prompt_ms": sum(gaps),
            }
            report["rows"].append(row)
            print(
                "  ".join(
                    f"{key} {value if isinstance(value, bool) else round(value, 2)}"
                    for key, value in row.items()
                ),
                flush=True,
            )
    began = time.perf_counter()
    found = prefill_tuner.measure(
        steps.runner, SINGLE, StepBudget(2048, 2048), options.answers, fixed_chunk=False
    )
    report["measured"] = {
        "with_decodes": found.with_decodes,
        "mixed": found.mixed,
        "seconds": time.perf_counter() - began,
    }
    print({key: report[key] for key in ("device", "decode_ms", "measured")}, flush=True)
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="qwen3-8b")
    options.add_argument("--answers", type=int, default=32)
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--prompt", type=int, default=16384)
    options.add_argument("--chunks", type=numbers, default=[256, 512, 1024, 2048])
    measured(run, options)


if __name__ == "__main__":
    main()
