"""Layouts of an engine on machines: recipes/deploy/*.yaml, and the same on another number of
machines or devices.

A recipe has layouts (one box, two boxes, prefill apart from decode); a layout has roles; a role is
the same commands on each of its boxes, with addresses and ranks that differ. World of a role:
data_parallel groups of tensor_parallel x pipeline_parallel devices.
"""

from functools import cache

from pydantic import Field, model_validator

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError
from quantkit.common.settings import Strict, read_yaml
from quantkit.engines.memory import ParallelSizes
from quantkit.engines.profiles import Device, find_engine
from quantkit.grids.names import CacheCodes
from quantkit.models.architecture import CacheBits, CompressedCache, KeyValueCache, LatentCache

Command = tuple[str, ...]


class Role(Strict):
    """Boxes that run the same commands. `rest`: those of boxes after the first, where they differ.

    `per_rank`: once for each data-parallel group of the box, each with its own port, rank and
    devices. takes_cache: the caches of prompts come to it from another role.
    """

    name: str
    boxes: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool
    redundant_experts: int = 0
    per_rank: bool = False
    takes_cache: bool = False
    environment: dict[str, str] = Field({})
    first: tuple[Command, ...]
    rest: tuple[Command, ...] | None = None

    @property
    def parallel(self) -> ParallelSizes:
        return ParallelSizes(
            self.tensor_parallel,
            self.pipeline_parallel,
            self.data_parallel,
            self.expert_parallel,
            self.redundant_experts,
        )


class PublishedRate(Strict):
    """Tokens a second that somebody published of one device of a role: of a batch over all its
    devices, or within limit_ms a token.

    context: tokens that each sequence attends to, as the publication has them or as is assumed; of:
    what was run, and whose figure it is.
    """

    role: str
    tokens_per_second: float
    batch: int | None = None
    limit_ms: float | None = None
    context: int
    of: str


class Topology(Strict):
    """hardware: of recipes/hardware, by which decoding is predicted."""

    name: str
    summary: str
    devices_per_box: int = 8
    roles: tuple[Role, ...]
    notes: str = ""
    hardware: str | None = None
    published: tuple[PublishedRate, ...] = ()

    @property
    def boxes(self) -> int:
        return sum(role.boxes for role in self.roles)

    def cache_bits(
        self,
        role: Role,
        cache: LatentCache | KeyValueCache | CompressedCache,
        codes: CacheCodes | None,
    ) -> CacheBits:
        """What a role keeps tokens in, of a checkpoint with steps of a cache in these codes: as
        vllm-ascend 0.23.0 has it, 16 bits where caches are sent to another role, and for latents 8
        bits only where they came from one."""
        alone = len(self.roles) == 1 and isinstance(cache, KeyValueCache)
        return 8 if codes is not None and (role.takes_cache or alone) else 16

    @model_validator(mode="after")
    def _uses_every_device(self) -> "Topology":
        for role in self.roles:
            devices = role.boxes * self.devices_per_box
            if role.parallel.world != devices:
                raise ValueError(
                    f"{self.name} {role.name}: {role.parallel.world} ranks on {devices} devices"
                )
        return self


class LaunchRecipe(Strict):
    """Of one engine on one kind of device. memory_gib: of one device; memory_fraction: what the
    engine may use of it;
    reserve_gib: activations, graphs and communication buffers, an estimate. key: how the engine is
    given the key that its clients must send, an option of its command or a variable of its
    environment. listens: the option by which a command is known to serve.
    speculation: options that make the checkpoint's MTP layer guess $guesses tokens a step; none
    where the recipe has none. of_experts: options that the engine refuses, or has no use for, where
    a model has no experts, with how many values each has."""

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
    speculation: Command = ()
    of_experts: dict[str, int] = Field({})
    sources: tuple[str, ...]
    notes: str = ""
    layouts: tuple[Topology, ...]


@cache
def recipes() -> tuple[LaunchRecipe, ...]:
    """Of every engine and device."""
    paths = sorted(asset("recipes", "deploy").glob("*.yaml"))
    return tuple(read_yaml(path, LaunchRecipe, "restore that file") for path in paths)


def find_recipe(engine: str, device: Device | None) -> LaunchRecipe:
    find_engine(engine)
    found = [
        recipe
        for recipe in recipes()
        if recipe.engine == engine and device in (None, recipe.device)
    ]
    if not found:
        there = ", ".join(f"{recipe.engine} on {recipe.device}" for recipe in recipes())
        raise QuantkitError(
            f"there is no deployment recipe for {engine}{f' on {device}' if device else ''}",
            f"there are {there}",
        )
    # Where an engine runs on both, the box is Ascend unless asked otherwise: that is who this is
    # for.
    return min(found, key=lambda recipe: recipe.device != "npu")


def find_topology(
    engine: str,
    boxes: int | None = None,
    name: str | None = None,
    device: Device | None = None,
    devices: int | None = None,
) -> Topology:
    """By name, or else the one of `boxes` boxes (one) that runs prefill and decode together.
    `boxes` and `devices` change its size.

    Raises QuantkitError listing the layouts there are, or where ranks of a layout do not come out
    even on such machines.
    """
    recipe = find_recipe(engine, device)
    for layout in recipe.layouts:
        if layout.name == name or (
            name is None and layout.boxes == (boxes or 1) and len(layout.roles) == 1
        ):
            return _on_devices(
                _on_boxes(layout, boxes or layout.boxes), devices or layout.devices_per_box
            )
    there = ", ".join(f"{layout.name} ({layout.boxes})" for layout in recipe.layouts)
    raise QuantkitError(
        f"{recipe.engine} has no layout {name or f'of {boxes or 1} boxes'}",
        f"its layouts (and boxes) are {there}",
    )


def _on_boxes(layout: Topology, boxes: int) -> Topology:
    """A layout of one role on another number of boxes: more or fewer data-parallel groups where it
    has those, else pipeline stages.

    Raises QuantkitError for one box of a layout of several, and for several of a layout of one or
    with several roles.
    """
    if boxes == layout.boxes:
        return layout
    if len(layout.roles) > 1 or 1 in (boxes, layout.boxes):
        raise QuantkitError(
            f"{layout.name} is a layout of {layout.boxes} boxes",
            f"leave out --boxes, or give --boxes {layout.boxes}",
        )
    role = layout.roles[0]
    per_box, what = (
        ("data_parallel", "data-parallel groups")
        if role.data_parallel > 1
        else ("pipeline_parallel", "pipeline stages")
    )
    whole, left = divmod(getattr(role, per_box) * boxes, role.boxes)
    if left:
        raise QuantkitError(
            f"the {what} of {layout.name} do not come out even on {boxes} boxes",
            "give another --boxes, or another --layout",
        )
    summary = f"{boxes} boxes of {layout.devices_per_box} in the layout {layout.name}."
    roles = (role.model_copy(update={"boxes": boxes, per_box: whole}),)
    return layout.model_copy(update={"roles": roles, "summary": summary, "published": ()})


def _on_devices(layout: Topology, devices: int) -> Topology:
    """A layout on machines of another number of devices. Tensor parallel in a machine stays so;
    data-parallel groups become more or fewer. A published rate is of its own size alone.

    Raises QuantkitError where the ranks of a role do not come out even.
    """
    if devices == layout.devices_per_box:
        return layout
    roles = tuple(_role_on(role, layout, devices) for role in layout.roles)
    if layout.boxes == 1 and roles[0].data_parallel == 1:
        summary = f"One box, tensor parallel over {devices}." if devices > 1 else "One device."
    else:
        summary = (
            f"{'One box' if layout.boxes == 1 else f'{layout.boxes} boxes'} of {devices} in "
            f"the layout {layout.name}."
        )
    return layout.model_copy(
        update={"devices_per_box": devices, "roles": roles, "summary": summary, "published": ()}
    )


def _role_on(role: Role, layout: Topology, devices: int) -> Role:
    boxes_of_group, part = divmod(role.tensor_parallel, layout.devices_per_box)
    tensor = role.tensor_parallel if part else boxes_of_group * devices
    group = tensor * role.pipeline_parallel
    groups, left = divmod(role.boxes * devices, group)
    if left or groups == 0 or (part and devices % tensor):
        raise QuantkitError(
            f"{layout.name} is laid out for machines of {layout.devices_per_box} devices, and "
            f"{role.name} takes groups of {group}",
            f"give --devices {layout.devices_per_box}, or another --layout",
        )
    return role.model_copy(update={"tensor_parallel": tensor, "data_parallel": groups})
