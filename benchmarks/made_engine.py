"""Engines over made-up weights, and benchmarks whose ranks torchrun starts."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from quantkit_kernels import accelerator

from quantkit.checkpoint.hub import find_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.cache.cache import BLOCK_SIZE, CachePlan
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.rank0 import follow
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.graph_warmup import warm_up_graphs
from quantkit.executor.runner.prefill_tuner import measure
from quantkit.executor.weights.load import LoadedModel
from quantkit.tokenizer.chat import ChatTokenizer

Result = TypeVar("Result")


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


def served_engine(loaded: LoadedModel, blocks: int, length: int, batch: int) -> Engine:
    """As `quantkit serve` has it: how much of a prompt is computed beside answers is measured, and
    graphs are captured ahead. All ranks at
    the same time. blocks: of the cache; length: of a request."""
    plan, tokenizer = (
        CachePlan(blocks + 1, BLOCK_SIZE, length),
        ChatTokenizer(find_model("tiny-r1")),
    )
    engine = Engine(loaded, tokenizer, plan, EngineOptions(max_batch=batch, measure_steps=True))
    engine.scheduler.budget = measure(
        engine.runner, engine.parallel, engine.scheduler.budget, batch, fixed_chunk=False
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


def report_of_ranks(
    run: Callable[[argparse.Namespace], dict[str, Any]], options: argparse.Namespace
) -> None:
    """Run on every rank; rank 0 writes the report where `--out` says so."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    report = run(options)
    out: Path | None = options.out
    if out and os.environ["RANK"] == "0":
        out.write_text(json.dumps(report, indent=1))
    # they hold NCCL's communicator: without this it did not end on four cards
    accelerator.let_go_of_graphs()
    dist.destroy_process_group()
