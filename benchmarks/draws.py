"""Choosing tokens on a GPU: what a step's draws and penalties take of the host and of the device,
captured and launch by launch.

    python benchmarks/draws.py [--rows 1,8,64] [--vocab 129280] [--out FILE.json]

Logits are made up; every row has a temperature, top-p, top-k and min-p, and for `penalties` also
those, over 1000 tokens said before.
host_us: until the call returns; total_us: until the device is done. Medians of 30. Then tiny-r1
answers on the device in float32, sampled, plain and with guesses, chunks beside answers and
captured draws: the tokens must be the same.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from command import measured, numbers, parser

from quantkit.checkpoint.hub import find_model
from quantkit.executor.engine import Engine
from quantkit.executor.runner.graphs import DeviceCapture, SamplingGraph
from quantkit.executor.runner.logits_processor import LogitsProcessor
from quantkit.executor.sampling.params import Batch, SamplingParams
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.tokenizer.chat import ChatTokenizer

ASKED = SamplingParams(
    temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, frequency_penalty=0.1, repetition_penalty=1.1
)


def timed(compute: Callable[[], object]) -> dict[str, float]:
    host, total = [], []
    for number in range(35):
        torch.cuda.synchronize()
        began = time.perf_counter()
        compute()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        if number >= 5:
            host.append((launched - began) * 1e6)
            total.append((time.perf_counter() - began) * 1e6)
    return {"host_us": statistics.median(host), "total_us": statistics.median(total)}


def measure(
    rows: int, vocab: int, device: torch.device, tokenizer: ChatTokenizer
) -> list[dict[str, Any]]:
    logits = torch.randn(rows, vocab, device=device) * 3
    batch, places = (
        Batch.of([ASKED] * rows, list(range(rows)), device),
        torch.arange(rows, device=device),
    )
    assert batch is not None
    eager, captured = SamplingGraph(None), SamplingGraph(DeviceCapture(device))
    assert torch.equal(eager(logits, batch, places), captured(logits, batch, places))
    said = torch.randint(2, vocab, (rows, 1000)).tolist()
    counts = [
        (Sequence(i, tokens, ASKED, tokenizer, 4096, streams=False), 1)
        for i, tokens in enumerate(said)
    ]
    adjuster = LogitsProcessor(vocab, device)

    def penalized() -> None:
        adjuster.process(logits, counts, frozenset(), {}, None)
        for sequence, _ in counts:
            sequence.token_ids.append(5)

    return [
        {"rows": rows, "what": "draws, launch by launch"}
        | timed(lambda: eager(logits, batch, places)),
        {"rows": rows, "what": "draws, captured"} | timed(lambda: captured(logits, batch, places)),
        {"rows": rows, "what": "penalties"} | timed(penalized),
    ]


def same_tokens() -> dict[str, Any]:
    """Answers of tiny-r1: those of a plain engine, and how many others have all tokens as they."""
    path, found = find_model("tiny-r1"), []
    for options, mixed in (
        ({}, False),
        ({"draft_length": 3}, True),
        ({"prompt_lookup": 4}, True),
        ({"draft_length": 2, "measure_steps": True}, False),
    ):
        engine = Engine.load(
            path, device="cuda", dtype="float32", max_batch=8, max_model_len=512, **options
        )  # type: ignore[arg-type]
        if mixed:
            engine.scheduler.budget = StepBudget(512, 16, mixed=True)
        prompts = [
            engine.tokenizer.encode_chat(
                [{"role": "user", "content": f"What is {3 + i}+{41 + 17 * i}?"}]
            )
            for i in range(16)
        ]
        asked = [
            SamplingParams(
                max_new_tokens=64,
                temperature=i % 3 * 0.4,
                top_p=0.95,
                seed=i,
                presence_penalty=i % 2 * 0.1,
            )
            for i in range(16)
        ]
        began = time.perf_counter()
        done = sorted(engine.generate(prompts, asked), key=lambda one: one.index)
        assert not engine.runner.why_eager, engine.runner.why_eager
        assert engine.runner.draw._sizes, "draws were captured"
        found.append([one.token_ids for one in done])
        print(
            options,
            mixed,
            f"{time.perf_counter() - began:.1f} s",
            engine.speculation.acceptance,
            engine.scheduler.budget,
            flush=True,
        )
    return {
        "answers": len(found[0]),
        "same": [sum(a == b for a, b in zip(found[0], one)) for one in found[1:]],
    }


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    device, tokenizer = torch.device("cuda"), ChatTokenizer(find_model("tiny-r1"))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "vocab": options.vocab,
        "rows": [],
    }
    for rows in options.rows:
        for row in measure(rows, options.vocab, device, tokenizer):
            report["rows"].append(row)
            print(
                "  ".join(
                    f"{key} {round(value) if isinstance(value, float) else value}"
                    for key, value in row.items()
                ),
                flush=True,
            )
    report["tiny-r1"] = same_tokens()
    print(report["tiny-r1"])
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=numbers, default=[1, 8, 64])
    options.add_argument("--vocab", type=int, default=129280)
    measured(run, options)


if __name__ == "__main__":
    main()
