"""Predicted time of a decode step from bytes, operations, launches and collectives, without the
hardware.

    hardware = load_hardware("910b1")
    for prediction in predict_levels(parameters(config), config, scheme, hardware, devices=8,
                                     batch=8, context=640):
        print(prediction.level, prediction.tpot_ms)

The levels of a hardware file range from a lower bound that no program can beat to naive execution;
a measured time between two levels shows how much a program can still gain. No constant was fitted
to a measurement, but the form (of overlapped parts only the slowest counts) was chosen knowing the
published 910B1 figures: the model attributes time, it is not validated. Assumptions (all listed in
the hardware's YAML): tensor parallelism over all devices; uniform routing, so
E(1 - (1 - k/E)^B) experts are read; activations stay on the chip; the parts of an operator either
overlap (the slowest counts) or run one after another; operators run one after another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid
from quantkit.grids.schemes import Scheme
from quantkit.models import find_architecture
from quantkit.models.architecture import ModelConfig
from quantkit.models.table import Parameter
from quantkit.planning.hardware import Hardware, Level, SplitActivations

PARTS = ("hbm", "vector", "l2", "cube", "cache", "launches", "collectives")
_SCALE_BYTES, ROUTER_BYTES, DENSE_BYTES, _SUM_BYTES = 2, 4, 2, 4


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of one decode step at a level, split into `parts` (PARTS), with the number of
    launches and collectives."""

    level: str
    summary: str
    batch: int
    parts: dict[str, float]
    num_launches: int
    num_collectives: int

    @property
    def tpot_ms(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class WeightTraffic:
    """Work of one device for the weights of one kind in a step: `weights` values in `bytes`, and
    `products` multiply-adds with x.

    undecoded: the codes are multiplied directly, in groups of `group`.
    """

    kind: str
    weights: float
    bytes: float
    products: float
    group: int = 0
    undecoded: bool = False


@dataclass(frozen=True)
class WholeStep:
    """A decode step: model, devices, number of sequences, and tokens per sequence."""

    config: ModelConfig
    scheme: Scheme
    hardware: Hardware
    devices: int
    batch: int
    context: int

    def predict(
        self, level: Level, loads: Iterable[tuple[WeightTraffic, Level]], name: str | None = None
    ) -> Prediction:
        """Cache, launches and collectives follow `level`; each load is read and decoded as its own
        level says."""
        parts = dict.fromkeys(PARTS, 0.0)
        bandwidth = self.hardware.hbm_gb_s * 1e6  # bytes per ms
        for load, decoding in loads:
            rate = bandwidth * decoding.hbm_efficiency
            for part, spent in product_ms(load, decoding, rate, self.hardware, self.batch).items():
                parts[part] += spent
        parts["cache"] = (
            level.cache_passes * self._cache_bytes() / (bandwidth * level.hbm_efficiency)
        )
        launches = count_launches(self.config, self.hardware, level.launches, self.scheme)
        collectives = (
            2 * self.config.num_hidden_layers + 1 if self.devices > 1 and level.collective_us else 0
        )
        payload = self.batch * self.config.hidden_size * 2 * 2 * (self.devices - 1) / self.devices
        parts["launches"] = launches * level.launch_us / 1e3
        parts["collectives"] = collectives * (
            level.collective_us / 1e3 + payload / (self.hardware.link_gb_s * 1e6)
        )
        return Prediction(
            name or level.name, level.summary, self.batch, parts, launches, collectives
        )

    def _cache_bytes(self) -> float:
        """Bytes read from the cache by one device, all layers. With latent attention every rank
        keeps the whole latent."""
        per_token = self.config.cache.token_bytes(16, self.devices) * self.config.num_cached_layers
        return float(per_token * self.batch * self.context)


def predict_levels(
    parameters: list[Parameter],
    config: ModelConfig,
    scheme: Scheme,
    hardware: Hardware,
    *,
    devices: int,
    batch: int,
    context: int,
) -> list[Prediction]:
    """One prediction for each level of the hardware, from the lower bound up.

    parameters: the model's table, config: its architecture's Config. batch: sequences decoded
    together; context: tokens each attends to, averaged over the steps.
    """
    loads = device_loads(
        parameters, config, scheme.weight, devices, batch, hardware.split_activations
    )
    step = WholeStep(config, scheme, hardware, devices, batch, context)
    return [step.predict(level, [(load, level) for load in loads]) for level in hardware.levels]


def predict(
    config: dict[str, Any],
    scheme: Scheme,
    hardware: Hardware,
    *,
    devices: int,
    batches: Sequence[int],
    context: int,
) -> dict[str, Any]:
    """Predictions for a model from its config.json alone, for several batch sizes; JSON-ready."""
    if scheme.outside or scheme.activation_bits == 4 or scheme.weight.activation_bits == 8:
        raise QuantkitError(
            f"decoding times of {scheme.name} are not predicted: no rate of its products is known",
            "give --devices 8x64GiB",
        )
    architecture = find_architecture(config)
    parsed = architecture.Config.from_dict(config)
    rows = architecture.parameters(parsed)
    found = [
        predict_levels(
            rows, parsed, scheme, hardware, devices=devices, batch=batch, context=context
        )
        for batch in batches
    ]
    predictions = [[{**asdict(one), "tpot_ms": one.tpot_ms} for one in levels] for levels in found]
    return {
        "hardware": hardware.name,
        "scheme": scheme.name,
        "devices": devices,
        "context": context,
        "predictions": predictions,
        "steps": [
            [
                {"from": lower, "to": upper, "adds_ms": added}
                for lower, upper, added in steps(levels)
            ]
            for levels in found
        ],
        "assumptions": list(hardware.assumptions),
    }


def steps(predictions: list[Prediction]) -> list[tuple[str, str, dict[str, float]]]:
    """What each level adds to the one below it: (lower, upper, milliseconds by part), without parts
    that change by less than 0.05 ms."""
    found = []
    for lower, upper in pairwise(predictions):
        added = {part: upper.parts[part] - lower.parts[part] for part in PARTS}
        found.append(
            (lower.level, upper.level, {part: ms for part, ms in added.items() if abs(ms) >= 0.05})
        )
    return found


def device_loads(
    parameters: list[Parameter],
    config: ModelConfig,
    grid: Grid,
    devices: int,
    batch: int,
    split: SplitActivations | None = None,
) -> list[WeightTraffic]:
    """Weight reads of one of `devices` ranks in a decode step: decoded quantized weights, quantized
    linears that need no decoding, 16-bit and 32-bit weights."""
    experts = len({row.expert for row in parameters if row.expert is not None})
    chosen = config.routing.num_experts_per_tok if config.routing else 0
    share = touched_share(experts, chosen, batch) if experts else 0.0
    group = grid.group_size or 0
    decoded = undecoded = dense = router = products = 0.0
    for row in parameters:
        if row.mtp or row.role == "embedding":
            continue
        count = float(row.shape[0] * (row.shape[1] if len(row.shape) > 1 else 1)) / row.tp_shards(
            devices
        )
        if row.expert is not None:
            decoded += count * share
            products += count * batch * chosen / experts
        elif row.role == "linear":
            # The executor computes a shared expert in the grouped product, as one more routed one.
            separate = grid.kind == "int4" and row.block != "shared_expert"
            if (
                split is not None
                and separate
                and split.takes(*_local_shape(row, devices), group, batch)
            ):
                undecoded += count
            else:
                decoded += count
                products += count * batch
        elif row.role.startswith("router"):
            router += count
        else:
            dense += count
    kind, size = grid.kind, grid.bytes_per_weight
    return [
        WeightTraffic(kind, decoded, decoded * size, products),
        WeightTraffic(kind, undecoded, undecoded * size, undecoded * batch, group, True),
        WeightTraffic("dense", dense, dense * DENSE_BYTES, dense * batch),
        WeightTraffic("dense", router, router * ROUTER_BYTES, router * batch),
    ]


def _local_shape(row: Parameter, devices: int) -> tuple[float, float]:
    """Outputs and inputs of a linear on one device."""
    outputs, inputs = row.shape[0], row.shape[1]
    return outputs / (row.tp_shards(devices) if row.split == "column" else 1), inputs / (
        devices if row.split == "row" else 1
    )


def touched_share(experts: int, top_k: int, batch: int) -> float:
    """Expected share of a layer's experts that `batch` tokens are routed to, for uniform
    routing."""
    return float(1 - (1 - top_k / experts) ** batch)


def product_ms(
    load: WeightTraffic, level: Level, bandwidth: float, hardware: Hardware, batch: int
) -> dict[str, float]:
    """Milliseconds by part to read, decode and multiply the weights of one kind. Overlapped: the
    slowest part counts; serial: all do.

    The cube multiplies every weight with at least `cube_rows` rows, and a decoded weight reaches it
    through the L2. Few rows may be multiplied on the vector cores instead; an overlapped level
    takes the faster way.
    """
    spent = {"hbm": load.bytes / bandwidth}
    if level.decode == "free":
        return spent
    cost = hardware.decode.get(load.kind)
    if level.decode == "vector" and cost is not None:
        return spent | {
            "vector": load.products * cost.vector_ops_per_row / (hardware.vector_gops * 1e6)
        }
    if load.undecoded:
        spent |= _undecoded_ms(load, hardware)
    else:
        spent |= _decoded_ms(load, hardware)
    if level.decode in ("serial", "vector"):
        return spent
    slowest = max(spent, key=lambda part: spent[part])
    if cost is not None and cost.vector_ops_per_row and not load.undecoded:
        without_cube = {
            "hbm": spent["hbm"],
            "vector": load.products * cost.vector_ops_per_row / (hardware.vector_gops * 1e6),
        }
        slowest_without = max(without_cube, key=lambda part: without_cube[part])
        if without_cube[slowest_without] < spent[slowest]:
            return {slowest_without: without_cube[slowest_without]}
    return {slowest: spent[slowest]}


def _decoded_ms(load: WeightTraffic, hardware: Hardware) -> dict[str, float]:
    peak = hardware.cube_tops_int8 if load.kind == "int8" else hardware.cube_tflops
    spent = {"cube": 2 * max(load.products, load.weights * hardware.cube_rows) / (peak * 1e9)}
    cost = hardware.decode.get(load.kind)
    if cost is not None:
        spent["vector"] = load.weights * cost.cube_ops / (hardware.vector_gops * 1e6)
        spent["l2"] = _through_l2_ms(load.weights * cost.cube_l2_bytes, hardware)
    return spent


def _undecoded_ms(load: WeightTraffic, hardware: Hardware) -> dict[str, float]:
    """Codes times pieces of x on the cube, at its int8 rate; the vector cores scale and add the
    sums of each group."""
    split = hardware.split_activations
    assert split is not None, "only split_activations creates undecoded loads"
    if not load.weights:
        return {}
    sums = split.pieces * load.products / load.group
    return {
        "cube": 2
        * max(split.pieces * load.products, load.weights * hardware.cube_rows)
        / (hardware.cube_tops_int8 * 1e9),
        "vector": sums * split.sum_ops / (hardware.vector_gops * 1e6),
        "l2": _through_l2_ms(sums * _SUM_BYTES, hardware),
    }


def _through_l2_ms(size: float, hardware: Hardware) -> float:
    """Milliseconds to write bytes to the L2 and read them back."""
    return size / (hardware.l2_write_gb_s * 1e6) + size / (hardware.l2_read_gb_s * 1e6)


def count_launches(config: ModelConfig, hardware: Hardware, name: str, scheme: Scheme) -> int:
    """Launches of a step. With 8-bit activations the "_int8" variant of the level's list is used if
    the hardware has one."""
    layers = config.num_hidden_layers
    moe = sum(config.is_moe(layer) for layer in range(layers))
    counted = (
        hardware.launches.get(f"{name}_int8", hardware.launches[name])
        if scheme.activation_bits == 8
        else hardware.launches[name]
    )
    return (layers - moe) * counted.dense_layer + moe * counted.moe_layer + counted.step
