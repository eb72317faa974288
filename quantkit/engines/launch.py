"""The exact launch of a model on one box or many, and whether it fits: recipes/deploy/*.yaml filled in.

A recipe has layouts (one box, two boxes, prefill apart from decode); a layout has roles; a role is the same commands on each of
its boxes, with addresses and ranks that differ. World of a role: data_parallel groups of tensor_parallel x pipeline_parallel devices.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from pydantic import Field, model_validator

from quantkit.assets import asset
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import LoadProblem, check_checkpoint, find_load
from quantkit.engines.evidence import evidence
from quantkit.engines.memory import Fit, ParallelSizes, check_split, fit
from quantkit.engines.profiles import Device, find_engine
from quantkit.errors import QuantkitError
from quantkit.settings_file import Strict, read_yaml

Command = tuple[str, ...]

API_KEY = "QUANTKIT_API_KEY"
"""The variable that a script takes the servers' key from: a secret is not printed."""


class Role(Strict):
    """Boxes that run the same commands. `rest`: those of boxes after the first, where they differ.

    `per_rank`: once for each data-parallel group of the box, each with its own port, rank and devices.
    """

    name: str
    boxes: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool
    redundant_experts: int = 0
    per_rank: bool = False
    environment: dict[str, str] = Field({})
    first: tuple[Command, ...]
    rest: tuple[Command, ...] | None = None

    @property
    def parallel(self) -> ParallelSizes:
        return ParallelSizes(self.tensor_parallel, self.pipeline_parallel, self.data_parallel, self.expert_parallel, self.redundant_experts)


class PublishedRate(Strict):
    """Tokens a second that somebody published of one device of a role: of a batch over all its devices, or within limit_ms a token.

    context: tokens that each sequence attends to, as the publication has them or as is assumed; of: what was run, and whose figure it is.
    """

    role: str
    tokens_per_second: float
    batch: int | None = None
    limit_ms: float | None = None
    context: int
    of: str


class Topology(Strict):
    """hardware: of recipes/hardware, by which decoding is predicted. run_on: where its commands were run; None where nowhere."""

    name: str
    summary: str
    devices_per_box: int = 8
    roles: tuple[Role, ...]
    notes: str = ""
    hardware: str | None = None
    published: tuple[PublishedRate, ...] = ()
    run_on: str | None = None

    @property
    def boxes(self) -> int:
        return sum(role.boxes for role in self.roles)

    @model_validator(mode="after")
    def _uses_every_device(self) -> "Topology":
        for role in self.roles:
            devices = role.boxes * self.devices_per_box
            if role.parallel.world != devices:
                raise ValueError(f"{self.name} {role.name}: {role.parallel.world} ranks on {devices} devices")
        return self


class LaunchRecipe(Strict):
    """Of one engine on one kind of device. memory_gib: of one device; memory_fraction: what the engine may use of it;
    reserve_gib: activations, graphs and communication buffers, an estimate. key: how the engine is given the key that its clients must
    send, an option of its command or a variable of its environment. listens: the option by which a command is known to serve."""

    engine: str
    device: Device
    release: str
    memory_gib: float
    memory_fraction: float
    reserve_gib: float
    environment: dict[str, str]
    options: Command
    key: str
    listens: str = "--host"
    sources: tuple[str, ...]
    notes: str = ""
    layouts: tuple[Topology, ...]


@dataclass(frozen=True)
class Launch:
    """What to run on one box: `commands` in order, each with the environment it needs; the last ones stay running together.

    key: the option or variable that gives a command its API key, where one of them serves; see `LaunchRecipe`.
    """

    role: str
    box: str
    commands: tuple[tuple[dict[str, str], Command], ...]
    key: str | None
    listens: str

    def script(self) -> str:
        """As a shell script, which refuses to start servers without a key in QUANTKIT_API_KEY."""
        lines = ["#!/bin/bash", f"# {self.role} on {self.box}", "set -e"]
        if self.key is not None:
            lines.append(f': "${{{API_KEY}:?set it to the key that clients must send}}"')
            if not self.key.startswith("-"):
                lines.append(f'export {self.key}="${API_KEY}"')
        shared = dict(set.intersection(*(set(environment.items()) for environment, _ in self.commands)))
        lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(shared.items())]
        for environment, command in self.commands:
            own = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(environment.items()) if key not in shared)
            ray_head = command[:2] == ("ray", "start") and "--block" not in command
            asks = f' {self.key} "${API_KEY}"' if self.key and self.key.startswith("-") and self.listens in command else ""
            lines.append(f"{own} {shlex.join(command)}{asks}".strip() + ("" if ray_head or len(self.commands) == 1 else " &"))
        return "\n".join([*lines, "wait"]) + "\n"


@dataclass(frozen=True)
class Deployment:
    """A layout filled in for one checkpoint. `ready`: no error, and every role fits.

    evidence: how the commands, and that the engine loads this format, are known.
    """

    model: str
    engine: str
    device: str
    layout: str
    summary: str
    notes: tuple[str, ...]
    launches: tuple[Launch, ...]
    memory: dict[str, Fit]
    problems: tuple[LoadProblem, ...]
    evidence: dict[str, str]

    @property
    def ready(self) -> bool:
        return all(role.fits for role in self.memory.values()) and not any(found.severity == "error" for found in self.problems)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ready": self.ready}


def deploy(
    path: Path,
    engine: str,
    *,
    boxes: int = 1,
    devices: int | None = None,
    layout: str | None = None,
    device: Device | None = None,
    context: int = 16384,
    hosts: Sequence[str] | None = None,
    nic: str = "eth0",
    memory_gib: float | None = None,
) -> Deployment:
    """Commands for every box, and the memory of every role.

    devices: of a box, where they are not those of the layout.
    layout: by name, such as "disaggregated-a2"; else the one of `boxes` boxes that runs prefill and decode together.
    context: tokens of the longest request. hosts: addresses of the boxes, in order of the roles, where their servers listen; one box whose
    address is not given listens on loopback, and its engine finds its own interface. nic: the boxes' network interface.
    memory_gib: of one device, where it is not the recipe's. Raises QuantkitError for an engine, layout or number of hosts there is not.
    """
    recipe = _recipe(engine, device)
    chosen = find_topology(engine, boxes, layout, device, devices)
    listen = "$ip" if hosts is not None or chosen.boxes > 1 else "127.0.0.1"
    if hosts is None and chosen.boxes == 1:
        recipe = _without_network(recipe)
    hosts = list(hosts) if hosts is not None else [f"box{number}" for number in range(chosen.boxes)]
    if len(hosts) != chosen.boxes:
        raise QuantkitError(f"{chosen.name} takes {chosen.boxes} boxes and {len(hosts)} hosts were given", "give one address a box")
    checkpoint = Checkpoint.open(path)
    problems = check_checkpoint(engine, checkpoint, device=recipe.device)
    load = find_load(engine, checkpoint, recipe.device)
    common = {"model": str(path), "name": path.name, "context": str(context), "nic": nic, "first_host": hosts[0], "listen": listen}
    options = (*recipe.options, *(load.launch if load else ()))
    launches: list[Launch] = []
    memory: dict[str, Fit] = {}
    started = 0
    for role in chosen.roles:
        used = hosts[started : started + role.boxes]
        launches += _launches(recipe, chosen, role, used, options, common)
        memory[role.name] = fit(
            checkpoint, role.parallel, context, memory_gib or recipe.memory_gib, recipe.memory_fraction, recipe.reserve_gib
        )
        problems += check_split(checkpoint, role.parallel)
        started += role.boxes
    notes = tuple(note for note in (recipe.notes, chosen.notes, load.notes if load else "", _ABOUT_KEYS) if note)
    known = {
        "commands": f"run on {chosen.run_on}" if chosen.run_on else "by source",
        "format": evidence(find_engine(engine), load) if load else "not loaded",
    }
    return Deployment(
        str(path), engine, recipe.device, chosen.name, chosen.summary, notes, tuple(launches), memory, tuple(dict.fromkeys(problems)), known
    )


_ABOUT_KEYS = (
    f"The scripts take the key that clients, and a proxy in front, must send from {API_KEY}. It guards the API alone: the ports on which "
    "boxes and ranks meet have none, so keep those in a network of their own."
)


def layout_names(engine: str, device: Device | None = None) -> tuple[str, ...]:
    return tuple(layout.name for layout in _recipe(engine, device).layouts)


@cache
def _recipes() -> tuple[LaunchRecipe, ...]:
    paths = sorted(asset("recipes", "deploy").glob("*.yaml"))
    return tuple(read_yaml(path, LaunchRecipe, "restore that file") for path in paths)


def _recipe(engine: str, device: Device | None) -> LaunchRecipe:
    find_engine(engine)
    found = [recipe for recipe in _recipes() if recipe.engine == engine and device in (None, recipe.device)]
    if not found:
        there = ", ".join(f"{recipe.engine} on {recipe.device}" for recipe in _recipes())
        raise QuantkitError(f"there is no deployment recipe for {engine}{f' on {device}' if device else ''}", f"there are {there}")
    # Where an engine runs on both, the box is Ascend unless asked otherwise: that is who this is for.
    return min(found, key=lambda recipe: recipe.device != "npu")


def find_topology(engine: str, boxes: int, name: str | None = None, device: Device | None = None, devices: int | None = None) -> Topology:
    """By name, or else the one of `boxes` boxes that runs prefill and decode together; on machines of `devices` where given.

    Raises QuantkitError listing the layouts there are, or where ranks of a layout do not come out even on such machines.
    """
    recipe = _recipe(engine, device)
    for layout in recipe.layouts:
        if layout.name == name or (name is None and layout.boxes == boxes and len(layout.roles) == 1):
            return layout if devices is None else _on_devices(layout, devices)
    there = ", ".join(f"{layout.name} ({layout.boxes})" for layout in recipe.layouts)
    raise QuantkitError(f"{recipe.engine} has no layout {name or f'of {boxes} boxes'}", f"its layouts (and boxes) are {there}")


def _on_devices(layout: Topology, devices: int) -> Topology:
    """A layout on machines of another number of devices. Tensor parallel in a machine stays so; data-parallel groups become more or fewer.

    Raises QuantkitError where the ranks of a role do not come out even.
    """
    if devices == layout.devices_per_box:
        return layout
    roles = tuple(_role_on(role, layout, devices) for role in layout.roles)
    summary = layout.summary
    if layout.boxes == 1 and roles[0].data_parallel == 1:
        summary = f"One box, tensor parallel over {devices}." if devices > 1 else "One device."
    return layout.model_copy(update={"devices_per_box": devices, "roles": roles, "summary": summary})


def _role_on(role: Role, layout: Topology, devices: int) -> Role:
    boxes_of_group, part = divmod(role.tensor_parallel, layout.devices_per_box)
    tensor = role.tensor_parallel if part else boxes_of_group * devices
    group = tensor * role.pipeline_parallel
    groups, left = divmod(role.boxes * devices, group)
    if left or groups == 0 or (part and devices % tensor):
        raise QuantkitError(
            f"{layout.name} is laid out for machines of {layout.devices_per_box} devices, and {role.name} takes groups of {group}",
            f"give --devices {layout.devices_per_box}, or another --layout",
        )
    return role.model_copy(update={"tensor_parallel": tensor, "data_parallel": groups})


def _without_network(recipe: LaunchRecipe) -> LaunchRecipe:
    kept = {key: value for key, value in recipe.environment.items() if value not in ("$ip", "$nic")}
    return recipe.model_copy(update={"environment": kept})


def _launches(
    recipe: LaunchRecipe, layout: Topology, role: Role, hosts: Sequence[str], options: Command, common: dict[str, str]
) -> Iterator[Launch]:
    group = role.tensor_parallel * role.pipeline_parallel
    local = max(role.data_parallel // role.boxes, 1)
    for box, host in enumerate(hosts):
        templates = role.first if box == 0 or role.rest is None else role.rest
        commands: list[tuple[dict[str, str], Command]] = []
        for rank in range(local if role.per_rank else 1):
            devices = range(rank * group, (rank + 1) * group) if role.per_rank else range(layout.devices_per_box)
            values = {
                **common,
                "listen": _fill(common["listen"], {"ip": host}),
                "ip": host,
                "head": hosts[0],
                "hosts": ",".join(hosts),
                "box": str(box),
                "tp": str(role.tensor_parallel),
                "pp": str(role.pipeline_parallel),
                "dp": str(role.data_parallel),
                "world": str(role.parallel.world),
                "dp_local": str(local),
                "dp_rank": str(box * local + rank),
                "port": str(7100 + rank),
                "devices": ",".join(map(str, devices)),
            }
            environment = {key: _fill(value, values) for key, value in {**recipe.environment, **role.environment}.items()}
            commands += [(environment, _command(template, options, values)) for template in templates]
        serves = any(recipe.listens in command for _, command in commands)
        yield Launch(role.name, host, tuple(commands), recipe.key if serves else None, recipe.listens)


def _command(template: Command, options: Command, values: dict[str, str]) -> Command:
    words: list[str] = []
    for word in template:
        words += options if word == "$options" else (word,)
    return tuple(_fill(word, values) for word in words)


def _fill(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)
