"""A layout's commands on each machine, filled in, and the script that runs them."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from string import Template

from quantkit.common.bind import host_in_url
from quantkit.engines.layouts import Command, LaunchRecipe, Role, Topology

API_KEY = "QUANTKIT_API_KEY"
"""Variable that scripts take the servers' API key from: a secret is not printed."""
BOX = "QUANTKIT_BOX_"
"""Begins the variables that hold the addresses of machines where a scheduler chooses them."""


@dataclass(frozen=True)
class Launch:
    """Commands for one machine, each with its environment, in order; the last ones run, and end,
    together.

    key: option or variable for the API key, if a command serves; see `LaunchRecipe`. host: on
    which it then listens. package: that has its program, if that is not the engine's.
    """

    role: str
    box: str
    commands: tuple[tuple[dict[str, str], Command], ...]
    key: str | None
    listens: str
    host: str
    package: str = ""

    @property
    def port(self) -> int | None:
        """Of the API, the first one's if several commands serve; None if none does."""
        serving = (" ".join(words) for _, words in self.commands if self.listens in words)
        found = re.search(r"(?:--port |--base-api-port |, port=)(\d+)", next(serving, ""))
        return int(found[1]) if found else None

    def without_options(self, options: dict[str, int]) -> "Launch":
        """Without these options and their values, also inside words that hold another program's
        options."""
        commands = tuple(
            (environment, _drop_options(command, options)) for environment, command in self.commands
        )
        return replace(self, commands=commands)

    def script(self) -> str:
        """A shell script that refuses to start servers without a key in QUANTKIT_API_KEY."""
        return f"#!/bin/bash\n# {self.role} on {self.box}\n{self.body()}"

    def body(self) -> str:
        """The script's commands."""
        lines = ["set -e"]
        if self.key is not None:
            lines.append(f': "${{{API_KEY}:?set it to the key that clients must send}}"')
            if not self.key.startswith("-"):
                lines.append(f'export {self.key}="${API_KEY}"')
        shared = dict(
            set.intersection(*(set(environment.items()) for environment, _ in self.commands))
        )
        lines += [f"export {key}={quoted(value)}" for key, value in sorted(shared.items())]
        for environment, command in self.commands:
            variables = " ".join(
                f"{key}={quoted(value)}"
                for key, value in sorted(environment.items())
                if key not in shared
            )
            ray_head = command[:2] == ("ray", "start") and "--block" not in command
            key_option = (
                f' {self.key} "${API_KEY}"'
                if self.key and self.key.startswith("-") and self.listens in command
                else ""
            )
            lines.append(
                f"{variables} {' '.join(map(quoted, command))}{key_option}".strip()
                + ("" if ray_head or len(self.commands) == 1 else " &")
            )
        if any(line.endswith(" &") for line in lines):
            lines += [
                "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
                "wait -n",
            ]  # the others would wait forever for the one that ended
        return "\n".join(lines) + "\n"


def quoted(word: str) -> str:
    """A word as bash reads it, with the variables of addresses expanded."""
    parts = re.split(rf"({BOX}\d+)", word)
    return (
        "".join(
            f'"${part}"' if part.startswith(BOX) else shlex.quote(part) for part in parts if part
        )
        or "''"
    )


def launches(
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
                "listen": substitute(common["listen"], {"ip": host}),
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
                key: substitute(value, values)
                for key, value in {**recipe.environment, **role.environment}.items()
            }
            commands += [
                (environment, _command(template, options, values)) for template in templates
            ]
        serves = any(recipe.listens in command for _, command in commands)
        key, listen = recipe.key if serves else None, substitute(common["listen"], {"ip": host})
        yield Launch(role.name, host, tuple(commands), key, recipe.listens, listen)


def _command(template: Command, options: Command, values: dict[str, str]) -> Command:
    words: list[str] = []
    for word in template:
        words += options if word == "$options" else (word,)
    return tuple(substitute(word, values) for word in words)


def router_launch(topology: Topology, host: str, common: dict[str, str]) -> Launch:
    values = common | {"listen": substitute(common["listen"], {"ip": host})}
    command = tuple(substitute(word, values) for word in topology.router)
    # The key that vllm-router sends to its servers, and the servers ask for.
    return Launch(
        "router",
        host,
        (({}, command),),
        "OPENAI_API_KEY",
        command[0],
        values["listen"],
        topology.router_package,
    )


def _drop_options(command: Command, options: dict[str, int]) -> Command:
    words: list[str] = []
    left = 0
    for word in command:
        left = options[word] + 1 if word in options else left
        if left:
            left -= 1
        else:
            words.append(" ".join(part for part in word.split(" ") if part not in options))
    return tuple(words)


def substitute(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)
