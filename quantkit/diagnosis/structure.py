"""The stored tensors compared with the model's parameter table: names, shapes, experts, fused
siblings, head and MTP layer, and the fields of config.json."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantkit.checkpoint.formats.base import HEAD
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis import Findings
from quantkit.diagnosis.description import Description, compare_lists
from quantkit.diagnosis.survey import Survey
from quantkit.models import check_missing, find_architecture, is_known
from quantkit.models.architecture import Architecture, ModelConfig
from quantkit.models.stored_parameters import block_head_rows, check_size, usual_name
from quantkit.models.table import Parameter, ScaleGroup, resolve
from quantkit.models.tensor_names import has_linear_suffix
from quantkit.quantization.checks import DROPPED

_HEADS_LISTED = ("compressed-tensors", "modelopt")
"""Formats whose readers treat the head as any other linear unless it is listed."""
_MOE_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj|w13|w2)(?:\.|_|$)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass
class Structure:
    """config: as the architecture reads it, None if it cannot. rows: the table in the checkpoint's
    spelling, empty if the architecture is unknown. missing: rows that are not stored.
    architecture: None if it is unknown."""

    config: ModelConfig | None = None
    rows: list[Parameter] = field(default_factory=list)
    missing: list[Parameter] = field(default_factory=list)
    architecture: Architecture[Any] | None = None

    @cached_property
    def scale_groups(self) -> list[ScaleGroup]:
        """Norms and linears whose outputs writers may scale, with their consumers."""
        if self.architecture is None or self.config is None:
            return []
        layers = sorted({row.layer for row in self.rows if row.layer is not None})
        return [
            group for one in layers for group in self.architecture.scale_groups(self.config, one)
        ]


def read_table(survey: Survey, findings: Findings) -> Structure:
    """The architecture's table for config.json; empty if the architecture is unknown."""
    try:
        check_missing(survey.config, survey.tensors)
        if not is_known(survey.config):
            return Structure()
        architecture = find_architecture(survey.config)
        config = architecture.Config.from_dict(survey.config)
        check_size(config, len(survey.tensors))
    except QuantkitError as fault:
        if survey.config:
            findings.add("config-field", "config.json", fault.problem, fault.remedy)
        return Structure()
    rows = architecture.parameters(config)
    if head := block_head_rows(survey.config, config, survey.tensors):
        rows = [*(row for row in rows if not row.mtp), *head]
    return Structure(config, rows, architecture=architecture)


def rename(survey: Survey, structure: Structure, findings: Findings) -> None:
    """Rename tensors to the table's names if a known alternative spelling explains them, with a
    finding."""
    if not structure.rows:
        return
    modules = {row.module for row in structure.rows} | {
        row.other_name or row.name for row in structure.rows
    }
    unknown = [name for name in survey.tensors if not _is_of(name, modules)]
    # Where no name is the table's, all may have a prefix that no one knows.
    is_wrapped = len(unknown) == len(survey.tensors)
    usual = {usual_name(f"{one}.weight").removesuffix(".weight"): one for one in modules}
    usual |= {one: one for one in modules}
    names: dict[str, str] = {}
    for name in unknown:
        tails = [name[dot.end() :] for dot in re.finditer(r"\.", name) if is_wrapped]
        spelled = (new for tail in (name, *tails) for new in (tail, usual_name(tail)))
        new = next(filter(None, (_in_table(one, usual) for one in spelled)), name)
        if new != name and new not in survey.tensors:
            names[name] = new
    if names:
        old, new = next(iter(names.items()))
        findings.add(
            "names-wrong",
            names,
            f"{len(names)} tensors have other names than engines expect: {old} is {new}",
        )
        survey.rename(names)


def _in_table(name: str, usual: Mapping[str, str]) -> str:
    """The table's name of a module's weight or a part of it; empty if it has none. usual: the
    table's names of modules by the usual ones."""
    module, _, part = name.rpartition(".")
    return usual.get(name, f"{usual[module]}.{part}" if module in usual else "")


def _is_of(name: str, modules: Collection[str]) -> bool:
    """Whether the tensor is a module's weight or a part of it."""
    return name in modules or name.rpartition(".")[0] in modules


def compare(
    survey: Survey, structure: Structure, description: Description, where: str, findings: Findings
) -> None:
    """Compare the tensors with the table. where: the file that describes the quantization."""
    structure.rows = resolve(structure.rows, survey.tensors)
    if description.foreign:
        pass  # its names and shapes are another program's
    elif structure.rows:
        _compare_rows(survey, structure, description, findings)
    else:
        _compare_layers(survey, findings)
    fused = [name for name in survey.tensors if _MOE_FUSED.search(name)]
    expected = (
        any(row.expert is not None for row in structure.missing)
        if structure.rows
        else any(name.endswith("_packed") for name in fused)
    )
    if fused and expected and not description.foreign:
        findings.add(
            "experts-fused",
            fused,
            "all experts of a layer are in one tensor, which engines do not expect for this model",
        )
    if description.readable and description.linears:
        known = {row.module for row in structure.rows}
        format = description.format
        lists_head = format is not None and format.name in _HEADS_LISTED
        roles = ("linear", "kv_b", *(("head",) if lists_head else ()))
        unquantized = [
            row.module
            for row in structure.rows
            if row.role in roles
            and row.name in survey.tensors
            and not description.is_quantized(row.module)
            and not (row.mtp and row.role == "head")
        ]
        others = [
            name.removesuffix(".weight") for name in survey.tensors if has_linear_suffix(name)
        ]
        unquantized += [
            module
            for module in others
            if module not in known and not description.is_quantized(module)
        ]
        compare_lists(description, unquantized, where, findings)
        _compare_routers(structure, survey, description, where, findings)
        _compare_kinds(structure, survey, description, findings)


def _compare_rows(
    survey: Survey, structure: Structure, description: Description, findings: Findings
) -> None:
    rows = structure.rows
    # In a format that is not read, a linear is present if any of its parts is.
    stored_modules = (
        set() if description.readable else {name.rpartition(".")[0] for name in survey.tensors}
    )
    stored = [
        description.is_quantized(row.module)
        or row.name in survey.tensors
        or row.module in stored_modules
        for row in rows
    ]
    structure.missing = [row for row, is_there in zip(rows, stored) if not is_there]
    if survey.tensors:
        _report_missing(survey, structure, findings)
    wrong = []
    for row in rows:
        held = description.linears.get(row.module) or survey.tensors.get(row.name)
        if held is None or row.module in description.broken:
            continue
        shape = tuple(held.shape)
        packed = description.format is None and survey.tensors[row.name].dtype.itemsize == 1
        if shape != row.shape and not (packed and len(shape) == 2):
            wrong.append((row, shape))
    if wrong:
        row, shape = wrong[0]
        evidence = f"{row.name} is {list(shape)}, and by config.json {list(row.shape)}"
        transposed = sum(shape == row.shape[::-1] for row, shape in wrong)
        evidence += f"; {transposed} of {len(wrong)} are transposed" if transposed else ""
        findings.add("shape-wrong", [row.name for row, _ in wrong], evidence)
    _report_unknown(survey, structure, findings)


def _report_missing(survey: Survey, structure: Structure, findings: Findings) -> None:
    missing = structure.missing
    mtp = [row for row in missing if row.mtp]
    mtp_rows = sum(row.mtp for row in structure.rows)
    # transformers writes no copy of embedding and head in an MTP layer; engines share the main
    # ones.
    needed = [row for row in mtp if row.role not in ("embedding", "head")]
    # What the decoder's layers lack as well, config.json asks of every layer.
    lacking = {row.within_layer for row in missing if row.layer is not None and not row.mtp}
    everywhere = [row for row in needed if row.layer is not None and row.within_layer in lacking]
    needed = [row for row in needed if row not in everywhere]
    if mtp and len(mtp) == mtp_rows:
        evidence = (
            "config.json has an MTP layer (num_nextn_predict_layers, num_mtp_layers), and "
            "none of its tensors is stored"
        )
        findings.add("mtp-missing", f"layer {mtp[0].layer}", evidence)
    elif needed:
        findings.add(
            "mtp-incomplete",
            [row.name for row in needed],
            f"{len(needed)} of {mtp_rows} tensors of the MTP layer are not stored",
        )
    head = [row for row in missing if row.role == "head" and not row.mtp]
    if head:
        findings.add(
            "head-missing",
            head[0].name,
            "config.json does not tie it to the embedding, and it is not stored",
        )
    of_mtp = [] if len(mtp) == mtp_rows else everywhere
    rest = [row for row in missing if not row.mtp and row not in head] + of_mtp
    if rest:
        experts = sum(row.expert is not None for row in rest)
        of_experts = f", {experts} of them of routed experts" if experts else ""
        findings.add(
            "tensors-missing",
            [row.name for row in rest],
            f"{len(rest)} tensors that config.json requires are not stored{of_experts}",
        )


def _report_unknown(survey: Survey, structure: Structure, findings: Findings) -> None:
    assert structure.config is not None
    modules = {row.module for row in structure.rows} | {row.name for row in structure.rows}
    layers = structure.config.num_hidden_layers
    num_layers = structure.config.num_hidden_layers + structure.config.num_nextn_predict_layers
    dropped = re.compile("|".join(f"(?:{pattern})" for pattern in DROPPED))
    unknown = [
        name for name in survey.tensors if not _is_of(name, modules) and not dropped.fullmatch(name)
    ]
    unknown = [name for name in unknown if not name.startswith(structure.config.copied_prefixes)]
    extra_layers = [
        name for name in unknown if (found := _LAYER.search(name)) and int(found[1]) >= num_layers
    ]
    if extra_layers:
        mtp = any(
            "eh_proj" in name or ".enorm" in name or ".hnorm" in name for name in extra_layers
        )
        numbers = sorted({int(found[1]) for name in extra_layers if (found := _LAYER.search(name))})
        evidence = f"layers {numbers[0]} to {numbers[-1]} are stored, and config.json has {layers}"
        if mtp:
            findings.add(
                "mtp-not-announced",
                extra_layers,
                f"{evidence}, and num_nextn_predict_layers {num_layers - layers}",
            )
        else:
            findings.add("layers-beyond", extra_layers, evidence)
    beyond = set(extra_layers)
    known_layers = [name for name in unknown if name not in beyond and not _MOE_FUSED.search(name)]
    counted = {row.expert for row in structure.rows}
    experts = [
        name
        for name in known_layers
        if (found := _EXPERT.search(name)) and int(found[1]) not in counted
    ]
    if experts:
        findings.add("layers-beyond", experts, "more experts than config.json has")
    beyond |= set(experts)
    rest = [name for name in known_layers if name not in beyond]
    adapters = [name for name in survey.tensors if ".lora_" in name and name not in modules]
    if adapters:
        findings.add(
            "tensors-unknown",
            adapters,
            f"{len(adapters)} tensors of an adapter that was not merged",
            "merge_and_unload() of peft merges it; quantize the result",
        )
        rest = [name for name in rest if name not in set(adapters)]
    kinds = Counter(
        _LAYER.sub(".N.", name) for name in rest if name.endswith(".weight") and _LAYER.search(name)
    )
    within = {f"{row.within_layer}.weight" for row in structure.rows if row.layer is not None}
    unexpected = [
        kind
        for kind, count in kinds.items()
        if count >= layers and kind.partition(".N.")[2] not in within
    ]
    if unexpected:
        evidence = (
            f"all {layers} layers hold {unexpected[0].partition('.N.')[2]}, and a model of "
            f"type {survey.config['model_type']} has none"
        )
        findings.add(
            "architecture-wrong",
            [name for name in rest if _LAYER.sub(".N.", name) in unexpected],
            evidence,
        )
    elif rest:
        findings.add(
            "tensors-unknown", rest, f"{len(rest)} tensors that the architecture does not have"
        )


def _compare_layers(survey: Survey, findings: Findings) -> None:
    """Without a table: every expert of a layer has the same tensors, and expert numbers have no
    gaps."""
    tails: dict[str, dict[int, set[str]]] = {}
    for name in survey.tensors:
        found = re.match(r"(.*\.experts)\.(\d+)\.(.+)", name)
        if found:
            tails.setdefault(found[1], {}).setdefault(int(found[2]), set()).add(found[3])
    missing = []
    for prefix, experts in tails.items():
        usual = Counter(tail for group in experts.values() for tail in group)
        common = {tail for tail, count in usual.items() if count * 2 > len(experts)}
        missing += [
            f"{prefix}.{number}.{tail}"
            for number in range(max(experts) + 1)
            for tail in common - experts.get(number, set())
        ]
    if missing:
        findings.add(
            "tensors-missing",
            missing,
            f"{len(missing)} tensors that the other experts of their layers have",
        )


def _compare_kinds(
    structure: Structure, survey: Survey, description: Description, findings: Findings
) -> None:
    """Check which linears of each kind are quantized."""
    missing = {row.name for row in structure.missing}
    rows = [row for row in structure.rows if row.name not in missing]
    routed: dict[int | None, list[Parameter]] = {}
    fused: dict[str, list[Parameter]] = {}
    for row in rows:
        if row.expert is not None and row.role == "linear":
            routed.setdefault(row.layer, []).append(row)
        if row.fused is not None:
            fused.setdefault(row.fused, []).append(row)
    mixed = [row.module for group in routed.values() for row in _minority(group, description)]
    if mixed:
        findings.add(
            "experts-mixed",
            mixed,
            "the other experts of their layers are stored differently, and engines run them as one",
        )
    uneven = [
        group
        for group in fused.values()
        if group[0].expert is None and _minority(group, description)
    ]
    if uneven:
        evidence = "engines run them as one linear, and only some are quantized"
        findings.add("siblings-mixed", [row.module for group in uneven for row in group], evidence)
    experts = [row for group in routed.values() for row in group if not row.mtp]
    others = [row for row in rows if row.role == "linear" and row.expert is None and not row.mtp]
    if (
        experts
        and not any(description.is_quantized(row.module) for row in experts)
        and any(description.is_quantized(r.module) for r in others)
    ):
        held = sum(survey.tensors[row.name].nbytes for row in experts)
        evidence = f"no routed expert is quantized: {held / max(survey.nbytes, 1):.0%} of the bytes"
        findings.add("experts-plain", [row.module for row in experts], evidence)
    for role in ("router", "embedding"):
        quantized = [
            row.module for row in rows if row.role == role and description.is_quantized(row.module)
        ]
        if quantized:
            findings.add(f"{role}-quantized", quantized, "engines build it in 16 bits")


def _compare_routers(
    structure: Structure, survey: Survey, description: Description, where: str, findings: Findings
) -> None:
    """Some engines build routers as linears that may be quantized. A writer that lists one router
    meant all; writers for other engines list none."""
    block = survey.config.get("quantization_config")
    entries = (
        (block.get("ignore") or block.get("modules_to_not_convert"))
        if isinstance(block, dict)
        else None
    )
    routers = [
        row.module
        for row in structure.rows
        if row.role == "router" and row.name in survey.tensors and not row.mtp
    ]
    format = description.format
    if (
        description.ignored is None
        or format is None
        or format.name not in _HEADS_LISTED
        or not isinstance(entries, list)
        or not routers
    ):
        return
    bare = [module for module in routers if not description.ignored(module)]
    leaf = routers[0].rpartition(".")[2]
    meant = [entry for entry in entries if str(entry).rstrip("$*.\\").endswith(leaf)]
    if bare and (meant or len(bare) < len(routers)):
        evidence = (
            f"{where} lists {meant[0] if meant else 'other routers'} as unquantized, which "
            f"does not match {bare[0]}"
        )
        findings.add("list-matches-nothing", bare, evidence)


def _minority(rows: Iterable[Parameter], description: Description) -> list[Parameter]:
    """Of a partly quantized set of rows, the smaller part."""
    halves: tuple[list[Parameter], list[Parameter]] = ([], [])
    for row in rows:
        halves[description.is_quantized(row.module)].append(row)
    return min(halves, key=len)


def is_tied(survey: Survey, structure: Structure) -> bool:
    """Whether a stored head is tied to the embedding, by the table or, without one, config.json."""
    has_own = any(row.role == "head" and not row.mtp for row in structure.rows)
    tied = not has_own if structure.rows else survey.config.get("tie_word_embeddings") is True
    return tied and f"{HEAD}.weight" in survey.tensors


_LARGEST_EPSILON = 0.01
"""Published models have at most 1e-5."""
_DTYPES = ("float16", "bfloat16", "float32", "float64", "half", "float", "double", "auto")
"""Activation dtypes that transformers and vLLM accept."""
_GENERATES = ("CausalLM", "ConditionalGeneration")
_PUBLISHED_AS = {"kimik2": ("deepseekv3",), "kimik25": ("kimik25", "deepseekv3")}
"""Class names that differ from the model_type, without punctuation: Kimi-K2 is published under
DeepSeek's class."""


def check_fields(survey: Survey, structure: Structure, findings: Findings) -> None:
    """Check fields of config.json that are wrong for any architecture: epsilon, dtype and class. A
    config.json that could not be read is skipped."""
    config = survey.config
    if not config:
        return
    if not isinstance(config.get("model_type"), str):
        findings.add(
            "config-field",
            "config.json",
            "it has no model_type, by which engines choose the model's code and its fields",
        )
        return
    _check_class(config, findings)
    dtype = config.get("dtype", config.get("torch_dtype"))
    is_one = dtype is not None and not isinstance(dtype, dict)  # of several parts of a model
    if is_one and str(dtype).removeprefix("torch.") not in _DTYPES:
        evidence = f"torch_dtype {dtype!r} is not a dtype that models compute in"
        findings.add("config-field", "config.json", evidence, "write float16, bfloat16 or float32")
    epsilon = _LARGEST_EPSILON if structure.config is None else structure.config.rms_norm_eps
    if not 0 < epsilon <= _LARGEST_EPSILON:
        findings.add(
            "config-field", "config.json", f"rms_norm_eps is {epsilon:g}, which no model has"
        )


def _check_class(config: Mapping[str, Any], findings: Findings) -> None:
    """vLLM and SGLang choose the model's code by `architectures`, transformers by model_type."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if not first:
        findings.add(
            "class-missing",
            "config.json",
            "architectures is empty, and vLLM and SGLang choose the model's code by it",
        )
        return
    if not is_known(config):
        return
    family, _, task = first.partition("For")
    kind = _normalized_name(str(config["model_type"]))
    if _normalized_name(family) not in (kind, *_PUBLISHED_AS.get(kind, ())) or not task.startswith(
        _GENERATES
    ):
        evidence = (
            f"architectures says {first}, and model_type {config['model_type']}: engines "
            "read one or the other"
        )
        findings.add("class-wrong", "config.json", evidence)


def _normalized_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
