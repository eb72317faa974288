"""DeepSeek-R1's true shapes on all GPUs of a box: TPOT, TTFT and tokens/s through the engine, and
the all-reduce alone.

    torchrun --nproc-per-node 4 benchmarks/r1_box.py [--concurrency 1,8,32] [--input-len 128]
    [--output-len 512] [--out FILE.json]
    torchrun --nproc-per-node 2 benchmarks/r1_box.py --tiny        the same on a CPU (gloo) in seconds: a test of the script
    torchrun --nproc-per-node 4 benchmarks/r1_box.py --only-all-reduce

Every rank holds its share of all 61 layers, made up on the device (r1_synthetic.py); all ranks make
the same values, which keeps what is replicated equal. Scheduler, cache, captured decode steps,
all-reduces, gathering of the logits, sampling and the messages of rank 0 to the others are the
engine's own. Not in these figures: a server and a tokenizer. Greedy; first without MTP.

Then with one guess a step by an MTP layer of R1's shapes. Made-up weights guess nothing right, so
whether a guess counts as right is drawn, with a probability of 0.7, when its successor was chosen:
the layer has computed and sampled, the guess went through the whole model, cache and rows were kept
for it, and only the comparison of the two token ids is replaced. A right guess brings a token, a
wrong one is computed again. Rows of one user choose experts as unlike each other as those of two:
real text's successive tokens share some.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from made_engine import joined_ranks, made_engine, made_model, report_of_ranks
from quantkit_kernels import UnsummedPairs
from r1_guesses import DraftingEngine
from r1_synthetic import R1, TINY, Repeated, SyntheticWeights
from torch import Tensor

from quantkit.common.devices import describe_hardware
from quantkit.evaluation.speed.engine import EngineTarget
from quantkit.evaluation.speed.measure import Workload, measure_grid
from quantkit.executor.engine import Engine
from quantkit.executor.rank0 import follow
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.graphs import DecodeSteps
from quantkit.executor.runner.runner import Runner
from quantkit.executor.speculation.speculation import Acceptance
from quantkit.executor.weights.load import LoadedModel
from quantkit.executor.weights.weights import Gathered
from quantkit.models import deepseek_v3
from quantkit.models.weights import LinearOp

SHORT_OUTPUT = 64
"""Tokens of an answer where the step is only compared: with the library's all-reduce, or under a
profiler."""


class BoxWeights(SyntheticWeights):
    """One rank's, with the box's collectives."""

    def __init__(
        self, config: deepseek_v3.Config, parallel: Parallel, device: torch.device
    ) -> None:
        super().__init__(config, parallel.size, device)
        self.parallel = self.ranks = parallel

    def linear(self, module: str) -> LinearOp:
        own = super().linear(module)
        if isinstance(own, Repeated):
            own = own.linear
        elif not module.endswith("head"):
            return own
        return Gathered(own, self.parallel)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.parallel.all_reduce(x)

    def add_rms_norm(
        self, x: Tensor | UnsummedPairs, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self.parallel.add_rms_norm(x, residual, gain, eps)


def build(config: deepseek_v3.Config, parallel: Parallel, device: torch.device) -> LoadedModel:
    """As `load_model` returns it, with one MTP layer."""
    weights = BoxWeights(config, parallel, device)
    with torch.inference_mode():
        model = deepseek_v3.Model(config, weights)
        mtp = deepseek_v3.MtpLayer(config, weights)
    return made_model(model, config, weights, device, (mtp,))


def grid(engine: Engine, options: argparse.Namespace, output_len: int) -> list[dict[str, Any]]:
    """Rank 0 measures, the others follow. Empty on those. ttft_alone_s: the median of seven
    prompts, one after the other."""
    if engine.parallel.rank:
        follow(engine)
        return []
    batches = [int(one) for one in options.concurrency.split(",")]
    target = EngineTarget(engine, "R1", max(batches))
    for users in (
        1 << power for power in range(max(batches).bit_length())
    ):  # every size of a step is captured
        list(target.run(Workload(options.input_len, 4, users, users, seed=-1)))
    engine.speculation.acceptance = Acceptance()
    rows = measure_grid(target, [options.input_len], batches, output_len, requests=1, warmup=1)
    alone = list(target.run(Workload(options.input_len, 2, 7, 1, seed=-2)))
    engine.leader.dismiss()
    return [
        {**asdict(row), "ttft_alone_s": statistics.median(one.ttft_s for one in alone)}
        for row in rows
    ]


def memory(parallel: Parallel, device: torch.device) -> list[dict[str, float]]:
    """Of each rank, GB: the most its process held of the host's memory, and PyTorch of the
    device's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own = {"host_peak_gb": int(status["VmHWM"].split()[0]) * 1024 / 1e9}
    if device.type == "cuda":
        own["device_peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return parallel.gather(own)


def device_steps(steps: DecodeSteps) -> dict[str, dict[str, Any]]:
    """By rows of a captured step, and those whose results are wanted: milliseconds on the device
    alone, and its longest kernels. All ranks replay together."""
    found: dict[str, dict[str, Any]] = {}
    if steps.failure:
        return found
    for (rows, _, kept), (_, step) in sorted(steps._steps.items()):
        times = []
        for _ in range(12):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        kernels = [
            (one.key[:80], one.count, one.self_device_time_total / 1e3)
            for one in profile.key_averages()
        ]
        kernels = sorted((one for one in kernels if one[2]), key=lambda one: -one[2])
        name = f"{rows}, {kept} wanted" if kept else str(rows)
        found[name] = {
            "device_ms": statistics.median(times[2:]),
            "launches": sum(one[1] for one in kernels),
            "kernels": kernels[:16],
        }
    return found


def all_reduces(
    parallel: Parallel, device: torch.device, width: int, counts: list[int]
) -> list[dict[str, Any]]:
    """Microseconds of one all-reduce of [tokens, width] bfloat16, in a captured chain: back to
    back, and after a kernel that reads 28 MiB.

    The largest of the ranks' medians. On a CPU eager, through gloo.
    """
    methods: dict[str, Callable[[Tensor], Tensor]] = {}
    if device.type == "cuda":
        peers = parallel.peers
        parallel.peers = None
        methods["NCCL"] = parallel.all_reduce
        methods |= _symmetric(width * max(counts), device)
        if peers is not None:
            methods["ours"] = peers.all_reduce
    else:
        methods["gloo"] = parallel.all_reduce
    filler = torch.ones(14 << 20, dtype=torch.bfloat16, device=device)
    found = []
    for tokens in counts:
        row: dict[str, Any] = {"tokens": tokens, "bytes": tokens * width * 2}
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
        alone = chain(lambda: filler.sum(dtype=torch.float32), device)
        for name, method in methods.items():
            row[name] = max(parallel.gather(chain(lambda: method(x), device)))  # noqa: B023  called at once
            behind = chain(lambda: (filler.sum(dtype=torch.float32), method(x)), device) - alone  # noqa: B023
            row[f"{name} after a read"] = max(parallel.gather(behind))
        found.append(row)
    if device.type == "cuda":
        parallel.peers = peers
    return found


def _symmetric(values: int, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """torch's symmetric memory without multicast; the buffer is its own, as its operators want."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(values, dtype=torch.bfloat16, device=device)
    group = dist.group.WORLD
    assert group is not None
    symmetric.rendezvous(buffer, group)
    buffer.zero_()

    def one_shot(x: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(buffer[: x.numel()], "sum", group.group_name)

    def two_shot(x: Tensor) -> Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(buffer[: x.numel()], "sum", group.group_name)

    return {"symmetric one-shot": one_shot, "symmetric two-shot": two_shot}


def chain(call: Callable[[], object], device: torch.device, links: int = 50) -> float:
    """Microseconds per call."""
    if device.type != "cuda":
        times = []
        for _ in range(20):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(links):
            call()
    times = []
    for _ in range(60):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / links)
    return statistics.median(times[10:])


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    parallel, device = joined_ranks(on_cpu=options.tiny)
    rank, size = parallel.rank, parallel.size
    torch.manual_seed(0)
    config = deepseek_v3.Config.from_dict(TINY if options.tiny else R1)
    if options.layers:
        config = replace(config, num_hidden_layers=options.layers)
    report: dict[str, Any] = {
        "hardware": describe_hardware(device.type),
        "tp": size,
        "layers": config.num_hidden_layers,
    }
    report["torch"] = torch.__version__
    report["input_len"], report["output_len"] = options.input_len, options.output_len

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(
        f"{report['hardware']}, {size} ranks; all-reduce by "
        f"{'peers' if parallel.peers is not None else 'the library'}"
    )
    report["all_reduce_us"] = all_reduces(
        parallel, device, config.hidden_size, [1, 2, 4, 8, 16, 32, 64, 128]
    )
    for row in report["all_reduce_us"]:
        say("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if options.only_all_reduce:
        return report
    batches = [int(one) for one in options.concurrency.split(",")]
    began = time.perf_counter()
    loaded = build(config, parallel, device)
    engine = made_engine(
        replace(loaded, mtp_layers=()), max(batches), options.input_len + options.output_len
    )
    say(f"weights and cache in {time.perf_counter() - began:.1f} s")
    report["rows"] = grid(engine, options, options.output_len)
    tell(say, "", report["rows"])
    report["memory"] = memory(parallel, device)
    say(f"memory {report['memory']}")
    report["why_eager"] = engine.runner.why_eager
    report["device"] = device_steps(engine.runner.steps)
    for rows, one in report["device"].items():
        say(f"\n{rows} rows: {one['device_ms']:.3f} ms on the device, {one['launches']} launches")
        for name, count, ms in one["kernels"]:
            say(f"  {ms:>8.3f} ms {count:>6} {name}")
    report["rows_mtp"] = []
    for draft_length, users in [*((1, users) for users in batches), (3, 1)]:
        drafting = made_engine(
            loaded,
            max(batches),
            options.input_len + options.output_len,
            draft_length=draft_length,
            kind=DraftingEngine,
        )
        (row,) = grid(
            drafting,
            argparse.Namespace(**{**vars(options), "concurrency": str(users)}),
            options.output_len,
        ) or [{}]
        assert drafting.speculation.drafter is not None, "made with drafts"
        row |= {"num_drafts": draft_length, "acceptance": drafting.speculation.acceptance.rate}
        row |= {
            "step_device": device_steps(drafting.runner.steps),
            "mtp_device": device_steps(drafting.speculation.drafter.steps),
        }
        report["rows_mtp"].append(row)
        for part in ("step_device", "mtp_device"):
            for size, one in row[part].items():
                say(
                    f"with MTP, {part}, {size} rows: {one['device_ms']:.3f} ms, {one['launches']} "
                    "launches"
                )
    tell(say, "with MTP: ", report["rows_mtp"])
    alone = {row["concurrency"]: row["tpot_ms"] for row in report["rows"]}
    for row in report["rows_mtp"] if rank == 0 else []:
        say(
            f"concurrency {row['concurrency']}, {row['num_drafts']} guesses: "
            f"{alone[row['concurrency']] / row['tpot_ms']:.2f} times as fast"
        )
    if options.profile:
        profiler = cProfile.Profile()
        profiler.runcall(grid, engine, options, min(SHORT_OUTPUT, options.output_len))
        if rank == 0:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    if parallel.peers is not None:
        parallel.peers = None
        engine.runner = Runner(loaded.model, engine.cache)
        report["rows_nccl"] = grid(engine, options, min(SHORT_OUTPUT, options.output_len))
        tell(say, "with NCCL: ", report["rows_nccl"])
    return report


def tell(say: Callable[[str], None], head: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        say(
            head
            + "  ".join(
                f"{key} {value:.4g}"
                for key, value in row.items()
                if isinstance(value, (int, float))
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--layers", type=int, help="only so many of the 61: a test of the script")
    parser.add_argument("--only-all-reduce", action="store_true")
    parser.add_argument(
        "--profile", action="store_true", help="also print where rank 0's host spends its time"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.input_len, options.output_len = (
            min(options.input_len, 32),
            min(options.output_len, 16),
        )
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    report_of_ranks(run, options)


if __name__ == "__main__":
    main()
