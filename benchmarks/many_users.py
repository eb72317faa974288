"""Users who come together, on shapes of grouped_model.py and one device: TTFT and TPOT through the
engine, and its longest steps.

    python benchmarks/many_users.py [--model qwen3-8b|qwen3-30b-a3b] [--bits 16] [--users 8,32,64]
    [--input-len 128] [--output-len 64]
        [--chunk-tokens N] [--cold] [--layers N] [--out FILE.json]

Weights are made up on the device; scheduler, cache, graphs, sampling and the choice of chunks are
the engine's own, as `serve` starts it. The first user of a round is a step ahead of the others, who
come together. Every number of users has two rounds: what the first pays and the second does not is
compiled or captured while users wait. --cold: nothing is captured ahead. Left out: tokenizer and
server.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from command import measured, numbers, parser
from grouped_model import MODELS, GroupedBench
from made_engine import made_engine, made_model

from quantkit.executor.engine import Engine
from quantkit.executor.ranks.parallel import SINGLE
from quantkit.executor.runner import prefill_tuner
from quantkit.executor.runner.graph_warmup import warm_up_graphs
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.scheduler import StepBudget


def round_of(
    engine: Engine, users: int, input_len: int, output_len: int, vocab: int
) -> dict[str, Any]:
    """So many users once: means over them, and the longest steps."""
    params = SamplingParams(max_new_tokens=output_len, ignore_eos=True)
    prompts = [torch.randint(0, vocab, (input_len,)).tolist() for _ in range(users)]
    sequences, steps = [engine.submit(prompts[0], params)], []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - began) * 1e3)
        if len(sequences) == 1:
            sequences += [engine.submit(prompt, params) for prompt in prompts[1:]]
    timings = [one.completion().timings for one in sequences]
    return {
        "users": users,
        "ttft_s": statistics.mean(one.first_token_s for one in timings),
        "tpot_ms": statistics.mean(
            (one.total_s - one.first_token_s) / (output_len - 1) for one in timings
        )
        * 1e3,
        "step_ms": statistics.median(steps),
        "steps": len(steps),
        "longest_ms": [round(one, 1) for one in sorted(steps, reverse=True)[:6]],
    }


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = GroupedBench(options.model, options.layers, device, bits=options.bits)
    vocab = bench.config.vocab_size
    loaded = made_model(bench.model, bench.config, bench.weights, device)
    engine = made_engine(loaded, max(options.users), options.input_len + options.output_len)
    report: dict[str, Any] = {
        "model": options.model,
        "bits": options.bits,
        "layers": bench.config.num_hidden_layers,
        "cold": options.cold,
    }
    began = time.perf_counter()
    given, asked = engine.scheduler.budget, options.chunk_tokens is not None
    if asked:
        given = StepBudget(given.prefill_only, options.chunk_tokens)
    chosen = (
        prefill_tuner.measure(engine.runner, SINGLE, given, max(options.users), fixed_chunk=False)
        if not asked
        else given
    )
    engine.scheduler.budget = chosen
    report["with_decodes"], report["mixed"], report["budget_s"] = (
        chosen.with_decodes,
        chosen.mixed,
        time.perf_counter() - began,
    )
    if not options.cold:
        before, began = (
            torch.cuda.memory_reserved() if device.type == "cuda" else 0,
            time.perf_counter(),
        )
        report["ahead"] = warm_up_graphs(
            engine.runner, SINGLE, max(options.users), engine.max_model_len
        )
        report["ahead_s"] = time.perf_counter() - began
        report["ahead_gb"] = (
            (torch.cuda.memory_reserved() - before) / 1e9 if device.type == "cuda" else 0.0
        )
    print(report, flush=True)
    report["rows"] = []
    for users in options.users:
        for _ in range(2):
            row = round_of(engine, users, options.input_len, options.output_len, vocab)
            report["rows"].append(row)
            print(
                "  ".join(
                    f"{key} {round(value, 4) if isinstance(value, float) else value}"
                    for key, value in row.items()
                ),
                flush=True,
            )
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="qwen3-8b")
    options.add_argument("--bits", type=int, choices=(4, 16), default=4)
    options.add_argument("--users", type=numbers, default=[8, 32, 64])
    options.add_argument("--input-len", type=int, default=128)
    options.add_argument("--output-len", type=int, default=64)
    options.add_argument(
        "--chunk-tokens", type=int, help="of prompts beside answers; measured by default"
    )
    options.add_argument("--cold", action="store_true")
    options.add_argument("--layers", type=int, default=0)
    measured(run, options)


if __name__ == "__main__":
    main()
