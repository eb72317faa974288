"""Linears named by patterns: kept in 16 bits (`ignore`), or on other grids than the scheme's
(`override`).

A pattern is the name of a module, or after "re:" a regular expression that matches from its
beginning, as in llm-compressor and compressed-tensors.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from quantkit.calibrate.sensitivity import linear_groups
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, grid_label
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import find_scheme
from quantkit.models.table import Parameter
from quantkit.quantization.fitting import INT8, Allowed

_KEYS = ("scheme", "bits", "group_size")
_FORM = "write 'PATTERN scheme=NAME', bits=4, 8 or 16, or group_size=N"


@dataclass(frozen=True)
class Override:
    """The grid of the linears that match `pattern`: of another scheme, or the scheme's with other
    bits or group size. bits 8 is INT8 per channel with INT8 activations, in groups with 16-bit
    ones; bits 16 keeps them."""

    pattern: str
    scheme: str | None = None
    bits: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Raises QuantkitError for what is invalid for any model."""
        if self.scheme is not None:
            find_scheme(self.scheme)
        size = self.group_size
        if (
            (self.scheme is None and self.bits is None and size is None)
            or (self.scheme is not None and self.bits is not None)
            or self.bits not in (None, 4, 8, 16)
            or (size is not None and (self.bits == 16 or size < 1))
        ):
            raise QuantkitError(f"override {str(self)!r} makes no sense", _FORM)
        matcher(self.pattern)

    def __str__(self) -> str:
        given = {key: getattr(self, key) for key in _KEYS}
        return " ".join(
            [self.pattern, *(f"{key}={value}" for key, value in given.items() if value is not None)]
        )

    def grid(self, own: Grid) -> Grid | None:
        """In place of `own`, which the scheme gives; None: 16 bits."""
        if self.bits == 16:
            return None
        grid = own if self.scheme is None else find_scheme(self.scheme).weight
        if self.bits == 8:
            grid = INT8 if self.group_size is None else IntGrid(8, self.group_size, symmetric=True)
        elif self.bits == 4 and grid.bits != 4:
            grid = IntGrid(4, self.group_size or 128, symmetric=False)
        if self.group_size is None:
            return grid
        sized = None if grid.group_size is None else grid.with_group_size(self.group_size)
        if sized is None:
            raise QuantkitError(
                f"override {str(self)!r}: {grid_label(grid)} has no group size to choose",
                "leave out group_size",
            )
        return sized


def read_overrides(given: Sequence[str] | Mapping[str, Any] | None) -> tuple[Override, ...]:
    """From texts 'PATTERN KEY=VALUE ...', or a mapping from patterns to mappings of these keys."""
    pairs: Iterable[tuple[str, Any]]
    if isinstance(given, Mapping):
        pairs = given.items()
    else:
        texts = [given] if isinstance(given, str) else given or ()
        split = [text.split() or [""] for text in texts]
        pairs = [
            (words[0], dict(word.split("=", 1) for word in words[1:] if "=" in word))
            for words in split
        ]
        if wrong := [w for words in split for w in words[1:] if "=" not in w]:
            raise QuantkitError(f"{wrong[0]!r} in an override is no KEY=VALUE", _FORM)
    found = []
    for pattern, values in pairs:
        if not isinstance(values, Mapping) or not set(values) <= set(_KEYS):
            raise QuantkitError(f"override {pattern!r} makes no sense: {values!r}", _FORM)
        try:
            numbers = {key: int(values[key]) for key in _KEYS[1:] if values.get(key) is not None}
        except (TypeError, ValueError) as error:
            raise QuantkitError(f"override {pattern!r}: {values!r} is no number", _FORM) from error
        found.append(Override(pattern, values.get("scheme"), **numbers))
    return tuple(found)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a module's name matches. Raises QuantkitError for no regular expression."""
    if not pattern.startswith("re:"):
        return pattern.__eq__
    try:
        compiled = re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise QuantkitError(
            f"{pattern!r} is no regular expression: {error}", "write one as Python's re reads it"
        ) from error
    return lambda name: compiled.match(name) is not None


def overridden_grids(
    ignore: Sequence[str],
    override: Sequence[Override],
    rows: Sequence[Parameter],
    grids: Mapping[str, Grid],
) -> dict[str, Grid]:
    """The grids without those of ignored linears, and with those of overrides, the last that
    matches. Raises QuantkitError for a pattern that matches nothing, and for linears that engines
    run as one operator and that would have several grids."""
    modules = [row.module for row in rows if len(row.shape) >= 2]
    found: dict[str, Grid] = dict(grids)
    for one in override:
        named = [module for module in _matching(one.pattern, modules) if module in grids]
        if not named:
            raise QuantkitError(
                f"override {str(one)!r}: what it matches is not quantized", "leave it out"
            )
        for module in named:
            grid = one.grid(grids[module])
            if grid is None:
                found.pop(module, None)
            else:
                found[module] = grid
    for pattern in ignore:
        for module in _matching(pattern, modules):
            found.pop(module, None)
    if not found:
        raise QuantkitError("no linear of this model is left to quantize", "ignore less")
    for group in linear_groups(row for row in rows if row.module in grids):
        own = {found.get(module) for module in group.modules}
        if len(own) > 1:
            first, other = (
                next(module for module in group.modules if found.get(module) == grid)
                for grid in list(own)[:2]
            )
            raise QuantkitError(
                f"{first} and {other} are run as one operator and would have several grids",
                "let the pattern match both or neither",
            )
    return found


def check_fits(rows: Sequence[Parameter], grids: Mapping[str, Grid], allowed: Allowed) -> None:
    """Raises QuantkitError unless each of these linears can be stored, and loaded, on its grid."""
    for row in rows:
        grid = grids.get(row.module)
        if grid is not None and not allowed.holds(row, grid):
            raise QuantkitError(
                f"{row.module} {list(row.shape)} cannot be {grid_label(grid)} in "
                f"{allowed.format.name}, or its engine does not load that",
                "give another override, --format compressed-tensors, or another --engine",
            )


def _matching(pattern: str, modules: Sequence[str]) -> list[str]:
    found = list(filter(matcher(pattern), modules))
    if found:
        return found
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", module) for module in modules))
    wanted = re.sub(r"\\d[+*]|\[0-9\][+*]|\d+", "N", re.sub(r"^re:|\.\*|[\\^$()?]", "", pattern))
    last = {kind.rpartition(".")[2]: kind for kind in kinds}
    near = get_close_matches(wanted, kinds, 3, 0.5) or [
        last[name] for name in get_close_matches(wanted.rpartition(".")[2], last, 3, 0.5)
    ]
    raise QuantkitError(
        f"pattern {pattern!r} matches no module of this model",
        f"near are {', '.join(near or kinds[:3])}; 're:.*{(near or kinds)[0].rpartition('.')[2]}$' "
        "matches by regular expression",
    )
