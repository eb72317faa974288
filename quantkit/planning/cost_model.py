"""Predicted time of a decode step, from bytes, operations, launches and collectives, before anyone
has the machine.

    hardware = load_hardware("910b1")
    for prediction in ladder(parameters(config), config, scheme, hardware, devices=8, batch=8,
    context=640):
        print(prediction.level, prediction.tpot_ms)

The levels of a hardware file go from a floor that no program can beat up to naive execution; a
measured time that falls between two levels says what the program leaves on the table. No constant
is solved for from a measurement, but the form (overlapped parts: the slowest counts) was chosen
with the published 910B1 figures in view: it attributes time, it is not validated. `beside` says for
every published row how far off each level is. Assumptions, all of them in the hardware's YAML:
tensor parallelism over all devices; routing uniform, so E(1 - (1 - k/E)^B) experts are read;
activations stay on the chip; the parts of an operator either overlap (the slowest counts) or follow
one another; operators follow one another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.grids.schemes import Fp4Grid, Grid, IntGrid, Mxfp4Grid, Scheme
from quantkit.models import find_architecture
from quantkit.models.architecture import ModelConfig
from quantkit.models.table import Parameter
from quantkit.planning.hardware import Hardware, Level, SplitActivations

PARTS = ("hbm", "vector", "l2", "cube", "cache", "launches", "collectives")
_SCALE_BYTES, ROUTER_BYTES, DENSE_BYTES, _SUM_BYTES = 2, 4, 2, 4


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of one decode step at a level. `parts` (PARTS) say where they go; launches and
    collectives are counted."""

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
    """What one device touches for the weights of one kind in a step: `weights` values of `bytes`,
    `products` multiplications by x.

    undecoded: they are multiplied as the codes they are, in groups of `group`.
    """

    kind: str
    weights: float
    bytes: float
    products: float
    group: int = 0
    undecoded: bool = False


@dataclass(frozen=True)
class WholeStep:
    """What is decoded, by how many devices, for how many sequences of how many tokens."""

    config: ModelConfig
    scheme: Scheme
    hardware: Hardware
    devices: int
    batch: int
    context: int

    def predict(
        self, level: Level, loads: Iterable[tuple[WeightTraffic, Level]], name: str | None = None
    ) -> Prediction:
        """Cache, launches and collectives are the level's; each product is read and decoded as the
        level beside it says."""
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
        """Of one device, all layers. Latent attention keeps the whole latent on every rank."""
        per_token = self.config.cache.token_bytes(16, self.devices) * self.config.num_cached_layers
        return float(per_token * self.batch * self.context)


def ladder(
    parameters: list[Parameter],
    config: ModelConfig,
    scheme: Scheme,
    hardware: Hardware,
    *,
    devices: int,
    batch: int,
    context: int,
) -> list[Prediction]:
    """One prediction per level of the hardware, from the floor up.

    parameters: the model's table, config: its architecture's Config. batch: sequences decoded
    together; context: tokens each attends to, the mean over the steps that are meant.
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
    """The ladders of a model, from its config.json alone, for several batch sizes; JSON-ready."""
    if (
        scheme.outside
        or scheme.activation_bits == 4
        or (isinstance(scheme.weight, IntGrid) and scheme.weight.activation_bits == 8)
    ):
        raise QuantkitError(
            f"decoding times of {scheme.name} are not predicted: no rate of its products is known",
            "give --devices 8x64GiB",
        )
    architecture = find_architecture(config)
    parsed = architecture.Config.from_dict(config)
    rows = architecture.parameters(parsed)
    found = [
        ladder(rows, parsed, scheme, hardware, devices=devices, batch=batch, context=context)
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


def beside(
    published: dict[str, Any],
    config: dict[str, Any],
    scheme: Scheme,
    hardware: Hardware,
    *,
    devices: int,
) -> list[dict[str, Any]]:
    """Every row of a published grid with what each level predicts for it and how far off that is;
    JSON-ready.

    published: output_len, and rows of input_len, concurrency and tpot_ms or system_tps. A step
    attends to the input and, on average, half
    the output. error: predicted over published, less one.
    """
    architecture = find_architecture(config)
    parsed = architecture.Config.from_dict(config)
    parameters = architecture.parameters(parsed)
    found = []
    for row in published["rows"]:
        batch, context = (
            int(row["concurrency"]),
            int(row["input_len"]) + published["output_len"] // 2,
        )
        measured = row.get("tpot_ms") or 1000 * batch / row["system_tps"]
        levels = ladder(
            parameters, parsed, scheme, hardware, devices=devices, batch=batch, context=context
        )
        predicted = {
            one.level: {"tpot_ms": one.tpot_ms, "error": one.tpot_ms / measured - 1}
            for one in levels
        }
        found.append(
            {
                "input_len": int(row["input_len"]),
                "concurrency": batch,
                "published_ms": measured,
                "predicted": predicted,
            }
        )
    return found


def steps(predictions: list[Prediction]) -> list[tuple[str, str, dict[str, float]]]:
    """What each level adds to the one below it: (lower, upper, milliseconds by part), parts that
    change by less than 0.05 ms left out."""
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
    """What one of `devices` ranks reads in a decode step: quantized weights that are decoded,
    quantized linears that are not, 16-bit and 32-bit weights."""
    experts = len({row.expert for row in parameters if row.expert is not None})
    chosen = config.routing.num_experts_per_tok if config.routing else 0
    share = touched_share(experts, chosen, batch) if experts else 0.0
    group = getattr(grid, "group_size", 0) or 0
    decoded = undecoded = plain = router = products = 0.0
    for row in parameters:
        if row.mtp or row.role == "embedding":
            continue
        count = float(row.shape[0] * (row.shape[1] if len(row.shape) > 1 else 1)) / row.shares(
            devices
        )
        if row.expert is not None:
            decoded += count * share
            products += count * batch * chosen / experts
        elif row.role == "linear":
            # The executor runs a shared expert as one more of the routed, by the grouped product.
            alone = kind_of(grid) == "int4" and row.block != "shared_expert"
            if (
                split is not None
                and alone
                and split.takes(*_local_shape(row, devices), group, batch)
            ):
                undecoded += count
            else:
                decoded += count
                products += count * batch
        elif row.role.startswith("router"):
            router += count
        else:
            plain += count
    kind, size = kind_of(grid), bytes_per_weight(grid)
    return [
        WeightTraffic(kind, decoded, decoded * size, products),
        WeightTraffic(kind, undecoded, undecoded * size, undecoded * batch, group, True),
        WeightTraffic("dense", plain, plain * DENSE_BYTES, plain * batch),
        WeightTraffic("dense", router, router * ROUTER_BYTES, router * batch),
    ]


def _local_shape(row: Parameter, devices: int) -> tuple[float, float]:
    """Outputs and inputs of a linear on one device."""
    outputs, inputs = row.shape[0], row.shape[1]
    return outputs / (row.shares(devices) if row.split == "column" else 1), inputs / (
        devices if row.split == "row" else 1
    )


def touched_share(experts: int, top_k: int, batch: int) -> float:
    """Expected share of a layer's experts that `batch` tokens choose, choices uniform."""
    return float(1 - (1 - top_k / experts) ** batch)


def bytes_per_weight(grid: Grid) -> float:
    """As the Ascend layouts hold it: int4 with a 16-bit scale and offset per group, FP4 with a byte
    per group, int8 with one per row."""
    if isinstance(grid, Fp4Grid | Mxfp4Grid):
        return 0.5 + 1 / grid.group_size
    return grid.storage_bits / 8 + (2 * _SCALE_BYTES / grid.group_size if grid.group_size else 0.0)


def kind_of(grid: Grid) -> str:
    return "fp4" if isinstance(grid, Fp4Grid | Mxfp4Grid) else f"int{grid.storage_bits}"


def product_ms(
    load: WeightTraffic, level: Level, bandwidth: float, hardware: Hardware, batch: int
) -> dict[str, float]:
    """Reading, decoding and multiplying the weights of one kind. Overlapped: the slowest counts;
    serial: all do.

    The cube multiplies at least `cube_rows` rows by every weight it is given, and a decoded weight
    reaches it through the L2. Few rows may be multiplied on the vector cores instead; an overlapped
    level takes the faster way.
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
        alone = {
            "hbm": spent["hbm"],
            "vector": load.products * cost.vector_ops_per_row / (hardware.vector_gops * 1e6),
        }
        slowest_alone = max(alone, key=lambda part: alone[part])
        if alone[slowest_alone] < spent[slowest]:
            return {slowest_alone: alone[slowest_alone]}
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
    """Codes times pieces of x on the cube, at its rate for int8; the vector cores scale and add the
    sums of each group."""
    split = hardware.split_activations
    assert split is not None, "undecoded loads come of it"
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
    """Bytes that are written to the L2 and read again."""
    return size / (hardware.l2_write_gb_s * 1e6) + size / (hardware.l2_read_gb_s * 1e6)


def count_launches(config: ModelConfig, hardware: Hardware, name: str, scheme: Scheme) -> int:
    """Of a step. A list of INT8's own, where the hardware has one, stands beside the one that a
    level names."""
    layers = config.num_hidden_layers
    moe = sum(config.is_moe(layer) for layer in range(layers))
    counted = (
        hardware.launches.get(f"{name}_int8", hardware.launches[name])
        if scheme.activation_bits == 8
        else hardware.launches[name]
    )
    return (layers - moe) * counted.dense_layer + moe * counted.moe_layer + counted.step
