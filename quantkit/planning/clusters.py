"""Predicted decoding on many machines: attention by data parallelism, experts spread over all
devices, and all-to-all dispatch and combine of tokens.

    step = decode_step(rows, config, scheme, hardware, level, parallel, batch=1024, context=640)
    step.tokens_per_second, step.dispatch_bytes, step.parts

Matrix products are those of `cost_model`, with its levels and nothing fitted. In addition a device
holds `ParallelSizes.local_experts` whole experts of each layer and multiplies the tokens of all
devices with them. A token is sent to the device of each of its experts (dispatch), as 8 bits and a
scale or, with 16-bit activations, 16 bits, and comes back in 16 bits (combine). An exchange takes
the fabric's `exchange_us` plus the slower of the transfers within a machine at `link_gb_s` and
between machines at `fabric.gb_s`. Every rank of a tensor-parallel group sends its share of the
group's tokens. ASSUMPTIONS lists the rest.

`plan_layout` adds what a device of each role of an engine's layout holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.common.sizes import format_bytes
from quantkit.engines.layouts import PublishedRate, Topology, find_recipe, find_topology
from quantkit.engines.memory import (
    Fit,
    ParallelSizes,
    find_part_problem,
    find_split_problem,
    fit_rows,
)
from quantkit.engines.profiles import Device
from quantkit.grids.base import Grid
from quantkit.grids.schemes import Scheme
from quantkit.models.architecture import CacheBits, ModelConfig
from quantkit.models.stored_parameters import read_model
from quantkit.models.table import Parameter
from quantkit.planning.cost_model import (
    DENSE_BYTES,
    ROUTER_BYTES,
    WeightTraffic,
    count_launches,
    product_ms,
    touched_share,
)
from quantkit.planning.hardware import Hardware, Level, load_hardware

_SCALE_BYTES, _HALF = 4, 2


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of all devices together.

    batch: sequences on all devices. dispatch_bytes and combine_bytes: sent by one device in one
    step, all layers. parts: milliseconds by part, including dispatch and combine.
    tokens_per_second: of one device.
    """

    level: str
    batch: int
    devices: int
    experts_per_device: int
    dispatch_bytes: float
    combine_bytes: float
    parts: dict[str, float]

    @property
    def step_ms(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.batch / self.devices / self.step_ms

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "step_ms": self.step_ms,
            "tokens_per_second": self.tokens_per_second,
        }


def decode_step(
    rows: Sequence[Parameter],
    config: ModelConfig,
    scheme: Scheme,
    hardware: Hardware,
    level: Level,
    parallel: ParallelSizes,
    *,
    batch: int,
    context: int,
    devices_per_box: int | None = None,
    cache_bits: CacheBits = 16,
) -> DecodeStep:
    """batch: sequences of all devices together, divided over the data-parallel groups; context:
    tokens each attends to. Raises QuantkitError if the hardware has no fabric or the experts are
    not spread over the devices."""
    if hardware.fabric is None:
        raise QuantkitError(
            f"hardware {hardware.name} has no interconnect between machines",
            "add a fabric, as in recipes/hardware/910b1.yaml",
        )
    if not parallel.expert or config.routing is None or parallel.pipeline > 1:
        raise QuantkitError(
            "decoding is predicted only for experts spread over all devices",
            "choose a layout with expert parallelism and no pipeline",
        )
    group_batch = batch / parallel.data  # sequences of a data-parallel group
    bandwidth = hardware.hbm_gb_s * level.hbm_efficiency * 1e6  # bytes per ms
    parts: dict[str, float] = {}
    for load, tokens in _loads(rows, config, scheme, parallel, batch):
        for part, spent in product_ms(load, level, bandwidth, hardware, round(tokens)).items():
            parts[part] = parts.get(part, 0.0) + spent
    parts |= _attention_ms(config, hardware, level, parallel, group_batch * context, cache_bits)
    parts["launches"] = (
        count_launches(config, hardware, level.launches, scheme) * level.launch_us / 1e3
    )
    if parallel.tensor > 1:
        payload = (
            group_batch * config.hidden_size * _HALF * 2 * (parallel.tensor - 1) / parallel.tensor
        )
        parts["collectives"] = config.num_hidden_layers * (
            level.collective_us / 1e3 + payload / (hardware.link_gb_s * 1e6)
        )
    box = devices_per_box or hardware.devices_per_box
    layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    sent = layers * (group_batch / parallel.tensor) * config.routing.num_experts_per_tok
    token_bytes = (
        config.hidden_size + _SCALE_BYTES
        if scheme.activation_bits == 8
        else config.hidden_size * _HALF
    )
    volumes = {"dispatch": sent * token_bytes, "combine": sent * config.hidden_size * _HALF}
    for name, volume in volumes.items():
        parts[name] = _exchange_ms(volume, layers, hardware, level, parallel.world, box)
    return DecodeStep(
        level.name,
        batch,
        parallel.world,
        parallel.local_experts(_experts(rows)),
        volumes["dispatch"],
        volumes["combine"],
        parts,
    )


def largest_step(
    limit_ms: float, most: int, parallel: ParallelSizes, step: Callable[[int], DecodeStep]
) -> DecodeStep | None:
    """The step with the most sequences that takes at most `limit_ms`; None if one sequence per
    group takes longer, or none fits.

    most: sequences that fit in the cache of a data-parallel group; step: prediction for a batch.
    """
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (
            (middle, most)
            if step(middle * parallel.data).step_ms <= limit_ms
            else (least, middle - 1)
        )
    return step(least * parallel.data) if least else None


def compare_checkpoint(
    checkpoint: Checkpoint, topology: Topology, memory: Mapping[str, Fit]
) -> list[dict[str, Any]]:
    """`compare_published_rates` for a checkpoint. Also empty if the checkpoint matches no
    scheme."""
    if checkpoint.scheme is None:
        return []
    model = read_model(checkpoint)
    return compare_published_rates(topology, model.rows, model.config, checkpoint.scheme, memory)


def compare_published_rates(
    topology: Topology,
    rows: Sequence[Parameter],
    config: ModelConfig,
    scheme: Scheme,
    memory: Mapping[str, Fit],
) -> list[dict[str, Any]]:
    """Every level's prediction and error for each published rate of the layout; JSON-ready.

    memory: of each role, as `deploy` and `plan` compute it. Empty if no rate or hardware is known,
    or the model has no routed experts.
    """
    if topology.hardware is None or not _experts(rows):
        return []
    hardware = load_hardware(topology.hardware)
    return [
        compare_rate(rate, topology, rows, config, scheme, hardware, memory[rate.role])
        for rate in topology.published
    ]


@dataclass(frozen=True)
class PlannedLayout:
    """What a device of each role of an engine's layout holds.

    devices: number per role, on all machines; experts: per layer on one device, None for a model
    without; memory_gib: of one device. problems: by role, why it cannot be split this way.
    decoding: predictions for each published rate of the layout. launch: the command that starts it
    once OUT is written.
    """

    engine: str
    name: str
    summary: str
    memory_gib: float
    devices: dict[str, int]
    experts: dict[str, int | None]
    memory: dict[str, Fit]
    problems: dict[str, str]
    decoding: tuple[dict[str, Any], ...]
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
) -> PlannedLayout:
    """Fit of an engine's layout for parameters that are not written yet, each given with its stored
    bytes; `deploy` does the same for an existing checkpoint.

    context: tokens of the longest request. redundant: copies of busy experts per layer, in addition
    to the layout's own. devices, memory_gib, device: number per machine, memory and kind,
    overriding the layout's. grid: of a module's weight. Raises QuantkitError for an unknown engine
    or layout, or one that does not divide evenly over such machines.
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
    experts = _experts(rows)
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
        or find_split_problem(rows, grid, role.parallel)
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
        tuple(compare_published_rates(topology, rows, config, scheme, memory)),
    )


def compare_rate(
    rate: PublishedRate,
    topology: Topology,
    rows: Sequence[Parameter],
    config: ModelConfig,
    scheme: Scheme,
    hardware: Hardware,
    held: Fit,
) -> dict[str, Any]:
    """One published rate and every level's prediction for its batch or, if it has a time limit, for
    the largest batch within it that fits in `held`."""
    role = next(role for role in topology.roles if role.name == rate.role)
    parallel, bits = role.parallel, topology.cache_bits(role, config.cache, scheme.cache)
    fits = held.tokens // rate.context
    predicted = []
    for level in hardware.levels:

        def step(batch: int, level: Level = level) -> DecodeStep:
            box = topology.devices_per_box
            sizes = {"batch": batch, "context": rate.context, "devices_per_box": box}
            return decode_step(
                rows, config, scheme, hardware, level, parallel, **sizes, cache_bits=bits
            )

        one = (
            step(rate.batch)
            if rate.batch is not None
            else largest_step(rate.limit_ms or 0.0, fits, parallel, step)
        )
        if one is not None:
            predicted.append(
                {**one.as_dict(), "error": one.tokens_per_second / rate.tokens_per_second - 1}
            )
    return {
        **rate.model_dump(),
        "hardware": hardware.name,
        "scheme": scheme.name,
        "sequences_that_fit": fits * parallel.data,
        "predicted": predicted,
        "assumptions": [*ASSUMPTIONS, *hardware.assumptions],
    }


ASSUMPTIONS = (
    "tokens are routed evenly; copies of hot experts take memory and save no time",
    "dispatch and combine do not overlap with anything, and take the slower of the transfers "
    "within a machine and between machines",
    "prefill runs on other devices, or rarely; no speculative decoding with MTP",
)


def _experts(rows: Sequence[Parameter]) -> int:
    return len({row.expert for row in rows if row.expert is not None})


def _loads(
    rows: Sequence[Parameter],
    config: ModelConfig,
    scheme: Scheme,
    parallel: ParallelSizes,
    batch: int,
) -> list[tuple[WeightTraffic, float]]:
    """Weight reads and products of one device, with the number of tokens: experts, other quantized
    linears, 16-bit and 32-bit weights."""
    assert config.routing is not None
    experts, chosen = _experts(rows), config.routing.num_experts_per_tok
    share = parallel.local_experts(experts) / experts * touched_share(experts, chosen, batch)
    group_batch = batch / parallel.data
    expert = linear = dense = router = 0.0
    for row in rows:
        if row.mtp or row.role == "embedding":
            continue
        count = float(row.shape[0] * (row.shape[1] if len(row.shape) > 1 else 1))
        held = count / row.tp_shards(parallel.tensor)
        if row.expert is not None:
            expert += count
        elif row.role == "linear":
            linear += held
        elif row.role.startswith("router"):
            router += held
        else:
            dense += held
    kind, size = scheme.weight.kind, scheme.weight.bytes_per_weight
    kind_outside, size_outside = (
        (scheme.outside.kind, scheme.outside.bytes_per_weight) if scheme.outside else (kind, size)
    )
    routed = WeightTraffic(
        kind,
        expert * share,
        expert * share * size,
        expert * batch * chosen / experts / parallel.world,
    )
    return [
        (routed, batch * chosen / parallel.world),
        (
            WeightTraffic(kind_outside, linear, linear * size_outside, linear * group_batch),
            group_batch,
        ),
        (WeightTraffic("dense", dense, dense * DENSE_BYTES, dense * group_batch), group_batch),
        (WeightTraffic("dense", router, router * ROUTER_BYTES, router * group_batch), group_batch),
    ]


def _attention_ms(
    config: ModelConfig,
    hardware: Hardware,
    level: Level,
    parallel: ParallelSizes,
    attended: float,
    cache_bits: CacheBits,
) -> dict[str, float]:
    """Reading `attended` cached tokens and multiplying the rank's heads with them; if products
    overlap, the slower counts."""
    cached = (
        config.cache.token_bytes(cache_bits, parallel.tensor) * config.num_hidden_layers * attended
    )
    read = level.cache_passes * cached / (hardware.hbm_gb_s * level.hbm_efficiency * 1e6)
    heads = config.num_attention_heads / parallel.tensor
    multiplied = (
        2
        * attended
        * heads
        * config.cache.read_by_head
        * config.num_hidden_layers
        / (hardware.cube_tflops * 1e9)
    )
    if level.decode == "free":
        return {"cache": read}
    if level.decode == "serial":
        return {"cache": read, "scores": multiplied}
    return {"cache": read} if read > multiplied else {"scores": multiplied}


def _exchange_ms(
    volume: float, times: int, hardware: Hardware, level: Level, devices: int, box: int
) -> float:
    """Milliseconds of `times` all-to-all exchanges in which a device sends `volume` bytes in total,
    evenly to each device including itself."""
    assert hardware.fabric is not None
    near = min(box, devices)
    inside, outside = volume * (near - 1) / devices, volume * (devices - near) / devices
    start = times * hardware.fabric.exchange_us / 1e3 if level.collective_us else 0.0
    return start + max(inside / (hardware.link_gb_s * 1e6), outside / (hardware.fabric.gb_s * 1e6))
