"""Requests shared out over ranks (--dp) next to tensor parallelism, on R1's shapes: decode steps,
and TTFT of many prompts.

    torchrun --nproc-per-node 2 benchmarks/r1_data_parallel.py [--layers 12] [--users 32,128,256] [--contexts 192,8192] [--out FILE.json]
    torchrun --nproc-per-node 2 benchmarks/r1_data_parallel.py --tiny      the same on a CPU (gloo) in seconds: a test of the script

Weights are made up on the device (made_weights.py); layers are R1's first, three of them dense.
Users begin with a cache of so many tokens, filled with numbers of about one, so that no prompt is
computed: what is timed are steps in which every user decodes, through the engine with its
scheduler, captured graphs, collectives and messages. Prompts are timed apart, as many as users,
from nothing. Sums over 61 layers are not measured: `--layers` twice gives the time of a layer.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from core import Spread, numbers, parser
from made_weights import R1, TINY, fill_cache
from r1_engine import BoxWeights, joined_ranks, made_engine, made_model, report_of_ranks

from quantkit.executor.engine import Engine
from quantkit.executor.rank0 import follow
from quantkit.executor.ranks.expert_parallel import ExpertRanks, ExpertShare
from quantkit.executor.ranks.parallel import SINGLE, Parallel
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.scheduler import ScheduledStep, Scheduler
from quantkit.models import deepseek_v3
from quantkit.models.weights import ExpertsOp

WARM, TIMED = 6, 24
"""Steps that capture and warm up, and that are timed."""


class ShareWeights(BoxWeights):
    """Everything whole but the routed experts, of which a rank has its share."""

    def __init__(
        self, config: deepseek_v3.Config, parallel: Parallel, device: torch.device
    ) -> None:
        super().__init__(config, SINGLE, device)
        self.expert_ranks, self.ranks = ExpertRanks(parallel, device), parallel

    def experts(self, prefix: str, num_experts: int, *gating: Any) -> ExpertsOp:
        own = self.expert_ranks.own(num_experts)
        counted: Any = self._experts([f"{prefix}.{expert}" for expert in own])
        return ExpertShare(counted.experts, own, num_experts, self.expert_ranks)

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> None:
        """Apart: every rank has the shared expert, of its own rows."""


def make_engine(
    config: deepseek_v3.Config,
    parallel: Parallel,
    device: torch.device,
    users: int,
    tokens: int,
    data: bool,
) -> Engine:
    weights = (ShareWeights if data else BoxWeights)(config, parallel, device)
    with torch.inference_mode():
        model = deepseek_v3.Model(config, weights)
    engine = made_engine(
        made_model(model, config, weights, device),
        users,
        tokens,
        homes=parallel.size if data else 1,
    )
    fill_cache(engine.cache)
    return engine


def warm_schedule(scheduler: Scheduler, *, decode_only: bool = False) -> ScheduledStep:
    """Whoever waits enters with his prompt in the cache."""
    while (sequence := scheduler._admit()) is not None:
        sequence.num_cached = len(sequence.token_ids) - 1
    return plain_schedule(scheduler, decode_only=decode_only)


plain_schedule = Scheduler.schedule


def decode_steps(engine: Engine, users: int, context: int) -> dict[str, Any]:
    """Rank 0: `users` answers at `context` tokens, step by step."""
    params = SamplingParams(max_new_tokens=WARM + TIMED, ignore_eos=True)
    prompts = [torch.randint(0, 256, (context,)).tolist() for _ in range(users)]
    sequences = [engine.submit(prompt, params) for prompt in prompts]
    times = []
    for _ in range(WARM + TIMED):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    assert all(one.finish_reason == "length" for one in sequences), (
        "every user got a token in every step"
    )
    step = Spread.of(times[WARM:]).times(1e3)
    return {
        "users": users,
        "context": context,
        "step_ms": step,
        "tokens_s": users / step.median * 1e3,
    }


def prompts(engine: Engine, users: int, length: int) -> dict[str, Any]:
    """Rank 0: so many prompts at once; seconds until their first tokens, the second time."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    for _ in range(2):
        texts = [torch.randint(0, 256, (length,)).tolist() for _ in range(users)]
        done = list(engine.generate(texts, params))
    first = sorted(one.timings.first_token_s for one in done)
    return {
        "prompts": users,
        "length": length,
        "ttft_mean_s": statistics.mean(first),
        "ttft_last_s": first[-1],
    }


def show(name: str, row: dict[str, Any]) -> dict[str, Any]:
    texts = {key: f"{one:.4g}" if isinstance(one, float) else one for key, one in row.items()}
    print(name, "  ".join(f"{key} {text}" for key, text in texts.items()), flush=True)
    return row


@torch.inference_mode()
def measure(engine: Engine, options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Rank 0 measures, the others follow."""
    Scheduler.schedule = warm_schedule  # type: ignore[method-assign]
    rows = []
    if engine.parallel.rank:
        follow(engine)
    else:
        for context in options.contexts:
            for users in options.users:
                rows.append(show(name, decode_steps(engine, users, context)))
        engine.leader.dismiss()
    Scheduler.schedule = plain_schedule  # type: ignore[method-assign]
    if engine.parallel.rank:
        follow(engine)
    else:
        rows.append(show(name, prompts(engine, max(options.users), options.input_len)))
        engine.leader.dismiss()
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.tiny:
        options.layers, options.users, options.contexts, options.input_len = 4, [3, 4], [40], 24
    parallel, device = joined_ranks(on_cpu=options.tiny)
    rank, size = parallel.rank, parallel.size
    config = replace(
        deepseek_v3.Config.from_dict(TINY if options.tiny else R1), num_hidden_layers=options.layers
    )
    report: dict[str, Any] = {
        "ranks": size,
        "layers": options.layers,
    }
    if rank == 0:
        print(report, "peers" if parallel.peers is not None else "no peers", flush=True)
    for name, data in (("tp", False), ("dp", True)):
        torch.manual_seed(0)
        began = time.perf_counter()
        engine = make_engine(
            config,
            parallel,
            device,
            max(options.users),
            max(options.contexts) + WARM + TIMED + 8,
            data,
        )
        built = time.perf_counter() - began
        report[name] = measure(engine, options, name)
        gigabytes = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
        if rank == 0:
            print(
                f"{name}: made in {built:.1f} s, {gigabytes:.1f} GB at most; steps "
                f"{engine.runner.why_eager or 'captured'}",
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(report, indent=1, default=vars))
        del engine
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--users", type=numbers, default=[32, 128, 256])
    options.add_argument("--contexts", type=numbers, default=[192, 8192])
    options.add_argument("--input-len", type=int, default=128)
    options.add_argument("--tiny", action="store_true")
    report_of_ranks(run, options)


if __name__ == "__main__":
    main()
