"""Engines over made-up weights of R1's shapes: a whole box whose ranks torchrun starts, or one rank
alone, and drafts of which some count as right.

Made-up weights draft nothing right, so whether a draft is right is drawn when its successor was
chosen: the layer has computed and sampled, the draft went through the whole model, cache and rows
were kept for it, and then what the model chose in its place is made the draft, or another token. A
right draft brings a token, after a wrong one it is computed again. Rows of one user choose experts
as unlike each other as those of two: successive tokens of real text share some.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from core import Measure, Spread, about, print_about
from made_weights import Repeated, SyntheticWeights
from quantkit_kernels import UnsummedPairs, accelerator
from torch import Tensor

from quantkit.checkpoint.hub import find_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.devices import to_device
from quantkit.evaluation.speed.measure import RequestTimes, Workload
from quantkit.evaluation.speed.targets import EngineTarget
from quantkit.executor.cache.cache import BLOCK_SIZE, CachePlan
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.rank0 import follow
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.graph_warmup import warm_up_graphs
from quantkit.executor.runner.graphs import SamplingGraph
from quantkit.executor.runner.prefill_tuner import measure
from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.runner.sampler import SampledTokens, Sampler
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.speculation import Speculation
from quantkit.executor.weights.load import LoadedModel
from quantkit.executor.weights.weights import Gathered
from quantkit.models import deepseek_v3
from quantkit.models.weights import LinearOp
from quantkit.tokenizer.chat import ChatTokenizer

Result = TypeVar("Result")
PUBLISHED = 0.69
"""Share of drafts that are right, of those after right ones: three bring 2.49 tokens a step, as
was published."""


def made_model(
    model: Any, config: Any, weights: Any, device: torch.device, mtp_layers: tuple[Any, ...] = ()
) -> LoadedModel:
    """As `load_model` returns it. The checkpoint is tiny-r1's: nothing is read from it."""
    return LoadedModel(
        model,
        mtp_layers,
        config,
        Checkpoint.open(find_model("tiny-r1")),
        weights,
        device,
        torch.bfloat16,
    )


def made_engine(
    loaded: LoadedModel,
    batch: int,
    length: int,
    *,
    homes: int = 1,
    draft_length: int = 0,
    kind: type[Engine] = Engine,
) -> Engine:
    """Room for `batch` requests of `length` tokens, shared out over `homes` ranks; the tokenizer
    only marks ends of answers, which benchmarks ignore."""
    blocks = -(-(length + 2 * draft_length) // BLOCK_SIZE) + 1
    plan = CachePlan(-(-batch // homes) * blocks + 1, BLOCK_SIZE, length)
    tokenizer = ChatTokenizer(find_model("tiny-r1"))
    return kind(loaded, tokenizer, plan, EngineOptions(max_batch=batch, draft_length=draft_length))


def served_engine(
    loaded: LoadedModel, blocks: int, length: int, batch: int, chunk_tokens: int | None = None
) -> Engine:
    """As `quantkit serve` has it: how much of a prompt is computed together with answers is
    measured, or `chunk_tokens`, and graphs are captured ahead. All ranks at the same time. blocks:
    of the cache; length: of a request."""
    plan, tokenizer = (
        CachePlan(blocks + 1, BLOCK_SIZE, length),
        ChatTokenizer(find_model("tiny-r1")),
    )
    options = EngineOptions(max_batch=batch, chunk_tokens=chunk_tokens, measure_steps=True)
    engine = Engine(loaded, tokenizer, plan, options)
    engine.scheduler.budget = measure(
        engine.runner,
        engine.parallel,
        engine.scheduler.budget,
        batch,
        engine.longest_chunk,
    )
    warm_up_graphs(engine.runner, engine.parallel, batch, length)
    return engine


def led(engine: Engine, measured: Callable[[], Result]) -> Result | None:
    """What rank 0 measures while the others follow; None on those."""
    if engine.parallel.rank:
        follow(engine)
        return None
    try:
        return measured()
    finally:
        engine.leader.dismiss()


def joined_ranks(on_cpu: bool) -> tuple[Parallel, torch.device]:
    """This process's place among torchrun's, connected, and its device."""
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    parallel = Parallel(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    parallel.connect(device)
    return parallel, device


def report_of_ranks(run: Measure, options: argparse.ArgumentParser) -> None:
    """Run on every rank; rank 0 prints what the run is and writes the report where `--out` says
    so."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    facts = about("cpu" if given.tiny else "cuda") if os.environ["RANK"] == "0" else {}
    if facts:
        print_about(facts)
    report = facts | run(given)
    if given.out and facts:
        given.out.write_text(json.dumps(report, indent=1, default=vars))
    # they hold NCCL's communicator: without this it did not end on four cards
    accelerator.let_go_of_graphs()
    dist.destroy_process_group()


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


def one_rank(
    config: deepseek_v3.Config,
    tp: int,
    device: torch.device,
    kind: type[SyntheticWeights] = SyntheticWeights,
) -> LoadedModel:
    """As `build`, of one rank of `tp` without the others: partial sums go straight into the
    residual."""
    weights = kind(config, tp, device)
    with torch.inference_mode():
        return made_model(
            deepseek_v3.Model(config, weights),
            config,
            weights,
            device,
            (deepseek_v3.MtpLayer(config, weights),),
        )


class DraftingEngine(Engine):
    """Its requests' drafts are right as often as `acceptance` says."""

    acceptance = 0.7

    def __init__(self, loaded: LoadedModel, *given: Any, **options: Any) -> None:
        super().__init__(loaded, *given, **options)
        self.sampler = DrawnSampler(self)

    def sequence(
        self, prompt: list[int], params: SamplingParams, index: int = 0, *, streams: bool = True
    ) -> Sequence:
        """Its seed follows from the prompt: the same on every rank, and for any number of
        drafts."""
        return super().sequence(
            prompt, replace(params, seed=1000 * sum(prompt)), index, streams=False
        )


class DrawnSampler(Sampler):
    """Which drafts are right is drawn from their sequence's seed and their places."""

    def __init__(self, engine: DraftingEngine) -> None:
        super().__init__(
            engine.loaded.config.vocab_size, engine.loaded.device, lambda: engine.tokenizer.eos_ids
        )
        self._engine = engine

    def sample(self, done: ForwardPass, draw: SamplingGraph) -> SampledTokens:
        """As `Sampler.sample`, but at every token before a draft."""
        chosen, wanted = super().sample(done, draw), []
        if not any(sequence.drafts for sequence, _ in done.counts):
            return chosen
        for sequence, count in done.counts:
            for place, draft in enumerate(sequence.drafts[: count - 1], len(sequence.token_ids)):
                right = random.Random(sequence.seed + place).random() < self._engine.acceptance
                wanted.append(draft if right else (draft + 1) % self._vocab)
            wanted.append(-1)
        replaced = to_device(wanted, chosen.token_ids.device)
        return chosen._replace(token_ids=torch.where(replaced < 0, chosen.token_ids, replaced))


def plain_row(engine: Engine, work: Workload) -> dict[str, Any]:
    """An engine without a layer that drafts. Empty on ranks above 0."""
    times = led(engine, lambda: list(EngineTarget(engine, "R1", work.concurrency).run(work)))
    return {"users": work.concurrency, "draft_length": "none"} | _times(times) if times else {}


def drafts_row(
    engine: DraftingEngine, work: Workload, most: int, fixed: int | None, acceptance: float
) -> dict[str, Any]:
    """Empty on ranks above 0. most: drafts of the engine's layer, at most. fixed: as many in every
    step; None: chosen while running from what they bring and cost, by an engine that knows nothing
    yet."""
    engine.acceptance, drafter = acceptance, engine.speculation.drafter
    assert drafter is not None, "an engine with a layer that drafts"
    drafter.count = most
    engine.speculation = Speculation(drafter, 0, adaptive=fixed is None)
    if fixed is not None:
        engine.speculation.set_lengths(fixed, 0)
    steps = watched(engine.speculation)
    times = led(engine, lambda: list(EngineTarget(engine, "R1", work.concurrency).run(work)))
    if not times:
        return {}
    found, controller = engine.speculation.acceptance, engine.speculation.controller
    tokens = sum(one.output_tokens - 1 for one in times)
    return {
        "users": work.concurrency,
        "draft_length": "chosen" if fixed is None else fixed,
        "right": acceptance,
        **_times(times),
        "kept": found.rate,
        "tokens_a_step": tokens / (tokens - found.accepted),
        "length_last": controller.drafts,
        "step_ms": {
            drafts: {rows: seconds * 1e3 for rows, seconds in costs.by_rows().items()}
            for drafts, costs in sorted(controller.step_times.items())
        },
        "slowest": sorted(steps, reverse=True)[:8],
        "tried": sum(rows > answers or drafts > 0 for _, drafts, rows, answers, _ in steps),
    }


def watched(speculation: Speculation) -> list[tuple[float, int, int, int, int]]:
    """Of every step of answers alone: its milliseconds, the drafts that it makes, its rows and
    answers, and which step it is."""
    steps: list[tuple[float, int, int, int, int]] = []
    controller = speculation.controller
    stepped = controller.record_step

    def noted(answers: int, rows: int, kept: int, seconds: float, longest: int) -> None:
        steps.append((seconds * 1e3, controller.drafts, rows, answers, len(steps)))
        stepped(answers, rows, kept, seconds, longest)

    setattr(controller, "record_step", noted)  # noqa: B010
    return steps


def warm(engine: DraftingEngine, input_len: int, users: int, most: int) -> None:
    """Every size of a step is captured: of each number of drafts, with fewer answers too."""
    for count in [1 << power for power in range(users.bit_length())]:
        for fixed in range(most, -1, -1):
            drafts_row(
                engine, Workload(input_len, 4 + 2 * fixed, count, count, seed=-1), most, fixed, 1.0
            )


def _times(times: list[RequestTimes]) -> dict[str, Any]:
    tpots = [one.tpot_ms or 0.0 for one in times]
    return {
        "tpot_ms": statistics.mean(tpots),
        "tpot_ms_users": Spread.of(tpots),
        "output_len": times[0].output_tokens,
    }
