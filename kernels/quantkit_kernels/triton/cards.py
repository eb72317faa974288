"""Cards by class: what one block may use, and the plan of a product: a measured one, or a rule.
Nothing is searched for while a model runs.

tables/ARCHITECTURE.json holds what `quantkit kernels --tune` measured on a card of that class; a
card without a table takes the rule. What it measured on this machine counts for cards of the same
name only: an H100 and an H200 are of one class, and may share a home folder.
"""

import functools
import json
import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from quantkit_kernels.compiled import cache_directory
from quantkit_kernels.triton.dense_plans import MOST_ROWS, DenseRowsPlan, is_small, small_plan
from quantkit_kernels.triton.wgmma_plans import WgmmaPlan, has_wgmma, wgmma_rule

_log = logging.getLogger(__name__)
TABLES = Path(__file__).parent / "tables"
_KIB = 1024
SHARED_BYTES = {
    "sm_80": 163 * _KIB,
    "sm_86": 99 * _KIB,
    "sm_89": 99 * _KIB,
    "sm_90": 227 * _KIB,
    "sm_100": 227 * _KIB,
    "sm_120": 99 * _KIB,
    "gfx90a": 64 * _KIB,
    "gfx942": 64 * _KIB,
}
"""Shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities; AMD's
LDS)."""
_LEAST_SHARED = 64 * _KIB
"""Of a card that is in no table: every card that Triton runs on has as much, but Turing's by a
little."""
_INTERPRETED_MULTIPROCESSORS = 2


def interpreted() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def architecture(device: torch.device) -> str:
    """sm_90, gfx942, ...; "interpreter" on a CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


OVERLAPPED: tuple[str, ...] = ("sm_90",)
"""Cards on which a kernel of a decode step begins while the one before it ends (`wait_for_input`);
Hopper's and later could."""


@functools.cache
def overlapped(device: torch.device) -> dict[str, bool]:
    """What every launch of a decode step is given for it."""
    return (
        {"PDL": True, "launch_pdl": True} if architecture(device) in OVERLAPPED else {"PDL": False}
    )


def shared_bytes(name: str) -> int:
    """What a block may have on a card of this architecture; of a newer one of a known family, what
    the family's newest has."""
    if name in SHARED_BYTES:
        return SHARED_BYTES[name]
    family = [known for known in SHARED_BYTES if known[:-1] == name[:-1]]
    return SHARED_BYTES[max(family)] if family else _LEAST_SHARED


@dataclass(frozen=True)
class LinearPlan:
    """How multiply_kernel.py is launched. rows, tokens: of a tile; split: programs that share K;
    warps; stages of copies in flight."""

    rows: int
    tokens: int
    split: int
    warps: int
    stages: int


EXPAND_TOKENS = 1024
"""From more tokens on a 4-bit weight is decoded to 16 bits and multiplied by the vendor's library,
whatever a table says."""
_EXPANDED = {"int4": 512, "w8a16": 512, "fp4": 256}
"""From so many tokens on the rule says so, by kind."""
_FEWEST, _FEW, _SOME = 8, 16, 64
"""Tokens up to which a product is bound by reading weights, and by latency: then several programs
share a multiprocessor and K."""


AnyPlan = LinearPlan | WgmmaPlan


def linear_plan(
    name: str, processors: int, kind: str, n: int, k: int, tokens: int
) -> AnyPlan | None:
    """The plan for W[n, k] of so many tokens; None: expand. name: the card's architecture."""
    if kind != "int8" and tokens > EXPAND_TOKENS:
        return None
    if kind == "int8" and has_wgmma(name, k):
        table = _table(name).wgmma
        by_wgmma = (
            _nearest(table[n, k], tokens)
            if (n, k) in table
            else wgmma_rule(processors, n, k, tokens)
        )
        if by_wgmma is not None:
            return by_wgmma
    measured = _nearest(_table(name).linear.get((kind, n, k)), tokens)
    if measured is not None:
        return measured if measured.rows else None
    if tokens >= _EXPANDED.get(kind, tokens + 1):
        return None
    return fitting(_rule(name, processors, n, -(-k // 128), tokens), kind, name)


def _rule(name: str, processors: int, n: int, steps: int, tokens: int) -> LinearPlan:
    """What the plans measured on an H200 have in common: so many programs a multiprocessor, and as
    many steps of K for each at least."""
    width, room = max(16, min(128, _power_of_two(tokens))), shared_bytes(name)
    if tokens <= _FEW and name.startswith(
        "sm_"
    ):  # of two warps: the matrix instructions of four are waited for
        plan, programs, least = LinearPlan(64, width, 1, 2, 3), 6 * processors, 4
    elif tokens <= _FEW:
        plan, programs, least = LinearPlan(64, width, 1, 4, 3), 6 * processors, 7
    elif tokens <= _SOME:
        plan, programs, least = LinearPlan(128, width, 1, 8, 3), 2 * processors, 14
    else:
        wide = (
            tokens > 128
            and room >= SHARED_BYTES["sm_90"]
            and -(-n // 128) * -(-tokens // 256) > processors // 3
        )
        plan, programs, least = LinearPlan(128, 256 if wide else width, 1, 8, 3), processors, 14
    tiles = -(-n // plan.rows) * -(-tokens // plan.tokens)
    return replace(plan, split=max(1, min(programs // tiles, steps // least, _MOST_SPLIT)))


_MOST_SPLIT = 16


_NEAR = 1.25
"""A plan measured for experts holds for so many times the pairs: a shared expert next to the routed
ones adds an eighth."""


class ExpertsPlan(NamedTuple):
    """How both products of sorted pairs are launched; their tiles have as many tokens."""

    gate_up: LinearPlan
    down: LinearPlan


def least_tokens(name: str, kind: str) -> int:
    """Of a tile of experts: the columns of the smallest matrix instruction, of which NVIDIA's has
    8. Kinds other than int4 were measured with 16 only, and most linears are no faster with 8."""
    return _FEWEST if name.startswith("sm_") and kind == "int4" else _FEW


def experts_plan(
    name: str, kind: str, intermediate: int, hidden: int, pairs_per_expert: float
) -> ExpertsPlan:
    """A tile should hold all tokens of most experts; four times the average is enough for most."""
    measured = _nearest(
        _table(name).experts.get((kind, hidden, intermediate)),
        round(pairs_per_expert * 256 / _NEAR),
    )
    if measured is not None:
        return measured
    tokens = _FEW if pairs_per_expert <= 12 else 32 if pairs_per_expert <= 24 else 64
    if 4 * pairs_per_expert <= least_tokens(name, kind):
        tokens = least_tokens(name, kind)
    # Elsewhere, and with int8 on a B200, gate's and up's sums do not fit the registers.
    wide = kind != "int8" and pairs_per_expert > 96 and shared_bytes(name) >= SHARED_BYTES["sm_90"]
    few = (
        LinearPlan(64, tokens, 1, 2, 3)
        if tokens <= _FEW and name.startswith("sm_")
        else LinearPlan(64, tokens, 1, 4, 4)
    )
    plan = LinearPlan(128, 128, 1, 8, 3) if wide else few
    return ExpertsPlan(fitting(plan, kind, name, doubled=True), fitting(plan, kind, name))


_WARPS = 24
"""Of programs that are on a multiprocessor at once, where few tokens' experts are computed."""


def experts_split(
    plan: LinearPlan, processors: int, intermediate: int, hidden: int, tiles: int
) -> int:
    """Programs that share K of gate and up, where few tokens' experts would not fill the card.
    tiles: of sorted pairs."""
    if plan.tokens > _FEW:
        return 1
    programs = _WARPS // plan.warps * processors
    return max(
        1, min(programs // (tiles * -(-intermediate // plan.rows)), -(-hidden // 128) // 7, 8)
    )


def stage_bytes(plan: LinearPlan, kind: str, doubled: bool = False) -> int:
    """Shared memory of a stage: of a step the codes and scales of a tile, twice for gate and up,
    and the tokens."""
    of_row = {"int8": 128, "w8a16": 128 + 16}.get(kind, 64 + 8)
    of_token = 128 if kind == "int8" else 256
    return plan.rows * of_row * (2 if doubled else 1) + plan.tokens * of_token


def fitting(plan: LinearPlan, kind: str, name: str, doubled: bool = False) -> LinearPlan:
    """With as many of its stages as the card's shared memory holds."""
    room = shared_bytes(name)
    while plan.stages > 1 and stage_bytes(plan, kind, doubled) * plan.stages > room:
        plan = replace(plan, stages=plan.stages - 1)
    return plan


def dense_plan(name: str, n: int, k: int, rows: int) -> DenseRowsPlan | None:
    """The plan for W[n, k] of 16 bits and so many rows; None: the vendor's library, as where
    nothing was measured."""
    if rows > MOST_ROWS:
        return None
    if is_small_dense(name, n, k):
        return small_plan(n, k)
    return _nearest(_table(name).dense.get((n, k)), rows)


def is_small_dense(name: str, n: int, k: int) -> bool:
    """Whether W[n, k] of 16 bits goes by `multiply_small`: small, not measured, and on a card where
    a weight can be read while the kernel before ends."""
    return name in OVERLAPPED and (n, k) not in _table(name).dense and is_small(n, k)


def why_no_dense(name: str, shapes: tuple[tuple[int, int], ...]) -> str | None:
    """None where 16-bit weights of each of these shapes [N, K] are small or a plan was measured for
    them, or, without shapes, for some."""
    known = {shape for shape, plans in _table(name).dense.items() if any(plan for _, plan in plans)}
    missing = [shape for shape in shapes if shape not in known and not is_small_dense(name, *shape)]
    if missing or not (known or shapes):
        of = f"{missing[0][0]} x {missing[0][1]} of 16 bits" if missing else "16-bit weights"
        return (
            f"no plan of {of} was measured here to be faster than the vendor's library: "
            "quantkit kernels --tune --model MODEL"
        )
    return None


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


_Found = TypeVar("_Found", LinearPlan, ExpertsPlan, WgmmaPlan | None, DenseRowsPlan | None)


def _nearest(measured: list[tuple[int, _Found]] | None, tokens: int) -> _Found | None:
    """The plan measured for `tokens` or the next larger number; that of the largest where there is
    none."""
    if not measured:
        return None
    return next((plan for most, plan in measured if tokens <= most), measured[-1][1])


class Table(NamedTuple):
    """Plans by kind and sizes, each with the most tokens it is for: of linears (N, K), of experts
    (hidden, intermediate; pairs an expert times 256), of int8 linears on Hopper (N, K), None where
    a plan of `linear` is faster, of 16-bit weights (N, K), None where the vendor's library is."""

    linear: dict[tuple[str, int, int], list[tuple[int, LinearPlan]]]
    experts: dict[tuple[str, int, int], list[tuple[int, ExpertsPlan]]]
    wgmma: dict[tuple[int, int], list[tuple[int, WgmmaPlan | None]]]
    dense: dict[tuple[int, int], list[tuple[int, DenseRowsPlan | None]]]


class NoTable(ValueError):
    """A table of plans that cannot be read, or not written."""


@functools.cache
def _table(name: str) -> Table:
    table = Table({}, {}, {}, {})
    for path in (_shipped_table(name), own_table(name)):
        if os.path.exists(path):  # Path.exists raises below a folder that is closed
            try:
                found = _read(plans_in(path))
            except NoTable as fault:
                _log.warning(
                    "%s: plans of this machine do not count; delete it and measure again: quantkit "
                    "kernels --tune",
                    fault,
                )
                continue
            table.linear.update(found.linear)
            table.experts.update(found.experts)
            table.wgmma.update(found.wgmma)
            table.dense.update(found.dense)
    return table


def plans_in(path: Path) -> dict[str, list[list[Any]]]:
    """By section, the rows of a table on disk."""
    try:
        plans: dict[str, list[list[Any]]] = json.loads(path.read_text())["plans"]
        _read(plans)
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise NoTable(f"{path} is no table of plans ({type(fault).__name__}: {fault})") from fault
    return plans


def _read(plans: dict[str, Any]) -> Table:
    table = Table({}, {}, {}, {})
    for kind, n, k, most, fields in plans["linear"]:
        table.linear.setdefault((kind, n, k), []).append((most, LinearPlan(*fields)))
    for kind, hidden, intermediate, most, *both in plans["experts"]:
        table.experts.setdefault((kind, hidden, intermediate), []).append(
            (most, ExpertsPlan(*(LinearPlan(*fields) for fields in both)))
        )
    for n, k, most, fields in plans.get("wgmma", []):
        table.wgmma.setdefault((n, k), []).append((most, WgmmaPlan(*fields) if fields[0] else None))
    for n, k, most, fields in plans.get("dense", []):
        table.dense.setdefault((n, k), []).append(
            (most, DenseRowsPlan(*fields) if fields[0] else None)
        )
    return table


def _shipped_table(name: str) -> Path:
    return TABLES / f"{name}.json"


def own_table(name: str) -> Path:
    """What was measured on this machine on such a card, which counts for more than what came with
    the package."""
    card = re.sub(r"[^A-Za-z0-9]+", "-", card_name()).strip("-")
    return cache_directory() / f"triton-{'-'.join(filter(None, (name, card)))}.json"


def card_name() -> str:
    """Of the cards that this process computes on; empty without any."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def describe_plans(name: str) -> str:
    """Where the plans of products come from on a card of this architecture, in a line for who uses
    it."""
    shipped, own = _shipped_table(name), own_table(name)
    rest = f"a rule, for there is no table of {name}"
    if shipped.exists():
        rest = (
            f"the package's for all cards of {name}, measured on "
            f"{json.loads(shipped.read_text())['card']}"
        )
    if not os.path.exists(own):  # Path.exists raises below a folder that is closed
        return f"{rest}; --tune measures this card's"
    return f"of this card, in {own}; of weights that are not there {rest}"


@dataclass(frozen=True)
class DecodeCut:
    """How attention of a decode step is launched. tokens: taken at a time; warps; stages of copies
    in flight; least: times that a program takes tokens, at least, where several share a row."""

    tokens: int
    warps: int
    stages: int
    least: int = 2


@functools.cache
def decode_cut(device: torch.device, heads: int, width: int, latent: bool) -> DecodeCut:
    """For `heads` query heads of a program and keys of `width` numbers: as many tokens and stages
    as fit next to the queries."""
    room = shared_bytes(architecture(device)) - heads * width * 2
    for tokens, stages in ((64, 3), (64, 2), (32, 2), (16, 2), (16, 1)):
        if tokens * width * 2 * (1 if latent else 2) * stages <= room:
            break
    return DecodeCut(tokens, 8 if width > 256 else 4, stages)


@dataclass(frozen=True)
class PrefillCut:
    """How attention of prompts is launched: queries and keys of a block, warps, stages of copies in
    flight."""

    queries: int
    keys: int
    warps: int
    stages: int


@functools.cache
def prefill_cut(device: torch.device, width: int) -> PrefillCut:
    """For keys of `width` numbers: what was fastest on an H200, and smaller blocks where shared
    memory is."""
    room = shared_bytes(architecture(device))
    if room >= SHARED_BYTES["sm_90"]:
        return PrefillCut(128, 128 if width <= 128 else 64, 8, 3 if width <= 192 else 2)
    for cut in (PrefillCut(128, 64, 8, 2), PrefillCut(64, 64, 4, 2), PrefillCut(64, 32, 4, 2)):
        if (cut.queries + 2 * cut.keys * cut.stages) * width * 2 <= room:
            return replace(cut, warps=8) if width > 128 else cut
    return PrefillCut(32, 32, 4, 1)
