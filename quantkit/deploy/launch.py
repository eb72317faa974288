"""Launch commands of a model on one or more machines, and whether it fits: a layout of
recipes/deploy/*.yaml filled in."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Any

from quantkit.checkpoint.aux_files import has_tokenizer
from quantkit.checkpoint.hub import model_basename
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.bind import host_in_url
from quantkit.common.errors import QuantkitError
from quantkit.deploy.script import API_KEY, BOX, Launch, launches, router_launch, substitute
from quantkit.engines.check import check_checkpoint, check_shapes, find_load
from quantkit.engines.layouts import (
    Command,
    LaunchRecipe,
    Role,
    Topology,
    evidence,
    find_recipe,
    find_topology,
    layout_evidence,
    resize_boxes,
    resize_devices,
)
from quantkit.engines.memory import Fit, check_split, fit_rows, stored_rows
from quantkit.engines.profiles import Device, LoadProblem, find_engine
from quantkit.models.architecture import longest_text
from quantkit.models.mtp import DSPARK
from quantkit.models.stored_parameters import Model, read_model
from quantkit.models.table import Parameter

CONTEXT = 16384
"""Default tokens of the longest request."""
_NIC = re.compile(r"[=^]?[^/\s,\x00-\x1f\x7f]+(,[^/\s,\x00-\x1f\x7f]+)*")
"""A network interface, or NCCL's syntax for several: prefixes, exact names after "=", exclusions
after "^"."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Deployment:
    """A layout filled in for one checkpoint. `ready`: no error among its problems.

    name: that clients use. image: with the engine, for containers; empty: none is published.
    evidence: how the commands, and that the engine loads this format, were verified.
    """

    model: str
    name: str
    engine: str
    image: str
    device: Device
    layout: str
    devices_per_box: int
    summary: str
    notes: tuple[str, ...]
    launches: tuple[Launch, ...]
    memory: dict[str, Fit]
    problems: tuple[LoadProblem, ...]
    evidence: dict[str, str]

    @property
    def ready(self) -> bool:
        return all(problem.severity != "error" for problem in self.problems)

    @property
    def refusal(self) -> QuantkitError | None:
        """Why the engine cannot load the checkpoint in this layout, as one error; None if it
        can."""
        errors = [found for found in self.problems if found.severity == "error"]
        if not errors:
            return None
        *others, last = errors
        reasons = "; ".join(
            [*(f"{found.problem} ({found.remedy})" for found in others), last.problem]
        )
        return QuantkitError(f"{self.engine} cannot serve {self.model}: {reasons}", last.remedy)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ready": self.ready}


@dataclass(frozen=True)
class Network:
    """Where the machines are. hosts: their addresses in order of the roles, on which their servers
    listen; by default a single machine listens on loopback, and its engine finds its own interface.
    nic: their network interface. scheduled: a scheduler chooses the machines, whose addresses are
    then in variables (BOX).

    Raises QuantkitError for what is not an interface.
    """

    hosts: Sequence[str] | None = None
    nic: str = "eth0"
    scheduled: bool = False

    def __post_init__(self) -> None:
        if not _NIC.fullmatch(self.nic):
            raise QuantkitError(
                f"{self.nic!r} is not a network interface",
                "give one that ip link lists, such as eth0",
            )


def deploy(
    model: Path | Checkpoint,
    engine: str,
    *,
    boxes: int | None = None,
    devices: int | None = None,
    layout: str | None = None,
    device: Device | None = None,
    context: int | None = None,
    network: Network = Network(),
    memory_gib: float | None = None,
    draft_length: int = 0,
    name: str | None = None,
) -> Deployment:
    """Commands for every machine, and the memory of every role.

    model: a directory, or a checkpoint; of a Hub model, which the engine downloads, headers
    (`open_headers`) suffice. boxes, devices: machines and devices of each; by default one machine,
    with the fewest devices that the model divides into and fits in. layout: by name, such as
    "disaggregated-a2"; by default the one of `boxes` machines that runs prefill and decode
    together. context: tokens of the longest request, by default CONTEXT or the model's maximum.
    memory_gib: of one device, overriding the recipe's. draft_length: draft tokens per step of the
    MTP layer. name: that clients use for the model, by default the directory's.

    Raises QuantkitError for an unknown engine or layout, or a wrong number of hosts.
    """
    recipe = find_recipe(engine, device)
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    problems = [
        problem
        for problem in check_checkpoint(engine, checkpoint, device=recipe.device)
        if not problem.launch  # `fill` gives each role these options
    ]
    if checkpoint.has_weights and not has_tokenizer(checkpoint.path):
        problems.append(
            LoadProblem(
                "warning",
                f"{checkpoint.path} has no tokenizer, which {engine} reads there",
                "copy it from the model's source",
            )
        )
    stored = read_model(checkpoint)
    max_length = longest_text(stored.config)
    if max_length and context and context > max_length:
        problems.append(
            LoadProblem(
                "error",
                f"the model accepts texts of {max_length} tokens, fewer than {context}",
                f"give --context {max_length}",
            )
        )
    inputs = _Inputs(
        checkpoint,
        stored,
        stored_rows(checkpoint, stored.rows),
        recipe,
        tuple(problems),
        context or min(CONTEXT, max_length or CONTEXT),
        network,
        memory_gib or recipe.memory_gib,
        draft_length,
        name or model_basename(str(checkpoint.path)),
    )
    chosen = find_topology(engine, boxes, layout, device, devices)
    if devices is None and layout is None and chosen.boxes == 1:
        found = inputs.on_fewest_devices(chosen)
        if found is not None:
            return found[1]
    planned = inputs.fill(chosen)
    load, size = planned.problems[: len(problems)], planned.problems[len(problems) :]
    if any(problem.severity == "error" for problem in load):
        return replace(planned, problems=load)
    if not size:
        return planned
    remedy = inputs.remedy(planned, chosen)
    return replace(planned, problems=(*load, *(replace(one, remedy=remedy) for one in size)))


@dataclass(frozen=True)
class _Inputs:
    """What `deploy` fills layouts with, read once for all that it tries. stored: parameters and
    their bytes. problems: of the checkpoint with the engine, whatever the layout."""

    checkpoint: Checkpoint
    model: Model
    stored: list[tuple[Parameter, int]]
    recipe: LaunchRecipe
    problems: tuple[LoadProblem, ...]
    context: int
    network: Network
    memory_gib: float
    draft_length: int
    name: str

    def on_fewest_devices(self, topology: Topology) -> tuple[int, Deployment] | None:
        """The layout on machines with the fewest devices; None if the model fits on none."""
        for count in range(1, topology.devices_per_box + 1):
            try:
                smaller = resize_devices(topology, count)
            except QuantkitError:  # groups that this number does not divide into
                continue
            found = self.fill(smaller)
            if found.ready:
                return count, found
        return None

    def remedy(self, planned: Deployment, topology: Topology) -> str:
        """An option with which the model can be served, each tried before it is named."""
        tokens = min(held.tokens for held in planned.memory.values())
        if tokens >= 1 and replace(self, context=tokens).fill(topology).ready:
            return f"give --context {tokens}"
        recipe = self.recipe
        for layout in (one for one in recipe.layouts if one.name == topology.name):
            found = self.on_fewest_devices(resize_boxes(layout, topology.boxes))
            if found is not None:
                return f"give --devices {found[0]}{self._kind()}"
        for layout in recipe.layouts:
            inputs, first = self, ""
            hosts = self.network.hosts
            if hosts is not None and len(hosts) != layout.boxes:
                network = replace(self.network, hosts=None)
                inputs, first = replace(self, network=network), "leave out --hosts and "
            found = inputs.on_fewest_devices(layout) if len(layout.roles) == 1 else None
            if found is not None:
                place = f"--layout {layout.name} --boxes {layout.boxes}"
                return f"{first}give {place} --devices {found[0]}{self._kind()}"
        return "quantize the model to fewer bits, or use devices with more memory"

    def _kind(self) -> str:
        """Of the devices, after their number in --devices."""
        if self.recipe.device == "npu":
            return "x910B1" if self.memory_gib == 64 else ""
        return "" if self.memory_gib == self.recipe.memory_gib else f"x{self.memory_gib:g}GiB"

    def _check_tied_head(self, role: Role) -> list[LoadProblem]:
        model_types = find_engine(self.recipe.engine).tied_head_one_stage
        if (
            role.pipeline_parallel == 1
            or self.checkpoint.config.get("model_type") not in model_types
        ):
            return []
        if any(row.role == "head" and not row.mtp for row in self.model.rows):
            return []
        problem = (
            f"the head is tied to the embedding, which {self.recipe.engine} has in the first of "
            f"{role.pipeline_parallel} pipeline stages alone"
        )
        return [LoadProblem.error(problem, "use one stage")]

    def fill(self, topology: Topology) -> Deployment:
        """The layout's commands, and the memory of its roles."""
        checkpoint, recipe, path = self.checkpoint, self.recipe, self.checkpoint.path
        given, scheduled = self.network.hosts, self.network.scheduled
        networked = scheduled or given is not None or topology.boxes > 1
        if not networked:
            recipe = _without_network(recipe)
        unnamed = BOX if scheduled else "box"
        hosts = given or tuple(f"{unnamed}{number}" for number in range(topology.boxes))
        _check_hosts(hosts, topology)
        rule = find_load(recipe.engine, checkpoint, recipe.device)
        heads = dict(zip([role.name for role in topology.roles], _first_hosts(topology, hosts)))
        common = {
            "model": str(path.resolve() if checkpoint.has_weights else path),
            "name": self.name,
            "context": str(self.context),
            "nic": self.network.nic,
            "first_host_in_url": host_in_url(hosts[0]),
            "listen": "$ip" if networked else "127.0.0.1",
            "guesses": str(self.draft_length),
            "drafted": str(self.draft_length + 1),
            "per_box": str(topology.devices_per_box),
            **{f"{role}_head": host_in_url(host) for role, host in heads.items()},
            **{f"{role.name}_dp": str(role.data_parallel) for role in topology.roles},
            **{f"{role.name}_tp": str(role.tensor_parallel) for role in topology.roles},
        }
        options = (
            *recipe.options,
            *(rule.launch if rule else ()),
            *_speculation(recipe, topology, checkpoint, self.model, self.draft_length),
        )
        has_experts = any(row.expert is not None for row in self.model.rows)
        moe_options = {} if has_experts else recipe.of_experts
        problems, made, memory = list(self.problems), list[Launch](), dict[str, Fit]()
        notes = [recipe.notes, substitute(topology.notes, common)]
        if rule is not None:
            notes += [rule.launch_notes, rule.expert_launch_notes if has_experts else ""]
        for role in topology.roles:
            first = hosts.index(heads[role.name])
            role_hosts = hosts[first : first + role.boxes]
            shapes = list(
                check_shapes(
                    recipe.engine,
                    checkpoint,
                    (recipe.device,),
                    self.model.rows,
                    role.tensor_parallel,
                )
            )
            own = dict.fromkeys(shape.launch for shape in shapes)
            made += [
                launch.without_options(moe_options)
                for launch in launches(
                    recipe, topology, role, role_hosts, (*options, *chain(*own)), common
                )
            ]
            notes += [
                f"{shape.problem}: {role.name} has {' '.join(shape.launch)}"
                for shape in shapes
                if shape.launch
            ]
            problems += [shape for shape in shapes if not shape.launch]
            memory[role.name] = fit_rows(
                self.stored,
                self.model.config,
                role.parallel,
                self.context,
                self.memory_gib,
                recipe.memory_fraction,
                recipe.reserve_gib,
                topology.cache_bits(
                    role, self.model.config.cache, checkpoint.format.cache_codes(checkpoint.side)
                ),
                mtp=self.draft_length > 0,
            )
            problems += check_split(checkpoint, self.model, role.parallel)
            problems += self._check_tied_head(role)
            problems += _check_fit(role.name, memory[role.name])
        if topology.router:
            made.append(router_launch(topology, hosts[0], common))
        return Deployment(
            str(path),
            self.name,
            recipe.engine,
            recipe.image,
            recipe.device,
            topology.name,
            topology.devices_per_box,
            topology.summary,
            tuple(note for note in (*notes, _API_KEY_NOTE) if note),
            tuple(made),
            memory,
            tuple(dict.fromkeys(problems)),
            {
                "commands": layout_evidence(
                    recipe.engine, recipe.device, topology.name, self.draft_length
                ),
                "format": evidence(find_engine(recipe.engine), rule) if rule else "not loaded",
            },
        )


def _check_fit(role: str, held: Fit) -> list[LoadProblem]:
    if held.fits:
        return []
    weights, usable = held.weight_bytes / 2**30, held.usable_bytes / 2**30
    problem = (
        f"{role}: the fullest device holds {weights:.3g} GiB of weights, and its {usable:.3g} "
        f"usable GiB have no room for a request of {held.context} tokens"
    )
    return [LoadProblem("error", problem, "use more devices, or a shorter --context")]


def _first_hosts(topology: Topology, hosts: Sequence[str]) -> Iterator[str]:
    """The first machine of each role."""
    at = 0
    for role in topology.roles:
        yield hosts[at]
        at += role.boxes


def _check_hosts(hosts: Sequence[str], chosen: Topology) -> None:
    if len(hosts) != chosen.boxes:
        raise QuantkitError(
            f"{chosen.name} needs {chosen.boxes} boxes and {len(hosts)} hosts were given",
            "give one address per box",
        )
    for number, host in enumerate(hosts):
        if not _is_host(host):
            raise QuantkitError(
                f"{host!r} is not an address of a box",
                "give a name or an IP address, without http:// and without a port",
            )
        if chosen.boxes > 1 and host in ("0.0.0.0", "::"):
            raise QuantkitError(
                f"{host} is not an address that other boxes can reach",
                "give the address that the box has in their network",
            )
        if host in hosts[:number]:
            raise QuantkitError(
                f"{host} is given for two boxes", "give each box an address of its own"
            )


def _is_host(text: str) -> bool:
    """Whether it is an IP address or a host name, which no command can mistake for an option."""
    if ":" not in text and text.strip("0123456789."):
        return _NAME.fullmatch(text) is not None
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


_API_KEY_NOTE = (
    f"The scripts take the key that clients must send from {API_KEY}. It protects only the API: "
    "the ports between boxes and ranks have no key, so keep those in a private network."
)


def _speculation(
    recipe: LaunchRecipe,
    topology: Topology,
    checkpoint: Checkpoint,
    model: Model,
    draft_length: int,
) -> Command:
    if not draft_length:
        return ()
    model_type, stored = checkpoint.config.get("model_type"), checkpoint.format
    block = checkpoint.has(DSPARK)
    if not find_engine(recipe.engine).loads_drafts(model_type, stored.name, stored.variant, block):
        raise QuantkitError(
            f"{recipe.engine} does not load the layers of {checkpoint.path} that draft in "
            f"{stored.name}",
            "leave out --draft-length",
        )
    if block:
        return _block_speculation(recipe, topology, checkpoint, model, draft_length)
    if not recipe.speculation:
        raise QuantkitError(
            f"the recipe of {recipe.engine} has no options for speculative decoding with an "
            "MTP layer",
            "leave out --draft-length",
        )
    if not any(row.mtp for row in model.rows):
        raise QuantkitError(
            f"{checkpoint.path} has no MTP layer for speculative decoding",
            "leave out --draft-length",
        )
    return recipe.speculation


def _block_speculation(
    recipe: LaunchRecipe,
    topology: Topology,
    checkpoint: Checkpoint,
    model: Model,
    draft_length: int,
) -> Command:
    head = f"the DSpark draft head of {checkpoint.path}"
    if not recipe.of_blocks:
        raise QuantkitError(
            f"the recipe of {recipe.engine} has no options for {head}",
            "leave out --draft-length; vLLM and SGLang run it",
        )
    if topology.name not in recipe.block_layouts:
        raise QuantkitError(
            f"{recipe.engine} does not run {head} in the layout {topology.name}",
            f"leave out --draft-length, or use --layout {' or '.join(recipe.block_layouts)}",
        )
    if draft_length > (block := model.config.drafted_block):
        raise QuantkitError(
            f"{head} drafts {block} tokens a step (dspark_block_size)",
            f"give at most {block}, or leave out --draft-length",
        )
    return recipe.of_blocks


def _without_network(recipe: LaunchRecipe) -> LaunchRecipe:
    environment = {
        key: value for key, value in recipe.environment.items() if value not in ("$ip", "$nic")
    }
    return recipe.model_copy(update={"environment": environment})
