"""DeepSeek-R1's true shapes on all GPUs of a box, as a server runs them: the published grid, and
drafts of an MTP layer.

    torchrun --nproc-per-node 4 benchmarks/r1_grid.py --out FILE.json [--parts alone,many,drafts,rest] [--seconds 400]
        [--chunk-tokens 8192]
    torchrun --nproc-per-node 1 benchmarks/r1_grid.py --rank-of 4 [--cells 4096x16,8192x8]     one of four ranks on one card, without sums
    torchrun --nproc-per-node 2 benchmarks/r1_grid.py --tiny       the same on a CPU (gloo) in seconds: a test of the script

Weights, cache and collectives are those of r1_engine.py, in W4A16; the engine is made once and
measures, as `quantkit serve` does, how much of a prompt it computes next to answers, or takes
--chunk-tokens. Cells are input lengths and concurrencies of a published report
(eval/reference/speed.yaml), K being 1024, and one prompt of 16K: `alone` is one user with few
tokens or a long prompt, `many` the most users of every longer prompt, `rest` all others, the
longest prompts first. Every user sends one request, all at once, and its answer has 512 tokens;
that of a single user after a longer prompt has 128, for there a token takes as long as the next.
Not in these figures: a server and a tokenizer.

Steps of every size are captured before, and prompts of up to 1024 tokens in all; a prompt of two
steps comes once before. `captured` says how many passes with prompts were captured while a cell
ran, each of which takes some tenths of a second, and `largest_gap_ms` how long an answer waited for
a token at most. Figures are means over users, with the spread over them. The file is written after
every part and cell; a part that fails is reported and the next one begins; `--seconds` after the
start of the process no further cell begins.
"""

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from core import Spread, numbers, parser
from made_weights import R1, TINY
from r1_engine import (
    PUBLISHED,
    DraftingEngine,
    build,
    drafts_row,
    joined_ranks,
    led,
    made_engine,
    one_rank,
    plain_row,
    report_of_ranks,
    served_engine,
    warm,
)

from quantkit.common.assets import asset
from quantkit.evaluation.speed.measure import Workload, summarize
from quantkit.evaluation.speed.targets import EngineTarget
from quantkit.executor.cache.cache import BLOCK_SIZE
from quantkit.executor.engine import Engine
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.graph_warmup import capture_decode
from quantkit.executor.runner.graphs import MIN_TABLE_WIDTH, power_of_two
from quantkit.executor.runner.prefill_graphs import MOST_TOKENS, PrefillChunk
from quantkit.executor.scheduler.scheduler import Scheduler
from quantkit.executor.weights.load import LoadedModel
from quantkit.models import deepseek_v3

BEGAN = time.perf_counter()
MOST_DRAFTS = 3
_WARM = 2
"""Steps of a single prompt before the cells of a part are measured: those of a longer one are not
others."""
PARTS = ("alone", "many", "drafts", "rest")


@dataclass(frozen=True)
class Cell:
    input_len: int
    users: int
    output_len: int

    @property
    def blocks(self) -> int:
        return self.users * (-(-(self.input_len + self.output_len) // BLOCK_SIZE) + 1)


@dataclass(frozen=True)
class Sizes:
    """What is measured: of R1, or of a test of the script."""

    alone: list[Cell]
    many: list[Cell]
    rest: list[Cell]
    users: tuple[int, ...] = (1, 8, 32)

    def only(self, cells: list[tuple[int, int]]) -> "Sizes":
        """Those input lengths and users."""
        parts = {
            name: [one for one in vars(self)[name] if (one.input_len, one.users) in cells]
            for name in ("alone", "many", "rest")
        }
        return replace(self, alone=parts["alone"], many=parts["many"], rest=parts["rest"])

    @property
    def cells(self) -> list[Cell]:
        return [*self.alone, *self.many, *self.rest]


def published_cells() -> list[dict[str, Any]]:
    """Rows of the report on one box of eight."""
    tables = yaml.safe_load(asset("eval", "reference", "speed.yaml").read_text())
    (table,) = (one for one in tables if one["name"] == "r1-0528-w4a16-910b1")
    return [dict(zip(table["columns"], row)) for row in table["rows"]]


def sizes_of_r1() -> Sizes:
    """The grid in the order of what is asked most."""
    asked = {(row["input_len"], row["concurrency"]) for row in published_cells()} | {(16384, 1)}
    most = {length: max(users for at, users in asked if at == length) for length, _ in asked}
    alone = [(128, 1), *sorted(one for one in asked if one[1] == 1 and one[0] > 1024)]
    many = sorted((one for one in most.items() if one[0] > 128 and one[1] > 1), reverse=True)
    rest = sorted(asked - {*alone, *many}, key=lambda one: (-one[0], one[1]))
    first, second, third = (
        [Cell(at, users, 128 if users == 1 and at > 128 else 512) for at, users in part]
        for part in (alone, many, rest)
    )
    return Sizes(first, second, third)


TINY_SIZES = Sizes(
    [Cell(24, 1, 8), Cell(96, 1, 4)],
    [Cell(96, 2, 6)],
    [Cell(24, 2, 8)],
    (1, 2),
)


@dataclass
class GridRun:
    """One rank's place, and what was found so far; rank 0 writes it down."""

    parallel: Parallel
    sizes: Sizes
    out: Path | None
    seconds: float
    report: dict[str, Any]
    engine: Engine = field(init=False)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() - BEGAN > self.seconds

    def say(self, text: str) -> None:
        if self.parallel.rank == 0:
            print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)

    def add(self, part: str, row: dict[str, Any]) -> None:
        """A row of a part, printed and written; nothing on ranks above 0."""
        if self.parallel.rank == 0:
            self.report.setdefault(part, []).append(row)
            self.say(
                f"{part}: "
                + "  ".join(
                    f"{key} {value:.4g}"
                    for key, value in row.items()
                    if isinstance(value, (int, float))
                )
            )
            self.save()

    def save(self) -> None:
        if self.out is not None and self.parallel.rank == 0:
            self.out.write_text(json.dumps(self.report, indent=1, default=vars))

    def part(self, name: str, measure: Callable[["GridRun"], None]) -> None:
        """Where it fails the others go on, with an engine in which no request is left."""
        if not self.parallel.minimum(int(not self.is_late)):
            self.say(f"{name}: no time is left for it")
            return
        try:
            measure(self)
        except Exception:
            trace = traceback.format_exc()
            self.report.setdefault("failed", {})[name] = trace
            print(f"rank {self.parallel.rank}, {name}: {trace}", flush=True)
            scheduler = self.engine.scheduler
            assert isinstance(scheduler, Scheduler), "ranks share every request"
            for one in [*scheduler.running, *scheduler.waiting]:
                self.engine.withdraw(one, "cancelled")
        self.save()


def cells_of(text: str) -> list[tuple[int, int]]:
    """Input lengths and users of 4096x16,8192x8, which the grid must have."""
    cells = [
        (int(length), int(users)) for length, users in (one.split("x") for one in text.split(","))
    ]
    grid = {
        (one.input_len, one.users) for sizes in (sizes_of_r1(), TINY_SIZES) for one in sizes.cells
    }
    if unknown := [f"{length}x{users}" for length, users in cells if (length, users) not in grid]:
        known = ", ".join(
            f"{length}x{users}"
            for length, users in sorted(
                grid - {(one.input_len, one.users) for one in TINY_SIZES.cells}
            )
        )
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not in the grid: {known}")
    return cells


def make_engine(box: GridRun, loaded: LoadedModel, chunk_tokens: int | None) -> None:
    """With room for the largest cell, and every size of a decode step of a cell captured."""
    blocks = max(cell.blocks for cell in box.sizes.cells)
    users = max(cell.users for cell in box.sizes.cells)
    length = max(cell.input_len + cell.output_len for cell in box.sizes.cells)
    box.engine = served_engine(
        replace(loaded, mtp_layers=()), blocks, length, users + 1, chunk_tokens
    )
    box.report["budget"] = vars(box.engine.scheduler.budget)
    box.report["cache_tokens"] = blocks * BLOCK_SIZE
    box.say(
        f"prompts: {box.report['budget']}; cache of {blocks * BLOCK_SIZE} tokens, "
        f"{box.engine.cache.nbytes / 1e9:.1f} GB"
    )
    wanted = {
        (power_of_two(-(-(cell.input_len + cell.output_len) // BLOCK_SIZE)), cell.users)
        for cell in box.sizes.cells
    }
    if box.engine.runner.why_eager:
        box.say(box.engine.runner.why_eager)
        return
    for width, users in sorted(wanted):
        for rows in [1 << power for power in range(power_of_two(users).bit_length())]:
            capture_decode(box.engine.runner, rows, max(width, MIN_TABLE_WIDTH))
    short = [cell for cell in box.sizes.cells if cell.input_len * cell.users <= MOST_TOKENS]
    for cell in short:
        capture_prompts(box.engine, cell)
    box.say("decode steps and short prompts are captured")


@torch.inference_mode()
def capture_prompts(engine: Engine, cell: Cell) -> None:
    """The one pass that computes the prompts of all users. All ranks at the same time."""
    each = -(-cell.input_len // BLOCK_SIZE)
    tables = [list(range(1 + user * each, 1 + (user + 1) * each)) for user in range(cell.users)]
    engine.runner.prefill_runner.capture(
        None, [PrefillChunk([user] * cell.input_len, 0, table) for user, table in enumerate(tables)]
    )


def measure_cells(box: GridRun, cells: list[Cell], part: str) -> None:
    if not cells:
        return

    def measured() -> None:
        longest = min(
            max(cell.input_len for cell in cells), _WARM * box.engine.scheduler.budget.prefill_only
        )
        if longest > MOST_TOKENS:
            list(EngineTarget(box.engine, "R1", 1).run(Workload(longest, 2, 1, 1, seed=-1)))
        for cell in cells:
            if not box.is_late:
                measure_cell(box, cell, part)

    led(box.engine, measured)


def measure_cell(box: GridRun, cell: Cell, part: str) -> None:
    """Rank 0: one request of every user."""
    target, passes, began = (
        EngineTarget(box.engine, "R1", cell.users),
        box.engine.runner.prefill_runner,
        time.perf_counter(),
    )
    work = Workload(
        cell.input_len, cell.output_len, cell.users, cell.users, seed=cell.input_len + cell.users
    )
    before = passes.num_captured
    times = list(target.run(work))
    row = summarize(times, cell.input_len, cell.users).to_json()
    kept = (
        "input_len",
        "concurrency",
        "output_len",
        "ttft_s",
        "tpot_ms",
        "system_tps",
        "latency_s",
        "itl_ms",
        "itl_ms_p50",
    )
    found = {key: row[key] for key in kept if row.get(key) is not None}
    found["ttft_s_users"] = Spread.of([one.ttft_s for one in times])
    found["tpot_ms_users"] = Spread.of([one.tpot_ms or 0.0 for one in times])
    found |= {
        "largest_gap_ms": max(max(one.gaps) for one in times) * 1e3,
        "captured": passes.num_captured - before,
    }
    if cell.users == 1 and cell.input_len <= MOST_TOKENS:
        alone = list(target.run(Workload(cell.input_len, 2, 7, 1, seed=-2)))
        found["ttft_alone_s"] = statistics.median(one.ttft_s for one in alone)
    box.add(part, found | {"took_s": time.perf_counter() - began})


def measure_drafts(box: GridRun, loaded: LoadedModel) -> None:
    """As often right as published, chosen while running and fixed; less often and never, next to an
    engine without a layer that drafts."""
    input_len, output_len = (
        (128, 512) if box.parallel.peers is not None or loaded.device.type != "cpu" else (24, 16)
    )
    engine = made_engine(
        loaded,
        max(box.sizes.users),
        input_len + output_len,
        draft_length=MOST_DRAFTS,
        kind=DraftingEngine,
    )
    assert isinstance(engine, DraftingEngine)
    for users in box.sizes.users:
        if not box.parallel.minimum(int(not box.is_late)):
            break
        warm(engine, input_len, users, MOST_DRAFTS)
        work = Workload(input_len, output_len, users, users, seed=users)
        for fixed in (None, 1, 2, MOST_DRAFTS):
            few = work if fixed is None or users == 1 else replace(work, output_len=output_len // 2)
            box.add("drafts", drafts_row(engine, few, MOST_DRAFTS, fixed, PUBLISHED))
        box.add("drafts", plain_row(box.engine, work))
        for right in (0.3, 0.0):
            box.add("drafts", drafts_row(engine, work, MOST_DRAFTS, None, right))
    del engine
    gc.collect()
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()


def print_table(report: dict[str, Any]) -> None:
    """The grid next to the report's figures, then the drafts."""
    published = {(row["input_len"], row["concurrency"]): row for row in published_cells()}
    names = (
        ("in", 6),
        ("users", 5),
        ("out", 4),
        ("TTFT s", 8),
        ("report", 7),
        ("TPOT ms", 8),
        ("report", 7),
        ("median", 7),
        ("tok/s", 7),
    )
    print("\n" + " ".join(name.rjust(width) for name, width in (*names, ("gap ms", 7))), "captured")
    for row in sorted(
        (row for part in ("alone", "many", "rest") for row in report.get(part, [])),
        key=lambda row: (row["input_len"], row["concurrency"]),
    ):
        other = published.get((row["input_len"], row["concurrency"]), {})
        print(
            f"{row['input_len']:>6} {row['concurrency']:>5} {row['output_len']:>4.0f} "
            f"{row['ttft_s']:>8.3f} {other.get('ttft_s', '-'):>7} "
            f"{row['tpot_ms']:>8.2f} {other.get('tpot_ms', '-'):>7} "
            f"{row.get('itl_ms_p50', float('nan')):>7.2f} {row['system_tps']:>7.0f} "
            f"{row['largest_gap_ms']:>7.1f} {row['captured']}"
        )
    for row in report.get("drafts", []):
        kept = (
            f", kept {row['kept']:.3f}, {row['tokens_a_step']:.2f} a step, last "
            f"{row['length_last']}"
            if "kept" in row
            else ""
        )
        right = f" right {row['right']}" if "right" in row else ""
        print(
            f"{row['users']} users, drafts {row['draft_length']}{right}: {row['tpot_ms']:.3f} ms, by "
            f"user {row['tpot_ms_users']}{kept}"
        )
    print("failed:", ", ".join(report.get("failed", {})) or "nothing", flush=True)


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    parallel, device = joined_ranks(on_cpu=options.tiny)
    torch.manual_seed(0)
    config = deepseek_v3.Config.from_dict(TINY if options.tiny else R1)
    if options.layers:
        config = replace(config, num_hidden_layers=options.layers)
    about = {
        "tp": options.rank_of or parallel.size,
        "ranks": parallel.size,
        "layers": config.num_hidden_layers,
    }
    sizes = TINY_SIZES if options.tiny else sizes_of_r1()
    if options.cells:
        sizes = sizes.only(options.cells)
        assert sizes.cells, "cells of R1's grid are none of the test's"
    if options.users:
        sizes = replace(sizes, users=tuple(options.users))
    box = GridRun(parallel, sizes, options.out, options.seconds, about)
    box.say(f"{about}, all-reduce by {'peers' if parallel.peers is not None else 'the library'}")
    loaded = (
        one_rank(config, options.rank_of, device)
        if options.rank_of
        else build(config, parallel, device)
    )
    box.say("weights are made")
    make_engine(box, loaded, options.chunk_tokens)
    measures: dict[str, Callable[[GridRun], None]] = {
        "alone": lambda box: measure_cells(box, box.sizes.alone, "alone"),
        "many": lambda box: measure_cells(box, box.sizes.many, "many"),
        "drafts": lambda box: measure_drafts(box, loaded),
        "rest": lambda box: measure_cells(box, box.sizes.rest, "rest"),
    }
    for name in options.parts.split(","):
        box.part(name, measures[name])
    if device.type == "cuda":
        box.report["reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
        box.save()
    if parallel.rank == 0:
        print_table(box.report)
    if "failed" in box.report:
        os._exit(1)  # what was broken off holds the others up when they part
    return box.report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--seconds", type=float, default=400.0)
    options.add_argument("--rank-of", type=int, help="one rank of so many, alone")
    options.add_argument("--cells", type=cells_of, help="these alone")
    options.add_argument("--layers", type=int, help="only so many of the 61: a test of the script")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--users", type=numbers, help="of drafts, these alone")
    options.add_argument("--chunk-tokens", type=int, help="of a prompt next to answers")
    report_of_ranks(run, options)


if __name__ == "__main__":
    main()
