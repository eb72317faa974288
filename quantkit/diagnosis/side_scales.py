"""Scales that are no part of a weight: of a linear's inputs, of what is cached. Engines that
quantize activations multiply by them."""

import re
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from torch import Tensor

from quantkit.checkpoint.formats.base import SLIM_FILES
from quantkit.diagnosis.description import Described
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.survey import Survey

_OF_INPUTS = (".input_scale", ".input_global_scale", ".deq_scale")
_LAYER = re.compile(r".*?\blayers\.\d+\.")
_CACHED = re.compile(
    rf"({_LAYER.pattern})(.*)\.([kv]_scale|kv_cache_scale|kv_cache_offset|fa_[qkv]\.(?:scale|offset))"
)
_CACHE_SCALE = ".kv_cache_scale"
"""ModelSlim's, by channel, with an offset beside it."""
IS_SIDE = re.compile(
    r".*\.(?:input_scale|input_global_scale|deq_scale|pre_quant_scale|[qkv]_scale)"
)
_FAR = 1e5
"""Times that an input's scale may be off the median of its kind: layers and experts differ by a
hundred."""


_TURNED = 500.0
"""Times that a scale is off the others which was stored the other way round."""
_LARGEST_OF_CACHE = 8.0
"""Keys and values of no model reach that many times 448 in most layers."""


def compare_side_scales(survey: Survey, described: Described, findings: DiagnosisFindings) -> None:
    """Linears of one kind have such scales or have none; layers have those of the cache or have
    none; who says static has them."""
    lost = [*_lost_of_inputs(survey, described), *_lost_of_cache(survey)]
    if lost:
        findings.add(
            "part-missing", lost, f"{lost[0]} is not stored, and others of its kind have one"
        )
    block = survey.config.get("quantization_config") or {}
    if not described.linears:
        return
    weights, inputs = _said_of(block, "weights"), _said_of(block, "input_activations")
    if (
        inputs
        and all(one.get("dynamic") is False for one in inputs)
        and not _is_any(survey, *_OF_INPUTS)
    ):
        findings.add(
            "part-missing",
            "config.json",
            "it says that inputs have static scales, and none is stored",
        )
    elif block.get("activation_scheme") == "static" and not _is_any(survey, *_OF_INPUTS):
        findings.add(
            "part-missing",
            "config.json",
            "activation_scheme is static, and no scale of inputs is stored",
        )
    if any(one.get("actorder") in ("group", True) for one in weights) and not _is_any(
        survey, ".weight_g_idx"
    ):
        findings.add(
            "part-missing",
            "config.json",
            "it says actorder group, and no weight_g_idx tells the order",
        )
    cache = block.get("kv_cache_scheme")
    if (
        isinstance(cache, dict)
        and cache.get("dynamic") is False
        and not _is_any(survey, ".k_scale", ".v_scale")
    ):
        findings.add(
            "cache-scales-missing",
            "config.json",
            "kv_cache_scheme says that the cache has static scales, and none is stored",
        )


def _lost_of_inputs(survey: Survey, described: Described) -> Iterable[str]:
    said = next((survey.side[name] for name in SLIM_FILES if name in survey.side), {})
    kinds: dict[tuple[str, object, object], list[str]] = {}
    for module, linear in described.linears.items():
        # ModelSlim says of each linear whether its inputs' scales are static.
        kinds.setdefault(
            (linear.format.member(module).variant, linear.grid, said.get(f"{module}.weight")), []
        ).append(module)
    for modules in kinds.values():
        for suffix in _OF_INPUTS:
            without = [module for module in modules if module + suffix not in survey.tensors]
            if len(without) * 2 < len(modules):
                yield from (module + suffix for module in without)


def _lost_of_cache(survey: Survey) -> Iterable[str]:
    """In layers that hold the module which has them elsewhere: layers of another attention have
    none."""
    held: dict[tuple[str, str], set[str]] = {}
    for name in survey.tensors:
        if found := _CACHED.fullmatch(name):
            held.setdefault((found[2], found[3]), set()).add(found[1])
    modules = {name.rpartition(".")[0] for name in survey.tensors}
    layers = {found[0] for name in survey.tensors if (found := _LAYER.match(name))}
    for scale in [name for name in survey.tensors if name.endswith(_CACHE_SCALE)]:
        if (offset := scale.removesuffix(_CACHE_SCALE) + ".kv_cache_offset") not in survey.tensors:
            yield offset
    for (inside, scale), own in held.items():
        alike = {
            layer
            for layer in layers
            if any(f"{module}.".startswith(f"{layer}{inside}.") for module in modules)
        }
        if len(alike - own) * 2 < len(alike):
            yield from (f"{layer}{inside}.{scale}" for layer in sorted(alike - own))


def _said_of(block: Mapping[str, Any], what: str) -> list[Mapping[str, Any]]:
    """What compressed-tensors' groups say of `what`; {} of a group that says nothing."""
    groups = block.get("config_groups")
    found = (
        [one.get(what) for one in groups.values() if isinstance(one, dict)]
        if isinstance(groups, dict)
        else []
    )
    return [one if isinstance(one, dict) else {} for one in found]


def _is_any(survey: Survey, *endings: str) -> bool:
    return any(name.endswith(endings) for name in survey.tensors)


class SideScales:
    """look() at each, then finish(): zero and negative ones multiply by nothing and by the other
    sign."""

    def __init__(self) -> None:
        self.sizes: dict[str, dict[str, float]] = {}
        self.zero: list[str] = []
        self.negative: list[str] = []

    def look(self, name: str, values: Tensor) -> None:
        """name: that IS_SIDE matches."""
        values = values.float()
        if not bool(values.any()):
            self.zero.append(name)
        elif bool((values < 0).any()):
            self.negative.append(name)
        elif values.numel() == 1:
            self.sizes.setdefault(re.sub(r"\.\d+\.", ".N.", name), {})[name] = float(values)

    def finish(self, findings: DiagnosisFindings) -> None:
        """Tell what was found."""
        if self.zero:
            findings.add("scales-zero", self.zero, "a scale of inputs or of the cache is zero")
        if self.negative:
            findings.add(
                "scales-absurd", self.negative, "a scale of inputs or of the cache is negative"
            )
        for kind, sizes in self.sizes.items():
            usual = median(sizes.values())
            far = [name for name, size in sizes.items() if not 1 / _FAR < size / usual < _FAR]
            if far:
                findings.add(
                    "scales-absurd", far, f"{sizes[far[0]] / usual:.1e} times the median of {kind}"
                )
            turned = [
                name for name, size in sizes.items() if name not in far and _is_turned(size, usual)
            ]
            if turned:
                told = (
                    f"it is {sizes[turned[0]]:.3g}, and the median of {kind} {usual:.3g}: it "
                    "is the other way round"
                )
                findings.add("scales-absurd", turned, told)
            if kind.endswith((".k_scale", ".v_scale")) and usual > _LARGEST_OF_CACHE:
                told = (
                    f"the median of {kind} is {usual:.3g}: what is cached would reach "
                    f"{448 * usual:.0f}; it is the other way round"
                )
                findings.add("scales-absurd", list(sizes), told)


def _is_turned(size: float, usual: float) -> bool:
    """Whether a scale is far off the others, and as large as they are the other way round."""
    off, turned = max(size / usual, usual / size), max(size * usual, 1 / (size * usual))
    return off > _TURNED and turned < 4
