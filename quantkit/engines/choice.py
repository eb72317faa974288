"""What to write so that an engine loads a scheme: the first load of its profile that holds it."""

from dataclasses import dataclass
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.engines.profiles import (
    Device,
    LoadRule,
    Part,
    find_engine,
    part_of,
)
from quantkit.grids.base import Grid
from quantkit.grids.names import GridName
from quantkit.grids.schemes import Scheme
from quantkit.models.table import Parameter


@dataclass(frozen=True)
class FormatChoice:
    """What to write so that an engine loads a scheme: the format, the grid it takes there, and the
    parts to quantize.

    `quantization_config` holds keys to add to that block of config.json. `launch` are options of
    the engine's command line.
    """

    engine: str
    format: str
    variant: str
    grid: Grid
    parts: tuple[Part, ...]
    mtp: bool
    quantization_config: dict[str, Any]
    launch: tuple[str, ...]
    notes: str

    def quantizes(self, row: Parameter) -> bool:
        """Whether the tensor is to be quantized for this engine."""
        return part_of(row) in self.parts and (self.mtp or not row.mtp)


def choose(
    engine: str, scheme: Scheme, *, device: Device | None = None, format: str | None = None
) -> FormatChoice:
    """The engine's first load that holds the scheme, on `device` and in `format` where those are
    given.

    An asymmetric int4 grid becomes symmetric where the engine has only that. Raises QuantkitError
    with the engine's reason.
    """
    profile = find_engine(engine)
    keeps = scheme.cache is None or scheme.cache in profile.caches
    wanted = scheme.weight.engine_name
    grids = {grid.engine_name: grid for grid in scheme.weight.substitutes}
    for load in profile.loads:
        asked = (
            keeps
            and (format is None or load.format == format)
            and (device is None or device in load.devices)
        )
        held = [grid for name, grid in grids.items() if name in load.grids]
        if asked and held and load.format in scheme.formats:
            return _choice(profile.engine, load, held[0])
    where = (f" in format {format}" if format else "") + (f" on {device}" if device else "")
    reason = (
        profile.reason(format, None, wanted, device)
        if keeps
        else f"it reads no steps of an {scheme.cache} cache"
    )
    loads = sorted(
        {
            f"{load.format} ({grid})"
            for load in profile.loads
            for grid in load.grids
            if device is None or device in load.devices
        }
    )
    raise QuantkitError(
        f"{engine} does not load {scheme.name}{where}: {reason}", f"it loads {', '.join(loads)}"
    )


@dataclass(frozen=True)
class MixtureChoice:
    """Linears on several grids as an engine loads them. grids: by name of the grid, the parts that
    may be on it; base: the grid of what is asked no more of. The rest is as in `FormatChoice`."""

    engine: str
    format: str
    base: Grid
    grids: dict[GridName, tuple[Part, ...]]
    mtp: bool
    quantization_config: dict[str, Any]
    launch: tuple[str, ...]
    notes: str

    def allows(self, row: Parameter, grid: Grid) -> bool:
        """Whether the engine takes the tensor on this grid."""
        keys_agree = all(
            getattr(grid, key) == value
            for key, value in self.quantization_config.items()
            if grid.kind == "int4"
        )
        return (
            any(
                grid.engine_name == name and part_of(row) in parts
                for name, parts in self.grids.items()
            )
            and (self.mtp or not row.mtp)
            and keys_agree
        )

    def quantizes(self, row: Parameter) -> bool:
        """Whether the tensor may be on any grid."""
        return any(part_of(row) in parts for parts in self.grids.values()) and (
            self.mtp or not row.mtp
        )


def choose_mixture(
    engine: str, scheme: Scheme, *, device: Device | None = None, format: str | None = None
) -> MixtureChoice:
    """The engine's first mixture with the scheme's grid among others, symmetric where it has only
    that.

    Raises QuantkitError where it loads one grid a checkpoint, or no mixture with this one.
    """
    profile = find_engine(engine)
    rules = [
        rule
        for rule in profile.mixtures
        if (device is None or device in rule.devices) and (format is None or rule.format == format)
    ]
    for rule in rules:
        for base in scheme.weight.substitutes:
            if base.engine_name in rule.grids:
                keys: dict[str, Any] = {key: getattr(base, key) for key in rule.quantization_keys}
                return MixtureChoice(
                    engine,
                    rule.format,
                    base,
                    dict(rule.grids),
                    rule.mtp != "plain",
                    keys,
                    rule.launch,
                    rule.notes,
                )
    where = (f" in format {format}" if format else "") + (f" on {device}" if device else "")
    there = sorted({f"{rule.format} ({', '.join(rule.grids)})" for rule in profile.mixtures})
    if not there:
        raise QuantkitError(
            f"{engine} loads one grid a checkpoint{where}, no mixture",
            "use --scheme alone, or another --engine",
        )
    raise QuantkitError(
        f"{engine} loads no mixture with the weights of {scheme.name}{where}",
        f"it loads {'; '.join(there)}",
    )


def _choice(engine: str, load: LoadRule, grid: Grid) -> FormatChoice:
    keys: dict[str, Any] = {key: getattr(grid, key) for key in load.quantization_keys}
    # Formats never take kv_b_proj: it is absorbed at decoding, and Ascend engines and vLLM on CPU
    # need it plain.
    parts = tuple(part for part in load.may if part != "kv_b")
    return FormatChoice(
        engine,
        load.format,
        load.variant,
        grid,
        parts,
        load.mtp != "plain",
        keys,
        load.launch,
        load.notes,
    )
