"""What a device of each role of an engine's layout holds, before anything is written."""

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.common.sizes import format_bytes
from quantkit.engines.layouts import find_recipe, find_topology
from quantkit.engines.memory import Fit, find_part_problem, find_split_problem, fit_rows
from quantkit.engines.profiles import Device
from quantkit.grids.base import Grid
from quantkit.grids.schemes import Scheme
from quantkit.models.architecture import ModelConfig
from quantkit.models.table import Parameter


@dataclass(frozen=True)
class PlannedLayout:
    """What a device of each role of an engine's layout holds.

    devices: number per role, on all machines; experts: per layer on one device, None for a model
    without; memory_gib: of one device. problems: by role, why it cannot be split this way. launch:
    the command that starts it once OUT is written.
    """

    engine: str
    name: str
    summary: str
    memory_gib: float
    devices: dict[str, int]
    experts: dict[str, int | None]
    memory: dict[str, Fit]
    problems: dict[str, str]
    launch: str = ""

    @property
    def fits(self) -> bool:
        return not self.problems and all(held.fits for held in self.memory.values())

    def facts(self) -> list[tuple[str, str]]:
        lines = [(f"  {self.engine}, {self.name}", self.summary)]
        for role, held in self.memory.items():
            experts = (
                "" if self.experts[role] is None else f", {self.experts[role]} experts a layer"
            )
            room = (
                f"{format_bytes(held.weight_bytes)} of weights each{experts}; "
                f"room for {held.tokens:,} tokens, {held.context:,} a request"
            )
            lines.append(
                (f"  {role}, {self.devices[role]} devices of {self.memory_gib:g} GiB", room)
            )
            if role in self.problems:
                lines.append((f"  {role} cannot be split this way", self.problems[role]))
        return [*lines, *([("  to start it", self.launch)] if self.fits else [])]


def plan_layout(
    engine: str,
    name: str,
    stored: list[tuple[Parameter, int]],
    config: ModelConfig,
    scheme: Scheme,
    context: int,
    redundant: int = 0,
    *,
    devices: int | None = None,
    memory_gib: float | None = None,
    device: Device | None = None,
    grid: Callable[[str], Grid | None] = lambda module: None,
    input_rotation: Callable[[str], int] = lambda module: 0,
) -> PlannedLayout:
    """Fit of an engine's layout for parameters that are not written yet, each given with its stored
    bytes; `deploy` does the same for an existing checkpoint.

    context: tokens of the longest request. redundant: copies of busy experts per layer, in addition
    to the layout's own. devices, memory_gib, device: number per machine, memory and kind,
    overriding the layout's. grid, input_rotation: of a module, as of `find_split_problem`. Raises
    QuantkitError for an unknown engine or layout, or one that does not divide evenly over such
    machines.
    """
    recipe, topology = (
        find_recipe(engine, device),
        find_topology(engine, name=name, device=device, devices=devices),
    )
    memory_gib = memory_gib or recipe.memory_gib
    roles = tuple(
        role.model_copy(update={"redundant_experts": role.redundant_experts + redundant})
        for role in topology.roles
    )
    topology = topology.model_copy(update={"roles": roles})
    rows = [row for row, _ in stored]
    experts = len({row.expert for row in rows if row.expert is not None})
    memory_args = memory_gib, recipe.memory_fraction, recipe.reserve_gib
    memory = {
        role.name: fit_rows(
            stored,
            config,
            role.parallel,
            context,
            *memory_args,
            topology.cache_bits(role, config.cache, scheme.cache),
        )
        for role in roles
    }
    found = {
        role.name: find_part_problem(config, role.parallel)
        or find_split_problem(rows, grid, input_rotation, role.parallel)
        for role in roles
    }
    return PlannedLayout(
        engine,
        topology.name,
        topology.summary,
        memory_gib,
        {role.name: role.parallel.world for role in roles},
        {
            role.name: role.parallel.local_experts(experts)
            if experts and role.expert_parallel
            else None
            for role in roles
        },
        memory,
        {
            role: f"{problem.problem}; {problem.remedy}"
            for role, problem in found.items()
            if problem is not None
        },
    )
