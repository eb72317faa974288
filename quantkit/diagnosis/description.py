"""The description of the quantization in config.json compared with the stored tensors, from headers
alone."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.check import (
    QuantizedLinear,
    check_description,
    is_unquantized,
    quantized_linear,
)
from quantkit.checkpoint.containers import STACKED_REMEDY, foreign_format
from quantkit.checkpoint.formats import FORMATS, detect_format, fp8_block
from quantkit.checkpoint.formats.base import (
    FLOAT_DTYPES,
    HEAD,
    NGRAM_TABLE,
    SLIM_FILES,
    Format,
    is_cache_alone,
)
from quantkit.checkpoint.header import TensorInfo
from quantkit.common.devices import dtype_name
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis import Findings
from quantkit.diagnosis.survey import Survey
from quantkit.grids.base import Grid, grid_label
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.models.tensor_names import has_linear_suffix

_PACKED = (
    ".qweight",
    ".weight_packed",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_scale",
    ".qzeros",
    "_packed",
    "_blocks",
)
"""Tensor name suffixes that only quantized weights have, in any published format."""
_PARTS = tuple(sorted({suffix for format in FORMATS for suffix in format.own_suffixes}))
"""Suffixes of the parts of a quantized weight in any of our formats."""
OPT_FILE = "hf_quant_config.json"
_NUM_TRIED = 16
"""Number of linears for which another format is tried."""


@dataclass
class Description:
    """The quantization of a checkpoint.

    format, grid: as described, or as stored if the description is missing or wrong; None if
    quantkit has no reader. foreign: recognized as another program's. ignored: whether a module is described as unquantized; None without a
    description. linears: the complete quantized linears; broken: quantized modules with a missing
    or malformed part. corrections: keys of quantization_config and their right values.
    """

    format: Format | None = None
    grid: Grid | None = None
    foreign: bool = False
    ignored: Callable[[str], bool] | None = None
    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    corrections: dict[str, Any] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        return self.format is not None

    def is_quantized(self, module: str) -> bool:
        return module in self.linears or module in self.broken


def describe(
    survey: Survey, shapes: Mapping[str, tuple[int, ...]], findings: Findings
) -> Description:
    """The quantization as described and as stored, with a finding for every difference. shapes: of
    weights by module, if known."""
    description = Description()
    if not survey.config:
        return description
    if found := foreign_format(survey.path, survey.config, survey.tensors.values()):
        stacked = bool(shapes) and found[1] == STACKED_REMEDY
        kind = "experts-fused" if stacked else "not-read"
        findings.add(kind, _description_file(survey), f"it is {found[0]}", found[1])
        description.foreign = True
        return description
    detected = _detect_formats(survey.tensors)
    try:
        check_description(survey.path, survey.config, survey.side)
    except QuantkitError as fault:
        file = _description_file(survey)
        findings.add("description-unreadable", file, fault.problem, fault.remedy)
        return description
    is_described = bool(
        survey.config.get("quantization_config") or survey.side
    ) and not is_cache_alone(survey.config, survey.side)
    packed = [
        name for name in survey.tensors if name.endswith(_PACKED) and not NGRAM_TABLE.search(name)
    ]
    if not is_described and packed:
        kinds = ", ".join(format.variant for format in detected) or "no format that quantkit knows"
        findings.add(
            "description-missing",
            "config.json",
            f"{len(packed)} tensors such as {packed[0]} ({kinds}), and no quantization_config",
        )
        return description
    in_bytes = any(tensor.dtype.itemsize == 1 for tensor in survey.tensors.values())
    if is_described and survey.tensors and not packed and not in_bytes:
        evidence = f"it says {_format_label(survey)}, and no tensor is quantized"
        findings.add("nothing-quantized", "config.json", evidence)
        return description
    if not _read_format(survey, detected, shapes, description, findings):
        return description
    _collect(survey, description, findings)
    _compare_files(survey, description, findings)
    return description


def _description_file(survey: Survey) -> str:
    return (
        "config.json"
        if survey.config.get("quantization_config") or not survey.side
        else next(iter(survey.side))
    )


def _format_label(survey: Survey) -> str:
    block = survey.config.get("quantization_config") or next(iter(survey.side.values()), {})
    keys = ("quant_method", "quant_algo", "format", "checkpoint_format", "model_quant_type")
    return " ".join(str(block[key]) for key in keys if block.get(key)) or "nothing of a format"


def _detect_formats(tensors: Mapping[str, TensorInfo]) -> list[Format]:
    """Formats whose tensors are present: the main tensor of a linear, and the scale that belongs to
    it."""
    found = []
    endings = {name[name.rfind(".") :] for name in tensors}
    for format in FORMATS:
        needed = _required_suffixes(format)
        if not format.own_suffixes or not all(
            any(ending.endswith(suffix) for ending in endings) for suffix in needed
        ):
            continue
        modules = filter(None, map(format.quantized_module, tensors.values()))
        if any(
            all(one + suffix in tensors for suffix in needed) and _is_laid_out(format, tensors, one)
            for one in modules
        ):
            found.append(format)
    return found


def _required_suffixes(format: Format) -> tuple[str, ...]:
    optional = (".weight_zero_point", ".scale_bias", ".g_idx")
    return tuple(one for one in format.own_suffixes if one not in optional)


def _is_laid_out(format: Format, tensors: Mapping[str, TensorInfo], module: str) -> bool:
    """AWQ and GPTQ have the same tensor names; AWQ packs along the outputs, GPTQ along the
    inputs."""
    if format.marker != ".qweight":
        return True
    if len(tensors[f"{module}.qweight"].shape) != 2:
        return False
    (rows, _), _ = format.stored(module, tensors, None)
    return tensors[f"{module}.scales"].shape[-1:] == (rows,)


def _read_format(
    survey: Survey,
    detected: list[Format],
    shapes: Mapping[str, tuple[int, ...]],
    description: Description,
    findings: Findings,
) -> bool:
    """Set format, grid and ignore list; False if quantkit does not read the format."""
    try:
        format = detect_format(survey.path / _description_file(survey), survey.config, survey.side)
    except QuantkitError as fault:
        if "two things" in fault.problem:
            findings.add("descriptions-disagree", list(survey.side), fault.problem)
        else:
            unknown = "does not read" in fault.problem
            reason = f"it says {_format_label(survey)}" if unknown else fault.problem
            _report_ignored(survey, detected, shapes, reason, findings)
        return False
    try:
        description.grid = format.grid(survey.config, survey.side)
        description.ignored = format.ignored(survey.config, survey.side)
    except QuantkitError as fault:
        description.ignored = None
        _report_ignored(survey, detected, shapes, fault.problem, findings)
        return False
    # What is left of damaged shards may look like another format.
    is_whole = not findings.has("shard-missing", "shard-damaged")
    one_grid = format.declared_grids(survey.config) is None and is_whole
    if detected and format not in detected and format.own_suffixes and one_grid:
        kinds = " or ".join(f"{one.name} {one.variant}" for one in detected)
        evidence = f"it says {_format_label(survey)}, and the tensors are {kinds}"
        findings.add("description-wrong", _description_file(survey), evidence)
        return False
    if one_grid and not _is_on_grid(survey, format, detected, shapes, description, findings):
        return False
    description.format = format
    return True


def _is_on_grid(
    survey: Survey,
    format: Format,
    detected: list[Format],
    shapes: Mapping[str, tuple[int, ...]],
    description: Description,
    findings: Findings,
) -> bool:
    """Whether linears have the model's shapes on the described grid, or with other groups, which
    are corrected; else a finding, where they have them on another grid."""
    grid = description.grid
    if grid is None:
        return True
    modules = _modules(survey, format)
    stored = _with_stored_groups(survey, format, grid, modules)
    tried = [one for one in modules if one in shapes][:_NUM_TRIED]
    is_other = not any(_fits(survey, format, stored, one, shapes[one]) for one in tried)
    if tried and is_other and (kind := _fitting(survey, [format, *detected], shapes)):
        said = f"it says {_format_label(survey)}, {grid_label(grid)}"
        evidence = f"{said}, and the tensors are those of {kind}"
        findings.add("description-wrong", _description_file(survey), evidence)
        return False
    if stored != grid:
        size = description.corrections["group_size"] = stored.group_size
        evidence = f"it says {grid.group_size}, and the scales of linears have {size}"
        findings.add("group-size-wrong", _description_file(survey), evidence)
        description.grid = stored
    return True


def _modules(survey: Survey, format: Format) -> list[str]:
    """Modules whose main tensor is stored in the format."""
    named = map(format.quantized_module, survey.tensors.values())
    return [module for module in named if module is not None]


def _fitting(survey: Survey, formats: list[Format], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The first format and grid in which the linears are complete and have the model's shapes;
    empty if there is none."""
    for format in formats:
        modules = [one for one in _modules(survey, format) if one in shapes][:_NUM_TRIED]
        for grid in _grids(survey, format, modules):
            if all(_fits(survey, format, grid, one, shapes[one]) for one in modules):
                label = f", {grid_label(grid)}" if grid is not None else ""
                return f"{format.name} {format.variant}{label}"
    return ""


def _report_ignored(
    survey: Survey,
    detected: list[Format],
    shapes: Mapping[str, tuple[int, ...]],
    reason: str,
    findings: Findings,
) -> None:
    """Add a finding for a description that is not read: it is wrong if the tensors are, complete
    and in the model's shapes, those of a supported format."""
    if kind := _fitting(survey, detected, shapes):
        evidence = f"{reason}; the tensors are those of {kind}"
        findings.add("description-wrong", _description_file(survey), evidence)
        return
    findings.add("not-read", _description_file(survey), reason)


def _grids(survey: Survey, format: Format, modules: list[str]) -> list[Grid | None]:
    """Grids that the tensors of a format may be on, judged by the first linear's scale shapes; None
    is a source format's own grid."""
    if not modules:
        return []
    grids: list[Grid] = [Nvfp4Grid(), Mxfp4Grid()]
    for bits in (4, 8):
        size = _group_size(survey, format, IntGrid(bits, None, symmetric=True), modules[0])
        grids += [
            IntGrid(bits, one, symmetric) for one in {size, None} for symmetric in (True, False)
        ]
    return [None] if format.is_source else [grid for grid in grids if format.holds(grid)]


def _fits(
    survey: Survey, format: Format, grid: Grid | None, module: str, shape: object = None
) -> bool:
    """Whether the linear is complete on that grid, with that shape if one is given."""
    try:
        return shape in (None, _linear(survey, format, grid, module).shape)
    except QuantkitError:
        return False


def _compare_files(survey: Survey, description: Description, findings: Findings) -> None:
    """Differences between files that describe the same, and lists that cover every tensor."""
    block = survey.config.get("quantization_config") or {}
    _compare_opt_files(survey, block, description, findings)
    of_gptq = description.format is not None and description.format.name == "gptq"
    if of_gptq and block.get("lm_head") is True and not description.is_quantized(HEAD):
        evidence = "config.json says that it is quantized, and it is stored unquantized"
        findings.add("plain-not-listed", HEAD, evidence)
    unquantized_names = block.get("modules_to_not_convert") if description.ignored is None else None
    covered = [
        module
        for module in description.linears
        for one in unquantized_names or ()
        if f"{module}.".startswith(f"{one}.")
    ]
    if covered:
        evidence = (
            "modules_to_not_convert lists them as unquantized, and their tensors are quantized"
        )
        findings.add("listed-but-quantized", covered, evidence)
    slim = next((survey.side[name] for name in SLIM_FILES if name in survey.side), {})
    wrong = [
        name
        for name, tensor in survey.tensors.items()
        if tensor.dtype in FLOAT_DTYPES
        and name.endswith(".weight")
        and slim.get(name, "FLOAT") != "FLOAT"
        and not description.is_quantized(name.removesuffix(".weight"))
    ]
    if wrong:
        evidence = f"stored in 16 or 32 bits, and the description says {slim[wrong[0]]}"
        findings.add("plain-not-listed", wrong, evidence)
    other = [
        module
        for module, linear in description.linears.items()
        if _has_other_bits(slim.get(f"{module}.weight"), linear.grid)
    ]
    if other:
        evidence = (
            f"it says {slim[f'{other[0]}.weight']}, and the tensors are "
            f"{grid_label(description.linears[other[0]].grid)}"
        )
        findings.add("description-wrong", other, evidence)


def _has_other_bits(is_described: object, grid: Grid | None) -> bool:
    """Whether ModelSlim's type of a linear, such as W4A8_DYNAMIC, has another number of bits than
    stored."""
    found = re.match(r"W(\d+)A", str(is_described))
    return found is not None and grid is not None and grid.is_integer and grid.bits != int(found[1])


def _compare_opt_files(
    survey: Survey, block: Mapping[str, Any], description: Description, findings: Findings
) -> None:
    """ModelOpt describes the quantization in two files, and engines differ in which one they
    read."""
    opt = survey.side.get(OPT_FILE, {}).get("quantization")
    if not block or not isinstance(opt, dict) or description.format is None:
        return
    ours, other = description.ignored, description.format.ignored({}, survey.side)
    both = opt.keys() & block.keys()
    differ = [key for key in ("quant_algo", "group_size") if key in both and opt[key] != block[key]]
    linears = (
        name.removesuffix(".weight")
        for name in survey.tensors
        if has_linear_suffix(name) or name == f"{HEAD}.weight"
    )
    different = [one for one in linears if ours and other and other(one) != ours(one)]
    if differ or different:
        keys = ", ".join(differ) or "the list of unquantized modules"
        evidence = f"{OPT_FILE} and config.json differ in {keys}"
        findings.add("descriptions-disagree", different or OPT_FILE, evidence)


def _collect(survey: Survey, description: Description, findings: Findings) -> None:
    """Collect all quantized linears, with findings for the incomplete ones."""
    format, modules = description.format, dict[str, Format]()
    assert format is not None
    faults: dict[str, list[tuple[str, str]]] = {}
    for tensor in survey.tensors.values():
        module = format.quantized_module(tensor)
        if module is not None:
            modules[module] = format
        elif (
            description.ignored is not None
            and (left := fp8_block.FORMAT.quantized_module(tensor))
            and description.ignored(left)
        ):
            modules[left] = fp8_block.FORMAT
        elif tensor.name.endswith(format.marker):
            module = tensor.name.removesuffix(format.marker)
            needed = _required_suffixes(format)
            if needed and all(module + suffix in survey.tensors for suffix in needed):
                evidence = f"codes in {dtype_name(tensor.dtype)}, which {format.name} does not have"
                faults.setdefault("part-malformed", []).append((module, evidence))
                description.broken.add(module)
    for module, own in modules.items():
        try:
            description.linears[module] = _linear(survey, own, description.grid, module)
        except QuantkitError as fault:
            kind = "part-missing" if "missing" in fault.problem else "part-malformed"
            kind = "description-wrong" if "is described as" in fault.problem else kind
            ignored = "not a multiple of" in fault.problem or "does not read" in fault.problem
            kind = "not-read" if ignored else kind
            faults.setdefault(kind, []).append((module, fault.problem))
            description.broken.add(module)
    findings.add_groups(faults)
    _find_orphans(survey, description, format, findings)


def _linear(survey: Survey, format: Format, grid: Grid | None, module: str) -> QuantizedLinear:
    marker = survey.tensors[format.main_tensor(module, survey.tensors)]
    if len(marker.shape) != 2 or 0 in marker.shape:
        raise QuantkitError(
            f"{marker.name} has shape {list(marker.shape)}, and a linear has two dimensions"
        )
    return quantized_linear(survey.path, format, grid, survey.tensors, module)


def _with_stored_groups(survey: Survey, format: Format, grid: Grid, modules: list[str]) -> Grid:
    """The grid; if no linear has its group size, with that of most linears' scales."""
    if not grid.is_integer or any(_fits(survey, format, grid, module) for module in modules):
        return grid
    sizes = Counter(filter(None, (_group_size(survey, format, grid, one) for one in modules)))
    stored = grid.with_group_size(sizes.most_common(1)[0][0]) if sizes else None
    if stored is None or not any(_fits(survey, format, stored, module) for module in modules):
        return grid
    return stored


def _group_size(survey: Survey, format: Format, grid: Grid, module: str) -> int | None:
    """Input channels per scale, from the shapes of the scales."""
    named = (survey.tensors.get(module + suffix) for suffix in (".scales", ".weight_scale"))
    scale, codes = next(filter(None, named), None), survey.tensors[module + format.marker]
    if scale is None or any(len(one.shape) != 2 or 0 in one.shape for one in (scale, codes)):
        return None
    (_, columns), _ = format.stored(module, survey.tensors, grid)
    count = scale.shape[0] if format.marker == ".qweight" else scale.shape[1]
    return columns // count if count and columns % count == 0 else None


def _find_orphans(
    survey: Survey, description: Description, format: Format, findings: Findings
) -> None:
    """Scales without codes, and tensors with a dtype that the format does not use."""
    owned = {name for linear in description.linears.values() for name in linear.tensors}
    rest = [
        tensor
        for tensor in survey.tensors.values()
        if tensor.name not in owned
        and tensor.name.rpartition(".")[0] not in description.broken
        and not NGRAM_TABLE.search(tensor.name)
    ]
    parts = (*_PARTS, *format.own_suffixes)
    orphans = [tensor.name for tensor in rest if tensor.name.endswith(parts)]
    unexpected = [
        tensor for tensor in rest if not is_unquantized(tensor) and not tensor.name.endswith(parts)
    ]
    doubled = [one.name for one in rest if one.name.removesuffix(".weight") in description.linears]
    if doubled:
        evidence = "the module has codes as well: engines stop at one of the two, or load either"
        findings.add("tensors-unknown", doubled, evidence)
    if orphans:
        findings.add("part-orphan", orphans, "part of a quantized weight whose codes are missing")
    if unexpected:
        kind = dtype_name(unexpected[0].dtype)
        findings.add(
            "part-malformed",
            [tensor.name for tensor in unexpected],
            f"{kind}, which {format.name} {format.variant} does not use",
        )


def compare_lists(
    description: Description, unquantized: Iterable[str], where: str, findings: Findings
) -> None:
    """Modules listed as unquantized that are quantized, and the reverse. unquantized: linears
    stored unquantized."""
    if description.ignored is None or description.format is None:
        return
    ignored = description.ignored
    quantized = [
        module
        for module, linear in description.linears.items()
        if linear.format is description.format and ignored(module)
    ]
    if quantized:
        evidence = f"{where} lists them as unquantized, and their tensors are quantized"
        findings.add("listed-but-quantized", quantized, evidence)
    unlisted = [module for module in unquantized if not ignored(module)]
    if unlisted:
        evidence = f"stored in 16 or 32 bits, and {where} does not list them as unquantized"
        findings.add("plain-not-listed", unlisted, evidence)
