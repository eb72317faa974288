"""What to write so that an engine loads a scheme: the first load of its profile that holds it."""

from dataclasses import dataclass, replace
from typing import Any

from quantkit.engines.profiles import Device, LoadRule, Part, find_engine, grid_name, part_of
from quantkit.errors import QuantkitError
from quantkit.models.table import Parameter
from quantkit.schemes import Grid, IntGrid, Scheme


@dataclass(frozen=True)
class FormatChoice:
    """What to write so that an engine loads a scheme: the format, the grid it takes there, and the parts to quantize.

    `quantization_config` holds keys to add to that block of config.json. `launch` are options of the engine's command line.
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


def choose(engine: str, scheme: Scheme, *, device: Device | None = None, format: str | None = None) -> FormatChoice:
    """The engine's first load that holds the scheme, on `device` and in `format` where those are given.

    An asymmetric int4 grid becomes symmetric where the engine has only that. Raises QuantkitError with the engine's reason.
    """
    profile = find_engine(engine)
    wanted = grid_name(scheme.weight)
    grids = {wanted: scheme.weight}
    if isinstance(scheme.weight, IntGrid) and wanted == "int4-asymmetric":
        grids["int4-symmetric"] = replace(scheme.weight, symmetric=True)
    for load in profile.loads:
        asked = (format is None or load.format == format) and (device is None or device in load.devices)
        held = [grid for name, grid in grids.items() if name in load.grids]
        if asked and held and load.format in scheme.formats:
            return _choice(profile.engine, load, held[0])
    where = (f" in format {format}" if format else "") + (f" on {device}" if device else "")
    reason = profile.reason(format, None, wanted, device)
    loads = sorted({f"{load.format} ({grid})" for load in profile.loads for grid in load.grids if device is None or device in load.devices})
    raise QuantkitError(f"{engine} does not load {scheme.name}{where}: {reason}", f"it loads {', '.join(loads)}")


def _choice(engine: str, load: LoadRule, grid: Grid) -> FormatChoice:
    keys: dict[str, Any] = {key: getattr(grid, key) for key in load.quantization_keys}
    # Formats never take kv_b_proj: it is absorbed at decoding, and Ascend engines and vLLM on CPU need it plain.
    parts = tuple(part for part in load.may if part != "kv_b")
    return FormatChoice(engine, load.format, load.variant, grid, parts, load.mtp != "plain", keys, load.launch, load.notes)
