"""Which engine loads what, read from the engines' own sources: recipes/engines/*.yaml, and the
format to write for an engine.

An engine has a list of loads: a format on one weight grid, the devices it runs on, and the parts of
a model that may or must be quantized.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import Field

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.settings import Strict, read_yaml
from quantkit.grids.base import Grid
from quantkit.grids.names import CacheCodes, GridName
from quantkit.grids.schemes import SCHEMES, Scheme
from quantkit.models.table import Parameter

Device = Literal["cuda", "npu", "cpu"]
Part = Literal[
    "qkv_a", "attention", "kv_b", "mlp", "shared_experts", "experts", "head", "embedding"
]
"""Parts of a model that an engine treats as one. qkv_a: q_a_proj and kv_a_proj_with_mqa, which
every engine fuses. head, embedding: of the main model, with a tensor each."""


@dataclass(frozen=True)
class LoadProblem:
    """Why an engine will not load a checkpoint ("error"), or will lose accuracy or a feature
    ("warning"), and what to do."""

    severity: Literal["error", "warning"]
    problem: str
    remedy: str
    launch: tuple[str, ...] = ()
    """Options of the engine's command that are the remedy."""

    @classmethod
    def error(cls, problem: str, remedy: str) -> "LoadProblem":
        return cls("error", problem, remedy)

    @classmethod
    def warning(cls, problem: str, remedy: str) -> "LoadProblem":
        return cls("warning", problem, remedy)


class Rule(Strict):
    """What an engine loads of one format. `notes`: of the loader matrix. launch_notes,
    expert_launch_notes: what to know of a launch, the latter of a model with experts. `run`: the
    command of this repository that demonstrates it, if any, and `run_on` the machine, the release
    and the date of that."""

    format: str
    variant: str
    devices: tuple[Device, ...]
    # Linears of an MTP layer: quantized like the rest, unquantized ("plain"), or either.
    mtp: Literal["any", "quantized", "plain"] = "any"
    # The engine's name for the MTP layer when it looks up a module in the list of unquantized ones.
    mtp_prefix: str | None = None
    # Fused siblings whose FP4 global scales differ.
    fp4_siblings: Literal["error", "warn"] | None = None
    # What to add to a checkpoint so that the engine keeps a head that is tied to the embedding in
    # 16 bits; None if it always does.
    tied_head: str | None = None
    # Keys at the top of quantization_config that must repeat the grid's own value.
    quantization_keys: tuple[Literal["group_size"], ...] = ()
    launch: tuple[str, ...] = ()
    launch_notes: str = ""
    expert_launch_notes: str = ""
    notes: str = ""
    sources: tuple[str, ...]
    run: str | None = None
    run_on: str | None = Field(None, pattern=r"^\w+, \S+ [\d.]+, \d{4}-\d\d-\d\d$")


class LoadRule(Rule):
    """One grid in a checkpoint: of `grids`, in the parts that `may` be quantized."""

    grids: tuple[GridName, ...]
    may: tuple[Part, ...]
    must: tuple[Part, ...] = ()
    # The parts of `may` that may be int4 where the rest is int8; empty if a checkpoint is on one
    # grid.
    four_bits: tuple[Part, ...] = ()
    # Values of quant_algo that hf_quant_config.json may have by itself; empty if the engine accepts
    # any there.
    side_algorithms: tuple[str, ...] = ()
    # Model types whose unquantized fused linears are found in the list of unquantized modules by
    # their own names; those of other models only by the fused module's name, except q_a and kv_a.
    # None: they are always found.
    finds_unquantized: tuple[str, ...] | None = None
    # Whether transform_config's rotations of inputs are applied; else they are left out unnoticed.
    rotates_inputs: bool = False
    # Whether int4 experts whose intermediate size per GPU is at most group_size are computed
    # incorrectly.
    narrow_experts_wrong: bool = False


class MixtureRule(Rule):
    """A combination of grids in one checkpoint that an engine loads. grids: the parts that may be
    on each; everything else is unquantized.

    Linears that the engine fuses, and all routed experts of a layer, are on one grid.
    """

    grids: dict[GridName, tuple[Part, ...]]

    def parts_on(self, grid: Grid) -> tuple[Part, ...]:
        """Parts that may be on this grid."""
        return next((parts for name, parts in self.grids.items() if name == grid.engine_name), ())


RuleKind = TypeVar("RuleKind", bound=LoadRule | MixtureRule)


class Refusal(Strict):
    """Why an engine does not load something; an empty list matches everything."""

    formats: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    grids: tuple[GridName, ...] = ()
    devices: tuple[Device, ...] = ()
    reason: str


class ShapeRule(Strict):
    """What an engine's kernels ask of the inputs of a linear: multiples of this number. launch:
    options with which another kernel takes every shape."""

    formats: tuple[str, ...]
    grids: tuple[GridName, ...]
    devices: tuple[Device, ...]
    inputs: int
    launch: tuple[str, ...] = ()
    kernel: str
    sources: tuple[str, ...]


class EngineProfile(Strict):
    """An engine's profile. `release` is the version or commit whose sources were read, `read` the
    date of that.

    By model_type in config.json: `config`, keys that must have this value; `reads`, keys that must
    exist under this name; `formats`, the formats in which it is loaded, if not all of `loads`, with the
    variant if not in all of them; `parts`, those that its code quantizes, if not all that a rule
    has; `drafts` and `heads`, the formats in which it loads MTP layers and a DSpark head, if not
    all.
    """

    engine: str
    release: str
    read: str
    summary: str
    architectures: tuple[str, ...]
    config: dict[str, dict[str, Any]] = Field({})
    reads: dict[str, tuple[str, ...]] = Field({})
    formats: dict[str, tuple[str, ...]] = Field({})
    parts: dict[str, tuple[Part, ...]] = Field({})
    drafts: dict[str, tuple[str, ...]] = Field({})
    heads: dict[str, tuple[str, ...]] = Field({})
    # Model types whose head its code never quantizes, and those whose embedding it does, in rules that
    # have the part.
    plain_heads: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    # Model types with a quantized cache of these codes, with scales from the checkpoint (int8:
    # ModelSlim's).
    caches: dict[CacheCodes, tuple[str, ...]] = Field({})
    # Formats with whose weights it reads FP8 scales of a KV cache, and the options that turn such a
    # cache on.
    fp8_caches: dict[str, tuple[str, ...]] = Field({})
    # Per head of keys and values, not of a whole layer alone.
    fp8_cache_heads: bool = False
    # Model types that it runs in one pipeline stage only if their head is tied to the embedding.
    tied_head_one_stage: tuple[str, ...] = ()
    # Group sizes of int4 that its kernels support; empty: unknown.
    int4_groups: tuple[int, ...] = ()
    loads: tuple[LoadRule, ...]
    mixtures: tuple[MixtureRule, ...] = ()
    refuses: tuple[Refusal, ...] = ()
    shapes: tuple[ShapeRule, ...] = ()

    def of_model(self, rule: RuleKind, model_type: object) -> RuleKind:
        """The rule with those of its parts that the engine's code of a model quantizes."""
        own = self.parts.get(str(model_type), get_args(Part))
        lacks = {
            "head": model_type in self.plain_heads,
            "embedding": model_type not in self.embeddings,
        }

        def kept(parts: tuple[Part, ...]) -> tuple[Part, ...]:
            return tuple(part for part in parts if part in own and not lacks.get(part))

        if isinstance(rule, MixtureRule):
            grids = {grid: kept(parts) for grid, parts in rule.grids.items()}
            return rule.model_copy(update={"grids": grids})
        fields = {name: kept(getattr(rule, name)) for name in ("may", "must", "four_bits")}
        return rule.model_copy(update=fields)

    def loads_drafts(self, model_type: object, format: str, variant: str, block: bool) -> bool:
        """Whether it loads what drafts tokens in a checkpoint of this format: a DSpark head if
        `block`, else MTP layers."""
        listed = (self.heads if block else self.drafts).get(str(model_type), (format,))
        return bool({format, f"{format} {variant}"} & {*listed})

    def shape_rules(self, format: str, grid: Grid, device: Device | None) -> list[ShapeRule]:
        """Those for linears of a format on a grid; without a device, of the only one that loads
        them."""
        rules: list[LoadRule | MixtureRule] = [*self.loads, *self.mixtures]
        devices = {
            one
            for rule in rules
            if rule.format == format and grid.engine_name in rule.grids
            for one in rule.devices
            if device in (None, one)
        }
        return [
            rule
            for rule in self.shapes
            if format in rule.formats
            and grid.engine_name in rule.grids
            and devices
            and devices <= {*rule.devices}
        ]

    def covers_format(self, format: str) -> bool:
        """Whether a rule or a refusal covers the format; for other formats it is unknown whether
        the engine loads them."""
        refused = {name for refusal in self.refuses for name in refusal.formats}
        return format in refused | {rule.format for rule in self.loads} | {
            rule.format for rule in self.mixtures
        }

    def unsupported_group_size(self, grid: Grid) -> str:
        """What its kernels do not support of a grid; empty if they do."""
        if (
            not self.int4_groups
            or grid.kind != "int4"
            or grid.group_size in (None, *self.int4_groups)
        ):
            return ""
        *sizes, last = map(str, self.int4_groups)
        return (
            f"{self.engine} reads int4 in groups of {', '.join(sizes)} or {last}, not of "
            f"{grid.group_size}"
        )

    def reason(
        self, format: str | None, variant: str | None, grid: str, device: Device | None
    ) -> str:
        """Why it does not load that: the reason of a refusal, or that it has no reader. None
        matches anything."""

        def covers(listed: tuple[str, ...], value: str | None) -> bool:
            return not listed or value in listed

        for refusal in self.refuses:
            matches = covers(refusal.formats, format) and covers(refusal.variants, variant)
            if matches and covers(refusal.grids, grid) and covers(refusal.devices, device):
                return refusal.reason
        devices = sorted({device for load in self.loads for device in load.devices})
        if device is not None and device not in devices:
            return f"it runs on {' and '.join(devices)}"
        if not self._names(grid):
            return f"its profile does not say whether it reads {grid} weights"
        return "it has no reader for that"

    def _names(self, grid: str) -> bool:
        """Whether any rule or refusal is about this grid."""
        rules = any(grid in rule.grids for rule in self.loads)
        mixtures = any(grid in mixture.grids for mixture in self.mixtures)
        return rules or mixtures or any(grid in refusal.grids for refusal in self.refuses)


@cache
def find_engine(name: str) -> EngineProfile:
    """The profile of that name. Raises UsageError listing the known ones."""
    names = engine_names()
    if name not in names:
        raise UsageError(f"engine {name!r} is not known", f"choose one of {', '.join(names)}")
    return read_yaml(
        asset("recipes", "engines", f"{name}.yaml"), EngineProfile, "restore that file"
    )


def engine_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in asset("recipes", "engines").glob("*.yaml")))


def part_of(row: Parameter) -> Part | None:
    """The part of the model that a tensor belongs to; None if no engine takes it quantized."""
    if row.role == "kv_b":
        return "kv_b"
    if row.role in ("head", "embedding") and row.layer is None:
        return row.role
    if row.role != "linear":
        return None
    match row.block:
        case "expert":
            return "experts"
        case "shared_expert":
            return "shared_experts"
        case "attention":
            return "qkv_a" if row.projection in ("q_a", "kv_a") else "attention"
        case _:
            return "mlp"


@dataclass(frozen=True)
class _Choice(Generic[RuleKind]):
    """What to write so that an engine loads a scheme: by a rule of its profile, on a grid of the
    scheme that it takes."""

    engine: str
    rule: RuleKind
    grid: Grid

    @property
    def format(self) -> str:
        return self.rule.format

    @property
    def mtp(self) -> bool:
        """Whether an MTP layer may be quantized."""
        return self.rule.mtp != "plain"

    @property
    def quantization_config(self) -> dict[str, Any]:
        """Keys to add to that block of config.json."""
        return {key: getattr(self.grid, key) for key in self.rule.quantization_keys}

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those to quantize. Formats never quantize kv_b_proj: it is absorbed at decoding, and
        Ascend engines and vLLM on CPU need it unquantized."""
        may = self.rule.may if isinstance(self.rule, LoadRule) else chain(*self.rule.grids.values())
        return tuple(dict.fromkeys(part for part in may if part != "kv_b"))

    def of_model(self, model_type: object) -> Self:
        """With those of its parts that the engine's code of a model quantizes."""
        return replace(self, rule=find_engine(self.engine).of_model(self.rule, model_type))

    def quantizes(self, row: Parameter) -> bool:
        """Whether the tensor is to be quantized for this engine."""
        return part_of(row) in self.parts and (self.mtp or not row.mtp)


class FormatChoice(_Choice[LoadRule]):
    """One grid for all that is quantized."""


class MixtureChoice(_Choice[MixtureRule]):
    """Mixed precision. grid: of everything that no other is chosen for."""

    def allows(self, row: Parameter, grid: Grid) -> bool:
        """Whether the engine accepts the tensor on this grid."""
        return (
            part_of(row) in self.rule.parts_on(grid)
            and (self.mtp or not row.mtp)
            and (grid.kind != "int4" or _agrees(grid, self.quantization_config))
        )


def _agrees(grid: Grid, keys: dict[str, Any]) -> bool:
    return all(getattr(grid, key) == value for key, value in keys.items())


def choose(
    engine: str, scheme: Scheme, *, device: Device | None = None, format: str | None = None
) -> FormatChoice:
    """The engine's first load that holds the scheme, on `device` and in `format` if given.

    An asymmetric int4 grid becomes symmetric if the engine supports only that. Raises QuantkitError
    with the engine's reason.
    """
    found = find_choice(engine, scheme, device=device, format=format)
    if found is not None:
        return found
    profile = find_engine(engine)
    where = (f" in format {format}" if format else "") + (f" on {device}" if device else "")
    reason = (
        profile.reason(format, None, scheme.weight.engine_name, device)
        if _reads_cache(profile, scheme)
        else f"it reads no scales of an {scheme.cache} cache"
    )
    raise QuantkitError(
        f"{engine} does not load {scheme.name}{where}: {reason}",
        _other_choice(engine, scheme, device, format),
    )


def find_choice(
    engine: str, scheme: Scheme, *, device: Device | None = None, format: str | None = None
) -> FormatChoice | None:
    """As `choose`; None if the engine does not load the scheme."""
    profile = find_engine(engine)
    grids = {grid.engine_name: grid for grid in reversed(scheme.weight.substitutes)}
    for load in profile.loads:
        matches = (format is None or load.format == format) and (
            device is None or device in load.devices
        )
        supported = [grid for name, grid in grids.items() if name in load.grids]
        if (
            matches
            and supported
            and load.format in scheme.formats
            and _reads_cache(profile, scheme)
        ):
            return FormatChoice(engine, load, supported[0])
    return None


def _reads_cache(profile: EngineProfile, scheme: Scheme) -> bool:
    return scheme.cache is None or scheme.cache in profile.caches


def _other_choice(engine: str, scheme: Scheme, device: Device | None, format: str | None) -> str:
    """Options with which the engine loads what is quantized, the same scheme if it can."""
    other = find_choice(engine, scheme, device=device)
    if other is not None:
        return f"use --format {other.format}"

    def loaded(format: str | None) -> list[Scheme]:
        return [
            one
            for one in SCHEMES.values()
            if find_choice(engine, one, device=device, format=format) is not None
        ]

    if schemes := loaded(format):
        return f"use {scheme_option(schemes, scheme.weight.bits)}"
    if schemes := loaded(None):
        return f"use {scheme_option(schemes, scheme.weight.bits)} without --format"
    return "use another engine"


def scheme_option(schemes: list[Scheme], bits: int) -> str:
    """`--scheme A, B or C`: those of `schemes` whose codes are nearest to so many bits."""
    off = min(abs(scheme.weight.bits - bits) for scheme in schemes)
    *names, last = [one.name for one in schemes if abs(one.weight.bits - bits) == off]
    return f"--scheme {', '.join(names)} or {last}" if names else f"--scheme {last}"


def choose_mixture(engine: str, scheme: Scheme, *, format: str | None = None) -> MixtureChoice:
    """The engine's first mixture that includes the scheme's grid, or its symmetric variant.

    Raises QuantkitError if it loads one grid per checkpoint, or no mixture with this one.
    """
    profile = find_engine(engine)
    rules = [rule for rule in profile.mixtures if format is None or rule.format == format]
    for rule in rules:
        for base in scheme.weight.substitutes:
            if base.engine_name in rule.grids:
                return MixtureChoice(engine, rule, base)
    where = f" in format {format}" if format else ""
    mixtures = sorted({f"{rule.format} ({', '.join(rule.grids)})" for rule in profile.mixtures})
    if not mixtures:
        raise QuantkitError(
            f"{engine} loads one grid per checkpoint{where}, no mixture",
            "use --scheme alone, or another --engine",
        )
    raise QuantkitError(
        f"{engine} loads no mixture with the weights of {scheme.name}{where}",
        f"it loads {'; '.join(mixtures)}",
    )
