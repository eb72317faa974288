"""The exact launch of a model on one box or many, and whether it fits: a layout of
recipes/deploy/*.yaml filled in."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from string import Template
from typing import Any

from quantkit.checkpoint.aux_files import has_tokenizer
from quantkit.checkpoint.hub import model_basename
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.bind import host_in_url
from quantkit.common.errors import QuantkitError
from quantkit.engines.check import LoadProblem, check_checkpoint, find_load
from quantkit.engines.evidence import evidence, layout_evidence
from quantkit.engines.layouts import (
    Command,
    LaunchRecipe,
    Role,
    Topology,
    find_recipe,
    find_topology,
)
from quantkit.engines.memory import Fit, check_split, fit
from quantkit.engines.profiles import Device, find_engine
from quantkit.models.architecture import longest_text
from quantkit.models.stored_parameters import read_model

CONTEXT = 16384
"""Tokens of the longest request where nothing is said."""
API_KEY = "QUANTKIT_API_KEY"
"""The variable that a script takes the servers' key from: a secret is not printed."""
_NIC = re.compile(r"[=^]?[^/\s,\x00-\x1f\x7f]+(,[^/\s,\x00-\x1f\x7f]+)*")
"""One interface, by a name that Linux takes, or what NCCL takes for several: prefixes, names behind
"=", all but those behind "^"."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Launch:
    """What to run on one box: `commands` in order, each with the environment it needs; the last
    ones run together, and end together.

    key: the option or variable that gives a command its API key, where one of them serves; see
    `LaunchRecipe`.
    """

    role: str
    box: str
    commands: tuple[tuple[dict[str, str], Command], ...]
    key: str | None
    listens: str

    def without(self, options: dict[str, int]) -> "Launch":
        """Without these options, and the values that each has, in words that are options of another
        program too."""
        commands = tuple(
            (environment, _without(command, options)) for environment, command in self.commands
        )
        return replace(self, commands=commands)

    def script(self) -> str:
        """As a shell script, which refuses to start servers without a key in QUANTKIT_API_KEY."""
        lines = ["#!/bin/bash", f"# {self.role} on {self.box}", "set -e"]
        if self.key is not None:
            lines.append(f': "${{{API_KEY}:?set it to the key that clients must send}}"')
            if not self.key.startswith("-"):
                lines.append(f'export {self.key}="${API_KEY}"')
        shared = dict(
            set.intersection(*(set(environment.items()) for environment, _ in self.commands))
        )
        lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(shared.items())]
        for environment, command in self.commands:
            own = " ".join(
                f"{key}={shlex.quote(value)}"
                for key, value in sorted(environment.items())
                if key not in shared
            )
            ray_head = command[:2] == ("ray", "start") and "--block" not in command
            asks = (
                f' {self.key} "${API_KEY}"'
                if self.key and self.key.startswith("-") and self.listens in command
                else ""
            )
            lines.append(
                f"{own} {shlex.join(command)}{asks}".strip()
                + ("" if ray_head or len(self.commands) == 1 else " &")
            )
        if any(line.endswith(" &") for line in lines):
            lines += [
                "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
                "wait -n",
            ]  # what is left waits for the one that ended, for ever
        return "\n".join(lines) + "\n"


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
        return all(role.fits for role in self.memory.values()) and self.refusal is None

    @property
    def refusal(self) -> QuantkitError | None:
        """Why the engine cannot load the checkpoint as the layout splits it, in one error; None
        where it can."""
        errors = [found for found in self.problems if found.severity == "error"]
        if not errors:
            return None
        *others, last = errors
        told = "; ".join([*(f"{found.problem} ({found.remedy})" for found in others), last.problem])
        return QuantkitError(f"{self.engine} cannot serve {self.model}: {told}", last.remedy)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ready": self.ready}


def deploy(
    model: Path | Checkpoint,
    engine: str,
    *,
    boxes: int | None = None,
    devices: int | None = None,
    layout: str | None = None,
    device: Device | None = None,
    context: int | None = None,
    hosts: Sequence[str] | None = None,
    nic: str = "eth0",
    memory_gib: float | None = None,
    guesses: int = 0,
    name: str | None = None,
) -> Deployment:
    """Commands for every box, and the memory of every role.

    model: a directory, or a checkpoint; of a hub model its headers (`open_headers`) are enough, for
    the engine downloads it.
    boxes, devices: machines, and devices of each, where they are not those of the layout.
    layout: by name, such as "disaggregated-a2"; else the one of `boxes` boxes that runs prefill and
    decode together.
    context: tokens of the longest request; without, CONTEXT, or what the model takes where that is
    less.
    hosts: addresses of the boxes, in order of the roles, where their servers listen; one box whose
    address is not given listens on loopback, and its engine finds its own interface. nic: the
    boxes' network interface.
    memory_gib: of one device, where it is not the recipe's. guesses: tokens that the MTP layer
    guesses a step.
    name: what clients call the model, where it is not the directory's name.
    Raises QuantkitError for an engine, layout or number of hosts there is not.
    """
    recipe = find_recipe(engine, device)
    chosen = find_topology(engine, boxes, layout, device, devices)
    listen = "$ip" if hosts is not None or chosen.boxes > 1 else "127.0.0.1"
    if hosts is None and chosen.boxes == 1:
        recipe = _without_network(recipe)
    hosts = list(hosts) if hosts is not None else [f"box{number}" for number in range(chosen.boxes)]
    _check_hosts(hosts, chosen)
    if not _NIC.fullmatch(nic):
        raise QuantkitError(
            f"{nic!r} is no network interface", "give one that ip link lists, such as eth0"
        )
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    path = checkpoint.path
    problems = check_checkpoint(engine, checkpoint, device=recipe.device)
    if checkpoint.has_weights and not has_tokenizer(path):
        problems.append(
            LoadProblem(
                "warning",
                f"{path} has no tokenizer, which {engine} reads there",
                "copy it from the model's source",
            )
        )
    longest = longest_text(read_model(checkpoint).config)
    context = context or min(CONTEXT, longest or CONTEXT)
    if longest and context > longest:
        problems.append(
            LoadProblem(
                "error",
                f"the model takes texts of {longest} tokens, fewer than {context}",
                f"give --context {longest}",
            )
        )
    load = find_load(engine, checkpoint, recipe.device)
    common = {
        "model": str(path),
        "name": name or model_basename(str(path)),
        "context": str(context),
        "nic": nic,
        "first_host_in_url": host_in_url(hosts[0]),
        "listen": listen,
        "guesses": str(guesses),
        "drafted": str(guesses + 1),
        "per_box": str(chosen.devices_per_box),
        **{f"{role.name}_dp": str(role.data_parallel) for role in chosen.roles},
        **{f"{role.name}_tp": str(role.tensor_parallel) for role in chosen.roles},
    }
    options = (
        *recipe.options,
        *(load.launch if load else ()),
        *_speculation(recipe, checkpoint, guesses),
    )
    left_out = (
        {}
        if any(row.expert is not None for row in read_model(checkpoint).rows)
        else recipe.of_experts
    )
    launches: list[Launch] = []
    memory: dict[str, Fit] = {}
    started = 0
    for role in chosen.roles:
        used = hosts[started : started + role.boxes]
        launches += [
            launch.without(left_out)
            for launch in _launches(recipe, chosen, role, used, options, common)
        ]
        bits = chosen.cache_bits(
            role,
            read_model(checkpoint).config.cache,
            checkpoint.format.cache_codes(checkpoint.side),
        )
        memory[role.name] = fit(
            checkpoint,
            role.parallel,
            context,
            memory_gib or recipe.memory_gib,
            recipe.memory_fraction,
            recipe.reserve_gib,
            bits,
            mtp=guesses > 0,
        )
        problems += check_split(checkpoint, role.parallel)
        started += role.boxes
    notes = tuple(
        note
        for note in (
            recipe.notes,
            _fill(chosen.notes, common),
            load.notes if load else "",
            _ABOUT_KEYS,
        )
        if note
    )
    known = {
        "commands": layout_evidence(engine, recipe.device, chosen.name, guesses),
        "format": evidence(find_engine(engine), load) if load else "not loaded",
    }
    return Deployment(
        str(path),
        engine,
        recipe.device,
        chosen.name,
        chosen.summary,
        notes,
        tuple(launches),
        memory,
        tuple(dict.fromkeys(problems)),
        known,
    )


def _check_hosts(hosts: Sequence[str], chosen: Topology) -> None:
    if len(hosts) != chosen.boxes:
        raise QuantkitError(
            f"{chosen.name} takes {chosen.boxes} boxes and {len(hosts)} hosts were given",
            "give one address a box",
        )
    for number, host in enumerate(hosts):
        if not _is_host(host):
            raise QuantkitError(
                f"{host!r} is no address of a box",
                "give a name or an IP address, without http:// and without a port",
            )
        if chosen.boxes > 1 and host in ("0.0.0.0", "::"):
            raise QuantkitError(
                f"{host} is no address at which other boxes find one",
                "give the address that the box has in their network",
            )
        if host in hosts[:number]:
            raise QuantkitError(
                f"{host} is given for two boxes", "give each box an address of its own"
            )


def _is_host(text: str) -> bool:
    """An IP address, or a name: nothing that a command would take for an option."""
    if ":" not in text and text.strip("0123456789."):
        return _NAME.fullmatch(text) is not None
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


_ABOUT_KEYS = (
    f"The scripts take the key that clients, and a proxy in front, must send from {API_KEY}. It "
    "guards the API alone: the ports on which "
    "boxes and ranks meet have none, so keep those in a network of their own."
)


def _speculation(recipe: LaunchRecipe, checkpoint: Checkpoint, guesses: int) -> Command:
    if not guesses:
        return ()
    if not recipe.speculation:
        raise QuantkitError(
            f"the recipe of {recipe.engine} has no options for guesses of an MTP layer",
            "leave out --mtp",
        )
    if not any(row.mtp for row in read_model(checkpoint).rows):
        raise QuantkitError(
            f"{checkpoint.path} has no MTP layer to guess tokens with", "leave out --mtp"
        )
    return recipe.speculation


def _without_network(recipe: LaunchRecipe) -> LaunchRecipe:
    kept = {key: value for key, value in recipe.environment.items() if value not in ("$ip", "$nic")}
    return recipe.model_copy(update={"environment": kept})


def _launches(
    recipe: LaunchRecipe,
    layout: Topology,
    role: Role,
    hosts: Sequence[str],
    options: Command,
    common: dict[str, str],
) -> Iterator[Launch]:
    group = role.tensor_parallel * role.pipeline_parallel
    local = max(role.data_parallel // role.boxes, 1)
    for box, host in enumerate(hosts):
        templates = role.first if box == 0 or role.rest is None else role.rest
        commands: list[tuple[dict[str, str], Command]] = []
        for rank in range(local if role.per_rank else 1):
            devices = (
                range(rank * group, (rank + 1) * group)
                if role.per_rank
                else range(layout.devices_per_box)
            )
            values = {
                **common,
                "listen": _fill(common["listen"], {"ip": host}),
                "ip": host,
                "head": hosts[0],
                "head_in_url": host_in_url(hosts[0]),
                "hosts": ",".join(hosts),
                "box": str(box),
                "boxes": str(role.boxes),
                "tp": str(role.tensor_parallel),
                "pp": str(role.pipeline_parallel),
                "dp": str(role.data_parallel),
                "world": str(role.parallel.world),
                "dp_local": str(local),
                "dp_rank": str(box * local + rank),
                "port": str(7100 + rank),
                "devices": ",".join(map(str, devices)),
            }
            environment = {
                key: _fill(value, values)
                for key, value in {**recipe.environment, **role.environment}.items()
            }
            commands += [
                (environment, _command(template, options, values)) for template in templates
            ]
        serves = any(recipe.listens in command for _, command in commands)
        yield Launch(
            role.name, host, tuple(commands), recipe.key if serves else None, recipe.listens
        )


def _command(template: Command, options: Command, values: dict[str, str]) -> Command:
    words: list[str] = []
    for word in template:
        words += options if word == "$options" else (word,)
    return tuple(_fill(word, values) for word in words)


def _without(command: Command, options: dict[str, int]) -> Command:
    words: list[str] = []
    left = 0
    for word in command:
        left = options[word] + 1 if word in options else left
        if left:
            left -= 1
        else:
            words.append(" ".join(part for part in word.split(" ") if part not in options))
    return tuple(words)


def _fill(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)
