"""Entries that an engine needs in config.json and in the list of unquantized modules in addition to
what the model needs, if there is one right value.

Each is a rule of the engine's profile (recipes/engines): keys with a fixed value, keys under the
names of another release, keys that the loader reads at the top of the description, and modules
under the engine's own names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.formats.base import HEAD
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import find_load
from quantkit.engines.profiles import LoadRule, MixtureRule, find_engine
from quantkit.grids.base import Grid
from quantkit.models.pangu_ultra_moe import FIRST_RELEASE_NAMES
from quantkit.models.stored_parameters import read_model
from quantkit.models.table import Parameter

_SYNONYMS: dict[str, str] = {
    **FIRST_RELEASE_NAMES,
    **{later: first for first, later in FIRST_RELEASE_NAMES.items()},
}
"""Names of the same number in two releases of an architecture, in both directions."""


@dataclass
class EngineKeys:
    """config: keys to set in config.json; block: in its quantization_config; listed: modules to
    list as unquantized."""

    config: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)

    @property
    def changes(self) -> list[str]:
        """Each change as text."""
        found = [f"{key} in config.json is {value!r}" for key, value in self.config.items()]
        found += [
            f"{key} at the top of quantization_config is {value!r}"
            for key, value in self.block.items()
        ]
        return found + ([f"{', '.join(self.listed)} listed as unquantized"] if self.listed else [])


def missing_keys(engine: str, checkpoint: Checkpoint) -> EngineKeys:
    """Entries that the checkpoint lacks for the engine. Raises QuantkitError for an unknown engine,
    or a checkpoint of an unknown architecture."""
    profile, config, found = find_engine(engine), checkpoint.config, EngineKeys()
    model_type = str(config.get("model_type"))
    found.config = {
        key: value
        for key, value in profile.config.get(model_type, {}).items()
        if config.get(key) != value
    }
    for key in profile.reads.get(model_type, ()):
        if key not in config and (other := _SYNONYMS.get(key)) in config:
            found.config[key] = config[other]
    load = find_load(engine, checkpoint)
    if load is None:
        return found
    block: Mapping[str, Any] = config.get("quantization_config") or {}
    grid = _int4_grid(checkpoint)
    for key in load.quantization_keys if grid is not None and block else ():
        if block.get(key) != getattr(grid, key):
            found.block[key] = getattr(grid, key)
    found.listed = _unlisted_modules(load, checkpoint, read_model(checkpoint).rows)
    return found


def _int4_grid(checkpoint: Checkpoint) -> Grid | None:
    """The grid of the 4-bit linears; None if there is none, or more than one."""
    grids = {
        linear.grid
        for linear in checkpoint.linears.values()
        if linear.grid is not None and linear.grid.kind == "int4"
    }
    return next(iter(grids)) if len(grids) == 1 else None


def _unlisted_modules(
    load: LoadRule | MixtureRule, checkpoint: Checkpoint, rows: list[Parameter]
) -> list[str]:
    """A tied head, and linears of an MTP layer that the engine has another name for."""
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if ignored is None:
        return []
    tied = not any(row.role == "head" and not row.mtp for row in rows)
    names = (
        [HEAD]
        if getattr(load, "tied_head", None) is not None and tied and not ignored(HEAD)
        else []
    )
    prefix = getattr(load, "mtp_prefix", None)
    unquantized = [
        row
        for row in rows
        if row.mtp
        and row.role in ("linear", "kv_b", "mtp_proj", "head")
        and row.module not in checkpoint.linears
    ]
    renamed = [
        f"{prefix}.{row.within_layer}"
        for row in unquantized
        if prefix is not None and ignored(row.module)
    ]
    return names + [name for name in renamed if not ignored(name)]
