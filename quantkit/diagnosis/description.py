"""What is quantized against what the checkpoint says is: both ways, from headers alone."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.checkpoint.check import (
    QuantizedLinear,
    check_description,
    is_unquantized,
    quantized_linear,
)
from quantkit.checkpoint.formats import FORMATS, detect_format, fp8_block
from quantkit.checkpoint.formats.base import FLOAT_DTYPES, HEAD, SLIM_FILES, Format, is_cache_alone
from quantkit.checkpoint.header import TensorInfo
from quantkit.common.devices import dtype_name
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.survey import Survey
from quantkit.grids.schemes import Fp4Grid, Grid, IntGrid, Mxfp4Grid, grid_label
from quantkit.models.tensor_names import ends_as_linear

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
"""Endings of tensors that only quantized weights have, in any format of the field."""
_PARTS = tuple(sorted({suffix for format in FORMATS for suffix in format.own_suffixes}))
"""Endings of parts of a quantized weight, whatever the format."""
OPT_FILE = "hf_quant_config.json"
_TRIED = 16
"""Linears that are tried as another format."""


@dataclass
class Described:
    """format, grid: as said, or as seen where nothing or something wrong is said; None where
    quantkit has no reader.

    ignored: whether a module is said to be unquantized; None where nothing is said. linears: those
    that are whole.
    broken: quantized modules of which a part is missing or malformed. cures: keys of
    quantization_config and their right values.
    """

    format: Format | None = None
    grid: Grid | None = None
    ignored: Callable[[str], bool] | None = None
    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    cures: dict[str, Any] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        return self.format is not None

    def is_quantized(self, module: str) -> bool:
        return module in self.linears or module in self.broken


def describe(
    survey: Survey, shapes: Mapping[str, tuple[int, ...]], findings: DiagnosisFindings
) -> Described:
    """The quantization as described and as stored, with a finding wherever they differ. shapes: of
    weights by module, if known."""
    seen = _seen(survey.tensors)
    described = Described()
    try:
        check_description(survey.path, survey.config, survey.side)
    except QuantkitError as fault:
        findings.add("description-unreadable", _described_in(survey), fault.problem, fault.remedy)
        return described
    said = bool(survey.config.get("quantization_config") or survey.side) and not is_cache_alone(
        survey.config, survey.side
    )
    packed = [name for name in survey.tensors if name.endswith(_PACKED)]
    if not said and packed:
        kinds = ", ".join(format.variant for format in seen) or "no format that quantkit knows"
        findings.add(
            "description-missing",
            "config.json",
            f"{len(packed)} tensors such as {packed[0]} ({kinds}), and no quantization_config",
        )
        return described
    if (
        said
        and survey.tensors
        and not packed
        and not any(tensor.dtype.itemsize == 1 for tensor in survey.tensors.values())
    ):
        told = _told(survey)
        findings.add(
            "nothing-quantized", "config.json", f"it says {told}, and every tensor is plain"
        )
        return described
    if not _read_format(survey, seen, shapes, described, findings):
        return described
    _collect(survey, described, findings)
    _compare_files(survey, described, findings)
    return described


def _described_in(survey: Survey) -> str:
    return (
        "config.json"
        if survey.config.get("quantization_config") or not survey.side
        else next(iter(survey.side))
    )


def _told(survey: Survey) -> str:
    block = survey.config.get("quantization_config") or next(iter(survey.side.values()), {})
    keys = ("quant_method", "quant_algo", "format", "checkpoint_format", "model_quant_type")
    return " ".join(str(block[key]) for key in keys if block.get(key)) or "nothing of a format"


def _seen(tensors: Mapping[str, TensorInfo]) -> list[Format]:
    """Formats of which the tensors bear the marks: the main tensor of a linear, and the scale that
    goes with it."""
    found = []
    for format in FORMATS:
        if not format.own_suffixes:
            continue
        for tensor in tensors.values():
            module = format.quantized_module(tensor)
            if (
                module is not None
                and all(module + suffix in tensors for suffix in _needed(format))
                and _is_laid_out(format, tensors, module)
            ):
                found.append(format)
                break
    return found


def _needed(format: Format) -> tuple[str, ...]:
    return tuple(
        suffix
        for suffix in format.own_suffixes
        if suffix not in (".weight_zero_point", ".scale_bias", ".g_idx")
    )


def _is_laid_out(format: Format, tensors: Mapping[str, TensorInfo], module: str) -> bool:
    """AWQ and GPTQ have the same names: the first packs along the outputs, the other along the
    inputs."""
    if format.marker != ".qweight":
        return True
    if len(tensors[f"{module}.qweight"].shape) != 2:
        return False
    (rows, _), _ = format.stored(module, tensors, None)
    return tensors[f"{module}.scales"].shape[-1:] == (rows,)


def _read_format(
    survey: Survey,
    seen: list[Format],
    shapes: Mapping[str, tuple[int, ...]],
    described: Described,
    findings: DiagnosisFindings,
) -> bool:
    """Set the format, its grid and its list; False where it is one that quantkit does not read."""
    try:
        format = detect_format(survey.path / _described_in(survey), survey.config, survey.side)
    except QuantkitError as fault:
        if "two things" in fault.problem:
            findings.add("descriptions-disagree", list(survey.side), fault.problem)
        else:
            unknown = "does not read" in fault.problem
            _tell_unread(
                survey,
                seen,
                shapes,
                f"it says {_told(survey)}" if unknown else fault.problem,
                findings,
            )
        return False
    try:
        described.grid = format.grid(survey.config, survey.side)
        described.ignored = format.ignored(survey.config, survey.side)
    except QuantkitError as fault:
        described.ignored = None
        _tell_unread(survey, seen, shapes, fault.problem, findings)
        return False
    one_grid = format.declared_grids(survey.config) is None
    if seen and format not in seen and format.own_suffixes and one_grid:
        kinds = " or ".join(f"{one.name} {one.variant}" for one in seen)
        findings.add(
            "description-wrong",
            _described_in(survey),
            f"it says {_told(survey)}, and the tensors are {kinds}",
        )
        return False
    described.format = format
    return True


def _tell_unread(
    survey: Survey,
    seen: list[Format],
    shapes: Mapping[str, tuple[int, ...]],
    told: str,
    findings: DiagnosisFindings,
) -> None:
    """A description that is not read: wrong where the tensors are, whole and in the model's shapes,
    those of a format that is."""
    for format in seen:
        named = (format.quantized_module(tensor) for tensor in survey.tensors.values())
        modules = [module for module in named if module is not None and module in shapes][:_TRIED]
        fit = [
            one
            for one in _grids(survey, format, modules)
            if _are_whole(survey, format, one, modules, shapes)
        ]
        if modules and fit:
            kind = f"{format.name} {format.variant}" + (
                f", {grid_label(fit[0])}" if fit[0] is not None else ""
            )
            findings.add(
                "description-wrong",
                _described_in(survey),
                f"{told}; the tensors are those of {kind}",
            )
            return
    findings.add("not-read", _described_in(survey), told)


def _grids(survey: Survey, format: Format, modules: list[str]) -> list[Grid | None]:
    """What tensors of a format may be on, by the shapes of the first linear's scales; None: a
    source's own, which has no name."""
    if not modules:
        return []
    grids: list[Grid] = [Fp4Grid(), Mxfp4Grid()]
    for bits in (4, 8):
        size = _group_size(survey, format, IntGrid(bits, None, symmetric=True), modules[0])
        grids += [
            IntGrid(bits, one, symmetric) for one in {size, None} for symmetric in (True, False)
        ]
    return [None] if format.is_source else [grid for grid in grids if format.holds(grid)]


def _are_whole(
    survey: Survey,
    format: Format,
    grid: Grid | None,
    modules: list[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    try:
        return all(
            _linear(survey, format, grid, module).shape == shapes[module] for module in modules
        )
    except QuantkitError:
        return False


def _compare_files(survey: Survey, described: Described, findings: DiagnosisFindings) -> None:
    """What is said twice, or of every tensor."""
    block = survey.config.get("quantization_config") or {}
    _compare_opt_files(survey, block, described, findings)
    of_gptq = described.format is not None and described.format.name == "gptq"
    if of_gptq and block.get("lm_head") is True and not described.is_quantized(HEAD):
        findings.add(
            "plain-not-listed",
            HEAD,
            "config.json says that it is quantized, and it is stored plain",
        )
    plain_by_name = block.get("modules_to_not_convert") if described.ignored is None else None
    covered = [
        module
        for module in described.linears
        for one in plain_by_name or ()
        if f"{module}.".startswith(f"{one}.")
    ]
    if covered:
        findings.add(
            "listed-but-quantized",
            covered,
            "modules_to_not_convert lists them as unquantized, and their tensors are quantized",
        )
    slim = next((survey.side[name] for name in SLIM_FILES if name in survey.side), {})
    plain = [
        tensor.name
        for tensor in survey.tensors.values()
        if tensor.dtype in FLOAT_DTYPES and tensor.name.endswith(".weight")
    ]
    wrong = [
        name
        for name in plain
        if slim.get(name, "FLOAT") != "FLOAT"
        and not described.is_quantized(name.removesuffix(".weight"))
    ]
    if wrong:
        findings.add(
            "plain-not-listed",
            wrong,
            f"stored in 16 or 32 bits, and the description says {slim[wrong[0]]}",
        )
    other = [
        module
        for module, linear in described.linears.items()
        if _is_of_other_bits(slim.get(f"{module}.weight"), linear.grid)
    ]
    if other:
        told = (
            f"it says {slim[f'{other[0]}.weight']}, and the tensors are "
            f"{grid_label(described.linears[other[0]].grid)}"
        )
        findings.add("description-wrong", other, told)


def _is_of_other_bits(said: object, grid: Grid | None) -> bool:
    """Whether ModelSlim's type of a linear, such as W4A8_DYNAMIC, is not what is stored."""
    found = re.match(r"W(\d+)A", str(said))
    return found is not None and isinstance(grid, IntGrid) and grid.bits != int(found[1])


def _compare_opt_files(
    survey: Survey, block: Mapping[str, Any], described: Described, findings: DiagnosisFindings
) -> None:
    """ModelOpt says everything twice, and engines differ in where they look."""
    side = survey.side.get(OPT_FILE, {}).get("quantization")
    if not block or not isinstance(side, dict) or described.format is None:
        return
    ours, other = described.ignored, described.format.ignored({}, survey.side)
    differ = [
        key
        for key in ("quant_algo", "group_size")
        if key in side and key in block and side[key] != block[key]
    ]
    linears = [
        name.removesuffix(".weight")
        for name in survey.tensors
        if ends_as_linear(name) or name == f"{HEAD}.weight"
    ]
    apart = [
        module
        for module in linears
        if ours is not None and other is not None and other(module) != ours(module)
    ]
    if differ or apart:
        told = (
            f"{OPT_FILE} has another {', '.join(differ) or 'list of unquantized modules'} than "
            "config.json"
        )
        findings.add("descriptions-disagree", apart or OPT_FILE, told)


def _collect(survey: Survey, described: Described, findings: DiagnosisFindings) -> None:
    """All quantized linears; of those that are not whole, what is wrong."""
    format, modules = described.format, dict[str, Format]()
    assert format is not None
    for tensor in survey.tensors.values():
        module = format.quantized_module(tensor)
        if module is not None:
            modules[module] = format
        elif (
            described.ignored is not None
            and (left := fp8_block.FORMAT.quantized_module(tensor))
            and described.ignored(left)
        ):
            modules[left] = fp8_block.FORMAT
    described.grid = _grid_that_fits(survey, described, modules, findings)
    faults: dict[str, list[tuple[str, str]]] = {}
    for module, own in modules.items():
        try:
            described.linears[module] = _linear(survey, own, described.grid, module)
        except QuantkitError as fault:
            kind = "part-missing" if "missing" in fault.problem else "part-malformed"
            kind = "description-wrong" if "is described as" in fault.problem else kind
            faults.setdefault(kind, []).append((module, fault.problem))
            described.broken.add(module)
    for kind, told in faults.items():
        findings.add(kind, [module for module, _ in told], told[0][1])
    _find_orphans(survey, described, format, findings)


def _linear(survey: Survey, format: Format, grid: Grid | None, module: str) -> QuantizedLinear:
    marker = survey.tensors[format.main_tensor(module, survey.tensors)]
    if len(marker.shape) != 2 or 0 in marker.shape:
        raise QuantkitError(
            f"{marker.name} has shape {list(marker.shape)}, and a linear has two dimensions"
        )
    return quantized_linear(survey.path, format, grid, survey.tensors, module)


def _grid_that_fits(
    survey: Survey, described: Described, modules: Mapping[str, Format], findings: DiagnosisFindings
) -> Grid | None:
    """The grid as described, or with the group size that the scales of most linears have, where not
    one has the described one."""
    grid, format = described.grid, described.format
    if not isinstance(grid, IntGrid) or format is None:
        return grid
    sizes = Counter(
        size
        for module, own in modules.items()
        if own is format and (size := _group_size(survey, format, grid, module))
    )
    if not sizes:
        return grid
    size, count = sizes.most_common(1)[0]
    fits = _fits(survey, format, modules, grid)
    corrected = replace(grid, group_size=size)
    if fits or not _fits(survey, format, modules, corrected):
        return grid
    described.cures["group_size"] = size
    findings.add(
        "group-size-wrong",
        _described_in(survey),
        f"it says {grid.group_size}, and the scales of {count} linears are for {size}",
    )
    return corrected


def _fits(survey: Survey, format: Format, modules: Mapping[str, Format], grid: Grid) -> bool:
    """Whether any linear is whole on that grid."""
    for module, own in modules.items():
        if own is format:
            try:
                _linear(survey, own, grid, module)
            except QuantkitError:
                continue
            return True
    return False


def _group_size(survey: Survey, format: Format, grid: Grid, module: str) -> int | None:
    """Input channels of a scale, from the shapes of the scales."""
    scale = next(
        (
            survey.tensors[module + suffix]
            for suffix in (".scales", ".weight_scale")
            if module + suffix in survey.tensors
        ),
        None,
    )
    if (
        scale is None
        or len(scale.shape) != 2
        or len(survey.tensors[module + format.marker].shape) != 2
    ):
        return None
    if 0 in scale.shape or 0 in survey.tensors[module + format.marker].shape:
        return None
    (_, columns), _ = format.stored(module, survey.tensors, grid)
    count = scale.shape[0] if format.marker == ".qweight" else scale.shape[1]
    return columns // count if count and columns % count == 0 else None


def _find_orphans(
    survey: Survey, described: Described, format: Format, findings: DiagnosisFindings
) -> None:
    """Scales without codes, and tensors of a dtype that only another format has."""
    owned = {name for linear in described.linears.values() for name in linear.tensors}
    rest = [
        tensor
        for tensor in survey.tensors.values()
        if tensor.name not in owned and tensor.name.rpartition(".")[0] not in described.broken
    ]
    orphans = [
        tensor.name for tensor in rest if tensor.name.endswith((*_PARTS, *format.own_suffixes))
    ]
    odd = [tensor for tensor in rest if not is_unquantized(tensor)]
    strange = [tensor for tensor in odd if tensor.name not in orphans]
    if orphans:
        findings.add(
            "part-orphan", orphans, "a part of a quantized weight whose codes are not there"
        )
    if strange:
        kind = dtype_name(strange[0].dtype)
        findings.add(
            "part-malformed",
            [tensor.name for tensor in strange],
            f"{kind}, which {format.name} {format.variant} does not have",
        )


def compare_lists(
    described: Described, plain_linears: Iterable[str], where: str, findings: DiagnosisFindings
) -> None:
    """Modules that are said to be unquantized and are not, and the other way round. plain_linears:
    linears stored plain."""
    if described.ignored is None or described.format is None:
        return
    ignored = described.ignored
    quantized = [
        module
        for module, linear in described.linears.items()
        if linear.format is described.format and ignored(module)
    ]
    if quantized:
        findings.add(
            "listed-but-quantized",
            quantized,
            f"{where} lists them as unquantized, and their tensors are quantized",
        )
    left_out = [module for module in plain_linears if not ignored(module)]
    if left_out:
        findings.add(
            "plain-not-listed",
            left_out,
            f"stored in 16 or 32 bits, and {where} does not list them as unquantized",
        )
