"""Which engine loads what, as data read from the engines' own sources: recipes/engines/*.yaml.

An engine has a list of loads: a format on one weight grid, the devices it runs on there, and the
parts of a model that may or must be quantized in it.
"""

from functools import cache
from typing import Any, Literal

from pydantic import Field

from quantkit.common.assets import asset
from quantkit.common.errors import UsageError
from quantkit.common.settings import Strict, read_yaml
from quantkit.grids.base import Grid
from quantkit.grids.names import CacheCodes, GridName
from quantkit.models.table import Parameter

Device = Literal["cuda", "npu", "cpu"]
Part = Literal["qkv_a", "attention", "kv_b", "mlp", "shared_experts", "experts"]
"""Parts of a model an engine treats as one. qkv_a: q_a_proj and kv_a_proj_with_mqa, which every
engine fuses."""


class LoadRule(Strict):
    """One thing an engine loads. `notes` is for people; `run` is the command of the repository that
    shows it, if one does, and `run_on` says where it was run if not on a CPU by `release`."""

    format: str
    variant: str
    grids: tuple[GridName, ...]
    devices: tuple[Device, ...]
    may: tuple[Part, ...]
    must: tuple[Part, ...] = ()
    # Of `may`, those that may be int4 where the rest is int8; empty where a checkpoint is on one
    # grid.
    four_bits: tuple[Part, ...] = ()
    # Linears of a multi-token-prediction layer: quantized like the rest, left plain, or either.
    mtp: Literal["any", "quantized", "plain"] = "any"
    # What the engine calls the MTP layer when it looks a module up in the list of unquantized ones.
    mtp_prefix: str | None = None
    # Fused siblings whose FP4 global scales differ.
    fp4_siblings: Literal["error", "warn"] | None = None
    # The quant_algo that may stand in hf_quant_config.json alone; empty where the engine takes any
    # there.
    side_algorithms: tuple[str, ...] = ()
    # What to add to a checkpoint so that the engine leaves a head in 16 bits that is tied to the
    # embedding; None where it always does.
    tied_head: str | None = None
    # Keys at the top of quantization_config that must repeat the grid's own value.
    quantization_keys: tuple[Literal["group_size"], ...] = ()
    # Model types of which plain linears that the engine fuses are found in the list of unquantized
    # modules by their own names; those of other models by the fused module's name alone, but for
    # q_a and kv_a. None: they are always found.
    finds_plain: tuple[str, ...] | None = None
    launch: tuple[str, ...] = ()
    notes: str = ""
    # Whether int4 experts whose intermediate size on one GPU is not above group_size come out
    # wrong.
    narrow_experts_wrong: bool = False
    sources: tuple[str, ...]
    run: str | None = None
    run_on: str | None = None


class MixtureRule(Strict):
    """Linears on several grids in one checkpoint that an engine loads. grids: the parts that may be
    on each; what is on none is plain.

    Linears that the engine fuses, and all routed experts of a layer, are on one. Other fields: as
    of `LoadRule`.
    """

    format: str
    variant: str
    devices: tuple[Device, ...]
    grids: dict[GridName, tuple[Part, ...]]
    mtp: Literal["any", "quantized", "plain"] = "any"
    mtp_prefix: str | None = None
    fp4_siblings: Literal["error", "warn"] | None = None
    tied_head: str | None = None
    quantization_keys: tuple[Literal["group_size"], ...] = ()
    launch: tuple[str, ...] = ()
    notes: str = ""
    sources: tuple[str, ...]
    run: str | None = None
    run_on: str | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those that may be on some grid."""
        return tuple(dict.fromkeys(part for parts in self.grids.values() for part in parts))

    def parts_on(self, grid: Grid) -> tuple[Part, ...]:
        """Those that may be on this one."""
        return next((parts for name, parts in self.grids.items() if name == grid.engine_name), ())


class Refusal(Strict):
    """Why an engine does not load something; a list that is empty stands for all."""

    formats: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    grids: tuple[GridName, ...] = ()
    devices: tuple[Device, ...] = ()
    reason: str


class EngineProfile(Strict):
    """A profile. `release` is the version or commit whose sources were read.

    By model_type, of config.json: `config`, keys that must have this value; `reads`, keys that must
    be there by this name; `formats`, those in which it is loaded, where that is not all of `loads`.
    """

    engine: str
    release: str
    summary: str
    architectures: tuple[str, ...]
    config: dict[str, dict[str, Any]] = Field({})
    reads: dict[str, tuple[str, ...]] = Field({})
    formats: dict[str, tuple[str, ...]] = Field({})
    # Model types whose cache it keeps in these codes, by steps that a checkpoint holds.
    caches: dict[CacheCodes, tuple[str, ...]] = Field({})
    # Sizes of int4 groups that its kernels read; none: nothing is known of them.
    int4_groups: tuple[int, ...] = ()
    loads: tuple[LoadRule, ...]
    mixtures: tuple[MixtureRule, ...] = ()
    refuses: tuple[Refusal, ...] = ()

    def tells_of(self, format: str) -> bool:
        """Whether a rule or a refusal names the format; of others nobody looked whether the engine
        loads them."""
        named = {name for refusal in self.refuses for name in refusal.formats}
        return format in named | {rule.format for rule in self.loads} | {
            rule.format for rule in self.mixtures
        }

    def unread(self, grid: Grid) -> str:
        """What its kernels do not read of a grid; empty for none."""
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
        """Why it does not load that: what a refusal says, or that nothing is known of it. None
        stands for any."""

        def covers(listed: tuple[str, ...], value: str | None) -> bool:
            return not listed or value in listed

        for refusal in self.refuses:
            asked = covers(refusal.formats, format) and covers(refusal.variants, variant)
            if asked and covers(refusal.grids, grid) and covers(refusal.devices, device):
                return refusal.reason
        devices = sorted({device for load in self.loads for device in load.devices})
        if device is not None and device not in devices:
            return f"it runs on {' and '.join(devices)}"
        return "it has no reader for that"


@cache
def find_engine(name: str) -> EngineProfile:
    """The profile of that name. Raises QuantkitError listing those there are."""
    names = engine_names()
    if name not in names:
        raise UsageError(f"engine {name!r} is not known", f"choose one of {', '.join(names)}")
    return read_yaml(
        asset("recipes", "engines", f"{name}.yaml"), EngineProfile, "restore that file"
    )


def engine_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in asset("recipes", "engines").glob("*.yaml")))


def part_of(row: Parameter) -> Part | None:
    """The part of the model a tensor belongs to; None for what no engine takes quantized."""
    if row.role == "kv_b":
        return "kv_b"
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
