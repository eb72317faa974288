"""Layouts of an engine on machines (recipes/deploy/*.yaml), resized to other numbers of machines or
devices, and the evidence that engines load a format or serve a layout.

A recipe has layouts (one machine, two machines, disaggregated prefill and decode); a layout has
roles; a role runs the same commands on each of its machines, with other addresses and ranks. World
of a role: data_parallel groups of tensor_parallel x pipeline_parallel devices.
"""

from functools import cache

from pydantic import Field, model_validator

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.settings import Strict, read_yaml
from quantkit.engines.memory import ParallelSizes
from quantkit.engines.profiles import Device, EngineProfile, LoadRule, MixtureRule, engine_names
from quantkit.grids.names import CacheCodes, GridName
from quantkit.models.architecture import CacheBits, CompressedCache, KeyValueCache, LatentCache

Command = tuple[str, ...]


class Role(Strict):
    """Machines that run the same commands. `rest`: commands of machines after the first, if they
    differ.

    `per_rank`: once for each data-parallel group of the machine, each with its own port, rank and
    devices. takes_cache: another role sends it the KV caches of prompts.
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


class Topology(Strict):
    """A layout. router: the command, on the first machine, that sends each request to a server of
    every role; router_package: what it needs, for pip."""

    name: str
    summary: str
    devices_per_box: int = 8
    roles: tuple[Role, ...]
    router: Command = ()
    router_package: str = ""
    notes: str = ""

    @property
    def boxes(self) -> int:
        return sum(role.boxes for role in self.roles)

    def cache_bits(
        self,
        role: Role,
        cache: LatentCache | KeyValueCache | CompressedCache,
        codes: CacheCodes | None,
    ) -> CacheBits:
        """Cache bits of a role for a checkpoint with scales of a cache in these codes. As in
        vllm-ascend 0.23.0: 16 bits where caches are sent to another role, and for latents 8 bits
        only if they were received from one."""
        single_role = len(self.roles) == 1 and isinstance(cache, KeyValueCache)
        return 8 if codes is not None and (role.takes_cache or single_role) else 16

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
    """Launch of one engine on one kind of device.

    memory_gib: of one device; memory_fraction: share that the engine may use; reserve_gib: estimate
    for activations, graphs and communication buffers. key: option or environment variable for the
    API key that clients must send. image: of a container with the engine; empty if none is
    published. listens: option that identifies a serving command. speculation: options for
    speculative decoding with the checkpoint's MTP layer and $guesses draft tokens, empty if
    unsupported; of_blocks: the same with a head that drafts blocks (DSpark), in `block_layouts`
    alone. of_experts: options, with their number of values, to leave out for a model without
    experts.
    """

    engine: str
    device: Device
    release: str
    memory_gib: float
    memory_fraction: float
    reserve_gib: float
    environment: dict[str, str]
    options: Command
    key: str
    image: str = ""
    listens: str = "--host"
    speculation: Command = ()
    of_blocks: Command = ()
    block_layouts: tuple[str, ...] = ()
    of_experts: dict[str, int] = Field({})
    sources: tuple[str, ...]
    notes: str = ""
    layouts: tuple[Topology, ...]

    def start(self, command: Command) -> Command:
        """The words of a layout's command up to $model, without other options."""
        words = [
            word for one in command for word in (self.options if one == "$options" else (one,))
        ]
        return tuple(words[: words.index("$model") + 1])


@cache
def recipes() -> tuple[LaunchRecipe, ...]:
    """Recipes of all engines and devices."""
    paths = sorted(asset("recipes", "deploy").glob("*.yaml"))
    return tuple(read_yaml(path, LaunchRecipe, "restore that file") for path in paths)


def find_recipe(engine: str, device: Device | None) -> LaunchRecipe:
    if engine not in engine_names():
        known = ", ".join(sorted({recipe.engine for recipe in recipes()}))
        raise UsageError(f"engine {engine!r} is not known", f"choose one of {known}")
    found = [
        recipe
        for recipe in recipes()
        if recipe.engine == engine and device in (None, recipe.device)
    ]
    if not found:
        known = ", ".join(f"{recipe.engine} on {recipe.device}" for recipe in recipes())
        raise QuantkitError(
            f"there is no deployment recipe for {engine}{f' on {device}' if device else ''}",
            f"there are {known}",
        )
    return min(found, key=lambda recipe: recipe.device != "cuda")


def find_topology(
    engine: str,
    boxes: int | None = None,
    name: str | None = None,
    device: Device | None = None,
    devices: int | None = None,
) -> Topology:
    """The layout `name`, or the one of `boxes` machines (default one) that runs prefill and decode
    together. `boxes` and `devices` change its size.

    Raises QuantkitError listing the known layouts, or if the ranks of a layout do not divide evenly
    over such machines.
    """
    recipe = find_recipe(engine, device)
    for layout in recipe.layouts:
        if layout.name == name or (
            name is None and layout.boxes == (boxes or 1) and len(layout.roles) == 1
        ):
            return resize_devices(
                resize_boxes(layout, boxes or layout.boxes), devices or layout.devices_per_box
            )
    known = ", ".join(f"{layout.name} ({layout.boxes})" for layout in recipe.layouts)
    raise QuantkitError(
        f"{recipe.engine} has no layout {name or f'of {boxes or 1} boxes'}",
        f"its layouts (and boxes) are {known}",
    )


def resize_boxes(layout: Topology, boxes: int) -> Topology:
    """A layout of one role on another number of machines: other numbers of data-parallel groups if
    it has several, else of pipeline stages.

    Raises QuantkitError between one machine and several, and for a layout of several roles.
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
    whole, remainder = divmod(getattr(role, per_box) * boxes, role.boxes)
    if remainder:
        raise QuantkitError(
            f"the {what} of {layout.name} cannot be divided evenly over {boxes} boxes",
            "give another --boxes, or another --layout",
        )
    summary = f"{boxes} boxes of {layout.devices_per_box} in the layout {layout.name}."
    roles = (role.model_copy(update={"boxes": boxes, per_box: whole}),)
    return layout.model_copy(update={"roles": roles, "summary": summary})


def resize_devices(layout: Topology, devices: int) -> Topology:
    """A layout on machines with another number of devices. Tensor parallelism within a machine is
    kept; the number of data-parallel groups changes.

    Raises QuantkitError if the ranks of a role do not divide evenly.
    """
    if devices == layout.devices_per_box:
        return layout
    roles = tuple(_resize_role(role, layout, devices) for role in layout.roles)
    if layout.boxes == 1 and roles[0].data_parallel == 1:
        summary = f"One box, tensor parallel over {devices}." if devices > 1 else "One device."
    else:
        summary = (
            f"{'One box' if layout.boxes == 1 else f'{layout.boxes} boxes'} of {devices} in "
            f"the layout {layout.name}."
        )
    return layout.model_copy(
        update={"devices_per_box": devices, "roles": roles, "summary": summary}
    )


def _resize_role(role: Role, layout: Topology, devices: int) -> Role:
    boxes_of_group, part = divmod(role.tensor_parallel, layout.devices_per_box)
    tensor = role.tensor_parallel if part else boxes_of_group * devices
    group = tensor * role.pipeline_parallel
    groups, remainder = divmod(role.boxes * devices, group)
    if remainder or groups == 0 or (part and devices % tensor):
        raise QuantkitError(
            f"{layout.name} is for machines of {layout.devices_per_box} devices, and "
            f"{role.name} needs groups of {group}",
            f"give --devices {layout.devices_per_box}, or another --layout",
        )
    return role.model_copy(update={"tensor_parallel": tensor, "data_parallel": groups})


class LoaderResult(Strict):
    """A result of tests/judges/loaders/judge.py in recipes/engines/loaded.json: one format on one
    grid, read by the loader of an engine's released package on a CPU.

    ranks: as "0 and 3 of 4". loads, right: number of loads (a model on a rank) and of correct ones;
    faults, found: number of faults made in such checkpoints, and of detected ones. date: of the
    run. cache: codes whose scales were read, too.
    """

    engine: str
    release: str
    date: str
    device: Device
    format: str
    variant: str
    grid: GridName
    models: tuple[str, ...]
    ranks: str
    loads: int
    right: int
    faults: int
    found: int
    cache: CacheCodes | None = None

    @property
    def holds(self) -> bool:
        """Whether every load was correct and every fault detected."""
        return self.loads == self.right > 0 and self.faults == self.found > 0


class LayoutRun(Strict):
    """A result of tests/judges/vllm_topologies.py in recipes/deploy/run.json: a layout's commands,
    run with one checkpoint on `ranks` cards or processes of `machine`, and tokens compared with
    quantkit's.

    device: of the recipe. guesses: draft length of the MTP layer. options: added options that
    change what is run, or "2-of-each" for two servers of each kind. `equal` of `compared` tokens
    were quantkit's; `passed`: whether that is enough. said: why there are none.
    """

    engine: str
    release: str
    device: Device = "cuda"
    machine: str
    layout: str
    ranks: int
    guesses: int = 0
    options: str = ""
    model: str
    format: str
    compared: int = 0
    equal: int = 0
    passed: bool
    said: str = ""


@cache
def layout_runs() -> tuple[LayoutRun, ...]:
    """All results."""
    return read_yaml(
        asset("recipes", "deploy", "run.json"),
        tuple[LayoutRun, ...],
        "run make test-vllm-topologies, or restore that file",
    )


def layout_evidence(engine: str, device: Device, layout: str, guesses: int = 0) -> str:
    """Such as "run on CPU, vllm 0.32.0": where the tokens of some checkpoint equalled quantkit's;
    else "by source"."""
    where = dict.fromkeys(
        f"{run.machine}, {run.engine} {run.release}"
        for run in layout_runs()
        if run.passed
        and (run.engine, run.device, run.layout, bool(run.guesses))
        == (engine, device, layout, bool(guesses))
    )
    return f"run on {'; '.join(where)}" if where else "by source, not run"


@cache
def loader_results() -> tuple[LoaderResult, ...]:
    """All results."""
    return read_yaml(
        asset("recipes", "engines", "loaded.json"),
        tuple[LoaderResult, ...],
        "run make test-loaders, or restore that file",
    )


def loader_results_of(profile: EngineProfile, load: LoadRule) -> tuple[LoaderResult, ...]:
    """Results for a rule: one for each of its grids and devices that was tested."""
    results = [
        one
        for one in loader_results()
        if (one.engine, one.format, one.variant) == (profile.engine, load.format, load.variant)
    ]
    return tuple(one for one in results if one.grid in load.grids and one.device in load.devices)


def cache_evidence(profile: EngineProfile, codes: CacheCodes) -> str:
    """For a quantized cache with scales from the checkpoint, such as "loaded by vllm-ascend 0.23.0
    on a CPU, 2026-11-29 (deepseek_v3, qwen3)"; else "by source"."""
    found = [one for one in loader_results() if (one.engine, one.cache) == (profile.engine, codes)]
    if not found or not all(one.holds for one in found):
        return "by source"
    models = sorted({model for one in found for model in one.models})
    loaded = f"loaded by {profile.engine} {found[0].release} on a CPU, {found[0].date}"
    return f"{loaded} ({', '.join(models)})"


def evidence(profile: EngineProfile, load: LoadRule | MixtureRule) -> str:
    """Such as "run on H200, vLLM 0.22.1, 2026-11-21", "loaded by vllm-ascend 0.23.0, ranks 0 and 3
    of 4", or "by source"."""
    if load.run:
        return f"run on {load.run_on}"
    found = loader_results_of(profile, load) if isinstance(load, LoadRule) else []
    if found and all(one.holds for one in found):
        return f"loaded by {profile.engine} {found[0].release} on a CPU, ranks {found[0].ranks}"
    return "by source"
