"""Mixed precision: options for linears on other grids than the scheme's, or kept, and the resulting
grids.

A kept linear stays as in the source: FP8 blocks if the format holds them and the engine loads them,
else 16 bits.

Linears named by patterns: kept in 16 bits (`ignore`), or on other grids than the scheme's
(`override`).

A pattern is the name of a module, or after "re:" a regular expression that matches from its
beginning, as in llm-compressor and compressed-tensors.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from quantkit.calibrate.sensitivity import linear_groups
from quantkit.checkpoint.formats.base import HEAD, Format
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.sizes import parse_bytes
from quantkit.engines.profiles import FormatChoice, MixtureChoice
from quantkit.grids.base import Grid, grid_label
from quantkit.grids.fp8_block import Fp8BlockGrid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import find_scheme
from quantkit.models.table import MLA_PROLOG_PROJECTIONS, Parameter
from quantkit.quantization.fitting import GROUP_SIZES, INT8, Allowed, in_groups_of

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
    outer: Mapping[str, Grid],
) -> dict[str, Grid]:
    """The grids without those of ignored linears, and with those of overrides, the last that
    matches. outer: the grids from which overrides of the head and of the embedding start; only a
    pattern that matches no linear of a layer means these. Raises QuantkitError for a pattern that
    matches nothing, and for linears that engines run as one operator and that would have several
    grids."""
    modules = [row.module for row in rows if len(row.shape) >= 2]
    found: dict[str, Grid] = dict(grids)
    for one in override:
        matched = _matching(one.pattern, modules)
        named = [module for module in matched if module in grids]
        start = grids if named else outer
        named = named or [module for module in matched if module in outer]
        if not named:
            tied = not any(row.role == "head" for row in rows)
            table = tied and any(row.module in matched for row in rows if row.role == "embedding")
            raise QuantkitError(
                f"override {str(one)!r}: what it matches is not quantized",
                f"override {HEAD}, too, which is tied to it" if table else "leave it out",
            )
        for module in named:
            grid = one.grid(start[module])
            if start is outer and isinstance(grid, IntGrid):
                outputs = next(row.shape[0] for row in rows if row.module == module)
                if outputs % grid.rank_multiple(inputs=False):  # zero points are packed along them
                    grid = grid.substitutes[-1]
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


def check_fits(
    rows: Sequence[Parameter], grids: Mapping[str, Grid], allowed: Allowed, base: Grid
) -> None:
    """Raises QuantkitError unless each of these linears can be stored, and loaded, on its grid; on
    `base`, the scheme's, in smaller groups, as `fit_grids` chooses."""
    for row in rows:
        grid = grids.get(row.module)
        if grid is None:
            continue
        sizes = GROUP_SIZES if grid == base else ()
        forms = (grid, *(in_groups_of(grid, size) for size in sizes))
        if not any(allowed.holds(row, form) for form in forms):
            raise QuantkitError(
                f"{row.module} {list(row.shape)} cannot be {grid_label(grid)} in "
                f"{allowed.format.name}, or its engine does not load that",
                _size_remedy(row.shape[1], grid)
                or "give another override, --format compressed-tensors, or another --engine",
            )


def _size_remedy(inputs: int, grid: Grid) -> str:
    """Which group size divides the input channels; empty where the grid's own does."""
    if not grid.group_size or inputs % grid.group_size == 0:
        return ""
    size = next((size for size in GROUP_SIZES if inputs % size == 0), None)
    if size is None:
        sizes = ", ".join(map(str, GROUP_SIZES))
        return f"none of {sizes} divides its {inputs} input channels: leave it in 16 bits"
    return f"give group_size={size}, which divides its {inputs} input channels"


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


FP8 = Fp8BlockGrid()

KINDS: dict[str, Callable[[Parameter], bool]] = {
    "attention": lambda row: row.block == "attention",
    "mlp": lambda row: row.block == "mlp",
    "shared": lambda row: row.block == "shared_expert",
    "experts": lambda row: row.block == "expert",
    "mtp": lambda row: row.mtp,
}
"""Kinds of sublayer that may be kept: latent or grouped attention, a dense layer's MLP, shared and
routed experts, MTP layers."""

PRESETS = ("experts-only", "int8-attention")
"""experts-only: routed experts are quantized; the rest is kept, in int8 if the source has FP8 that
the engine does not load. int8-attention: the linears before latent attention are int8, the rest on
the scheme's grid: Ascend NPUs have one operator for all of them, which takes int8 and no 4-bit
weights."""


@dataclass(frozen=True)
class Mixture:
    """Mixed precision in addition to a scheme, whose grid applies to all other linears.

    keep: kinds of sublayer that stay as in the source. preset: one of PRESETS. bits: per weight on
    average, over the linears that may be quantized, scales included; size: bytes of the output;
    with either of them grids are chosen. read_weight: from 0, where a grid's cost is its bytes
    stored, to 1, where it is its bytes read for a token; sensitivities: a file of an earlier run, None
    to measure them. ignore: patterns of modules that keep 16 bits; override: grids of others.
    """

    keep: tuple[str, ...] = ()
    preset: str | None = None
    bits: float | None = None
    size: int | None = None
    read_weight: float = 0.0
    ignore: tuple[str, ...] = ()
    override: tuple[Override, ...] = ()
    sensitivities: Path | None = None

    def __post_init__(self) -> None:
        """Raises QuantkitError for options that are invalid for any model."""
        unknown = [kind for kind in self.keep if kind not in KINDS]
        if unknown:
            raise QuantkitError(
                f"--keep {unknown[0]!r} is not a kind of sublayer", f"kinds are {', '.join(KINDS)}"
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise UsageError(
                f"preset {self.preset!r} is not known", f"choose one of {', '.join(PRESETS)}"
            )
        if self.bits is not None and self.size is not None:
            raise QuantkitError(
                "--bits and --size both say how large the output may be", "give one of them"
            )
        if self.bits is not None and not 0 < self.bits <= 32:
            raise QuantkitError(
                f"--bits {self.bits:g} is not a number of bits per weight", "give one such as 4.25"
            )
        if self.preset is not None and (self.keep or self.chooses):
            raise QuantkitError(
                f"--preset {self.preset} already defines what is kept",
                "leave out --keep, --bits and --size",
            )
        for pattern in self.ignore:
            matcher(pattern)
        if self.override and self.chooses:
            raise QuantkitError(
                "--bits and --size choose every grid", "leave out --override, or use --ignore"
            )
        if not 0 <= self.read_weight <= 1:
            raise QuantkitError(
                f"--read-weight {self.read_weight:g} is not between 0 and 1",
                "0 counts bytes stored, 1 bytes read",
            )
        if self.sensitivities is not None and not self.chooses:
            raise QuantkitError(
                "sensitivities are for grids that are chosen",
                "give --bits or --size with --sensitivities",
            )
        if self.read_weight and not self.chooses:
            raise QuantkitError(
                "--read-weight is for grids that are chosen", "give --bits or --size with it"
            )

    @property
    def chooses(self) -> bool:
        """Whether grids are chosen by their cost."""
        return self.bits is not None or self.size is not None

    def words(self) -> tuple[str, ...]:
        """Parts of an output's name; empty without mixed precision."""
        words = {
            self.preset: self.preset,
            f"without-{'-'.join(self.keep)}": self.keep,
            f"{self.bits}-bits": self.bits,
            "by-size": self.size,
            "by-pattern": self.ignore or self.override,
        }
        return tuple(word for word, given in words.items() if word and given)

    def options(self) -> list[str]:
        """As command-line options."""
        given = {
            "--keep": ",".join(self.keep),
            "--preset": self.preset,
            "--bits": self.bits,
            "--size": self.size and f"{self.size / 10**6}MB",
            "--read-weight": self.read_weight,
        }
        pairs: list[tuple[str, object]] = [
            (option, value) for option, value in given.items() if value
        ]
        pairs += [("--ignore", pattern) for pattern in self.ignore]
        pairs += [("--override", one) for one in self.override]
        return [text for option, value in pairs for text in (option, str(value))]

    def keeps(self, row: Parameter) -> bool:
        if self.preset == "experts-only":
            return row.block != "expert" or row.mtp
        return any(KINDS[kind](row) for kind in self.keep)


def read_mixture(
    *,
    keep: str | None = None,
    preset: str | None = None,
    bits: float | None = None,
    size: str | None = None,
    read_weight: float = 0.0,
    ignore: Sequence[str] | None = None,
    override: Sequence[str] | Mapping[str, Any] | None = None,
) -> Mixture:
    """From command-line options. keep: kinds separated by commas. override: see `read_overrides`."""
    kinds = (
        tuple(dict.fromkeys(kind.strip() for kind in keep.split(","))) if keep is not None else ()
    )
    nbytes, patterns = None if size is None else parse_bytes(size), ignore or ()
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    return Mixture(kinds, preset, bits, nbytes, read_weight, patterns, read_overrides(override))


def kept_grids(
    mixture: Mixture,
    rows: Iterable[Parameter],
    grids: Mapping[str, Grid],
    checkpoint: Checkpoint,
    choice: MixtureChoice | None,
    *,
    fp8: bool,
) -> dict[str, Grid]:
    """The grids of a scheme without those of kept linears; FP8 that stays is a grid of its own.

    choice: the engine's formats, None if no engine was named, or it supports no mixed precision.
    fp8: whether the output can hold FP8 blocks. Raises QuantkitError if the model has nothing of a
    kind to keep, or nothing would be quantized.
    """
    linears = [row for row in rows if row.role == "linear"]
    if mixture.preset == "int8-attention":
        return _with_int8_attention(linears, grids, choice)
    for kind in mixture.keep:
        if not any(KINDS[kind](row) for row in linears):
            there = [name for name, holds in KINDS.items() if any(map(holds, linears))]
            raise QuantkitError(
                f"--keep {kind}: the model has no such linear", f"it has {', '.join(there)}"
            )
    found = dict(grids)
    for row in linears:
        if mixture.keeps(row):
            rest = _rest(mixture, row, checkpoint, choice, fp8)
            found.pop(row.module, None)
            if rest is not None:
                found[row.module] = rest
    if not any(row.module in found for row in linears if not mixture.keeps(row)):
        what = (
            f"--preset {mixture.preset}" if mixture.preset else f"--keep {','.join(mixture.keep)}"
        )
        raise QuantkitError(
            f"{what} leaves no linear of this model to quantize", f"leave {what.split()[0]} out"
        )
    return found


def _with_int8_attention(
    linears: list[Parameter], grids: Mapping[str, Grid], choice: MixtureChoice | None
) -> dict[str, Grid]:
    taken = [row for row in linears if choice is None or choice.allows(row, INT8)]
    before = [
        row
        for row in taken
        if row.block == "attention" and row.projection in MLA_PROLOG_PROJECTIONS
    ]
    if {row.projection for row in before} != set(MLA_PROLOG_PROJECTIONS):
        engine = (
            f" that {choice.engine} takes in int8 together with this scheme's grid"
            if choice
            else ""
        )
        message = (
            "--preset int8-attention: the model has no latent attention with "
            f"{', '.join(MLA_PROLOG_PROJECTIONS)}{engine}"
        )
        raise QuantkitError(message, "use --scheme alone, or --preset experts-only")
    return {**grids, **{row.module: INT8 for row in before}}


def _rest(
    mixture: Mixture,
    row: Parameter,
    checkpoint: Checkpoint,
    choice: MixtureChoice | None,
    fp8: bool,
) -> Grid | None:
    """The grid of a kept linear; None: 16 bits."""
    if not is_fp8(checkpoint, row):
        return None
    if fp8 and (choice is None or choice.allows(row, FP8)):
        return FP8
    return (
        INT8
        if mixture.preset is not None and choice is not None and choice.allows(row, INT8)
        else None
    )


def is_fp8(checkpoint: Checkpoint, row: Parameter) -> bool:
    """Whether the source has the linear in FP8 blocks of 128 x 128."""
    return checkpoint.is_on(row.module, FP8)


def engine_subset(
    target: Format, choice: FormatChoice | MixtureChoice, rows: Iterable[Parameter]
) -> Format:
    """`target` as one engine loads it: quantizing only the rows that `choice` allows, with the
    engine's keys in the config block."""
    return cast(Format, _Narrowed(target, choice, rows))


class _Narrowed:
    def __init__(
        self, target: Format, choice: FormatChoice | MixtureChoice, rows: Iterable[Parameter]
    ) -> None:
        self._target, self._keys = target, choice.quantization_config
        self._allowed = {row.module for row in rows if choice.quantizes(row)}
        self.outer = tuple(role for role in target.outer if role in choice.parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return module in self._allowed and self._target.quantizes(module, role, mtp=mtp)

    def config_block(
        self,
        grid: Grid | None,
        quantized: Mapping[str, Grid | None],
        unquantized: Sequence[TensorSpec],
    ) -> dict[str, Any]:
        block = self._target.config_block(grid, quantized, unquantized)
        return {**block, **self._keys} if block else block
