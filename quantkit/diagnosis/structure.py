"""The stored tensors against the model's table: names, shapes, experts, fused siblings, head and
MTP layer."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from quantkit.checkpoint.formats.base import HEAD
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.description import Described, compare_lists
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.survey import Survey
from quantkit.models import check_missing, find_architecture, is_known
from quantkit.models.architecture import ModelConfig
from quantkit.models.stored_parameters import check_size
from quantkit.models.table import Parameter, resolve
from quantkit.models.tensor_names import ends_as_linear
from quantkit.quantization.checks import DROPPED

_OTHER_NAMES: tuple[tuple[str, str], ...] = (
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.model\.", "model."),
    (r"^language_model\.", ""),
    (r"^model\.model\.", "model."),
    (r"^module\.", ""),
    (r"^_orig_mod\.", ""),
    (r"^transformer\.", "model."),
    (r"^(?=layers\.|embed_tokens\.|norm\.)", "model."),
    (r"\.base_layer\.", "."),
    (r"\._orig_mod\.", "."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.attention\.", ".self_attn."),
)
"""Spellings that writers put in the place of the published ones, and what they stand for."""
_HEADS_LISTED = ("compressed-tensors", "modelopt")
"""Formats whose readers take the head for a linear like the others, unless it is listed."""
_MOE_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj|w13|w2)(?:\.|_|$)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass
class Structure:
    """config: as the architecture reads it, None where it cannot. rows: the table as the checkpoint
    spells it, empty without one.
    lost: those that are not stored."""

    config: ModelConfig | None = None
    rows: list[Parameter] = field(default_factory=list)
    lost: list[Parameter] = field(default_factory=list)


def read_table(survey: Survey, findings: DiagnosisFindings) -> Structure:
    """The architecture's table for config.json; empty where it has none."""
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
    return Structure(config, architecture.parameters(config))


def rename(survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
    """Give tensors the table's names where a known other spelling accounts for them, and say so."""
    if not structure.rows:
        return
    modules = {row.module for row in structure.rows} | {
        row.other_name or row.name for row in structure.rows
    }
    unknown = [name for name in survey.tensors if not _is_of(name, modules)]
    names: dict[str, str] = {}
    for name in unknown:
        new = name
        for pattern, replacement in _OTHER_NAMES:
            new = re.sub(pattern, replacement, new, count=1)
        if new != name and new not in survey.tensors and _is_of(new, modules):
            names[name] = new
    if names:
        old, new = next(iter(names.items()))
        findings.add(
            "names-wrong",
            names,
            f"{len(names)} tensors have other names than engines look for: {old} is {new}",
        )
        survey.rename(names)


def _is_of(name: str, modules: Collection[str]) -> bool:
    """Whether the tensor is a module's weight, or a part of it."""
    return name in modules or name.rpartition(".")[0] in modules


def compare(
    survey: Survey,
    structure: Structure,
    described: Described,
    where: str,
    findings: DiagnosisFindings,
) -> None:
    """Everything that table and tensors tell of each other. where: the file that describes the
    quantization."""
    structure.rows = resolve(structure.rows, survey.tensors)
    if structure.rows:
        _compare_rows(survey, structure, described, findings)
    else:
        _compare_layers(survey, findings)
    fused = [name for name in survey.tensors if _MOE_FUSED.search(name)]
    asked = (
        any(row.expert is not None for row in structure.lost)
        if structure.rows
        else any(name.endswith("_packed") for name in fused)
    )
    if fused and asked:
        findings.add(
            "experts-fused",
            fused,
            "all experts of a layer in one tensor, which engines of this model do not look for",
        )
    if described.readable and described.linears:
        linears = [row for row in structure.rows if row.role in ("linear", "kv_b")]
        plain = [
            row.module
            for row in linears
            if row.name in survey.tensors and not described.is_quantized(row.module)
        ]
        known = {row.module for row in structure.rows}
        if described.format is not None and described.format.name in _HEADS_LISTED:
            plain += [
                row.module
                for row in structure.rows
                if row.role == "head" and not row.mtp and row.name in survey.tensors
            ]
        plain += [
            name.removesuffix(".weight")
            for name in survey.tensors
            if ends_as_linear(name)
            and name.removesuffix(".weight") not in known
            and not described.is_quantized(name.removesuffix(".weight"))
        ]
        compare_lists(described, plain, where, findings)
        _compare_routers(structure, survey, described, where, findings)
        _compare_kinds(structure, survey, described, findings)


def _compare_rows(
    survey: Survey, structure: Structure, described: Described, findings: DiagnosisFindings
) -> None:
    rows = structure.rows
    # Of a format that is not read, a linear is there where anything of it is.
    there = set() if described.readable else {name.rpartition(".")[0] for name in survey.tensors}
    stored = [
        described.is_quantized(row.module) or row.name in survey.tensors or row.module in there
        for row in rows
    ]
    structure.lost = [row for row, is_there in zip(rows, stored) if not is_there]
    if survey.tensors:
        _tell_lost(survey, structure, findings)
    wrong = []
    for row in rows:
        linear = described.linears.get(row.module)
        shape = (
            linear.shape
            if linear is not None
            else survey.tensors[row.name].shape
            if row.name in survey.tensors
            else None
        )
        packed = (
            described.format is None
            and linear is None
            and shape is not None
            and len(shape) == 2
            and not _plain(survey, row)
        )
        if (
            shape is not None
            and tuple(shape) != row.shape
            and not packed
            and row.module not in described.broken
        ):
            wrong.append((row, tuple(shape)))
    if wrong:
        row, shape = wrong[0]
        told = f"{row.name} is {list(shape)}, and config.json makes it {list(row.shape)}"
        turned = sum(shape == row.shape[::-1] for row, shape in wrong)
        told += f"; {turned} of {len(wrong)} are transposed" if turned else ""
        findings.add("shape-wrong", [row.name for row, _ in wrong], told)
    _tell_unknown(survey, structure, findings)


def _plain(survey: Survey, row: Parameter) -> bool:
    return survey.tensors[row.name].dtype.itemsize > 1


def _tell_lost(survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
    lost = structure.lost
    mtp = [row for row in lost if row.mtp]
    mtp_rows = sum(row.mtp for row in structure.rows)
    # transformers writes no copy of embedding and head in an MTP layer; engines share the main
    # ones.
    needed = [row for row in mtp if row.role not in ("embedding", "head")]
    if mtp and len(mtp) == mtp_rows:
        told = (
            "config.json promises an MTP layer (num_nextn_predict_layers, num_mtp_layers), and "
            "no tensor of it is stored"
        )
        findings.add("mtp-missing", f"layer {mtp[0].layer}", told)
    elif needed:
        findings.add(
            "mtp-incomplete",
            [row.name for row in needed],
            f"{len(needed)} of {mtp_rows} tensors of the MTP layer are not stored",
        )
    head = [row for row in lost if row.role == "head" and not row.mtp]
    if head:
        findings.add(
            "head-missing",
            head[0].name,
            "config.json does not tie it to the embedding, and it is not stored",
        )
    rest = [row for row in lost if not row.mtp and row not in head]
    if rest:
        experts = sum(row.expert is not None for row in rest)
        of_experts = f", {experts} of them of routed experts" if experts else ""
        findings.add(
            "tensors-missing",
            [row.name for row in rest],
            f"{len(rest)} tensors that config.json asks for are not stored{of_experts}",
        )


def _tell_unknown(survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
    assert structure.config is not None
    modules = {row.module for row in structure.rows} | {row.name for row in structure.rows}
    layers = structure.config.num_hidden_layers
    beyond = structure.config.num_hidden_layers + structure.config.num_nextn_predict_layers
    unknown = [
        name
        for name in survey.tensors
        if not _is_of(name, modules) and not any(re.fullmatch(p, name) for p in DROPPED)
    ]
    unknown = [name for name in unknown if not name.startswith(structure.config.copied)]
    later = [name for name in unknown if (found := _LAYER.search(name)) and int(found[1]) >= beyond]
    if later:
        mtp = any("eh_proj" in name or ".enorm" in name or ".hnorm" in name for name in later)
        numbers = sorted({int(found[1]) for name in later if (found := _LAYER.search(name))})
        told = f"layers {numbers[0]} to {numbers[-1]} are stored, and config.json has {layers}"
        if mtp:
            findings.add(
                "mtp-not-announced",
                later,
                f"{told}, and num_nextn_predict_layers {beyond - layers}",
            )
        else:
            findings.add("layers-beyond", later, told)
    inside = [name for name in unknown if name not in later and not _MOE_FUSED.search(name)]
    experts = [name for name in inside if re.search(r"\.experts\.\d+\.", name)]
    if experts:
        findings.add("layers-beyond", experts, "experts that config.json does not count")
    rest = [name for name in inside if name not in experts]
    kinds = Counter(
        _LAYER.sub(".N.", name) for name in rest if name.endswith(".weight") and _LAYER.search(name)
    )
    foreign = [kind for kind, count in kinds.items() if count >= layers]
    if foreign:
        told = (
            f"all {layers} layers hold {foreign[0].partition('.N.')[2]}, and a model of type "
            f"{survey.config['model_type']} has none"
        )
        findings.add(
            "architecture-wrong",
            [name for name in rest if _LAYER.sub(".N.", name) in foreign],
            told,
        )
    elif rest:
        findings.add(
            "tensors-unknown", rest, f"{len(rest)} tensors that the architecture has no place for"
        )


def _compare_layers(survey: Survey, findings: DiagnosisFindings) -> None:
    """Without a table: every expert of a layer has what the others have, and no number is left
    out."""
    tails: dict[str, dict[int, set[str]]] = {}
    for name in survey.tensors:
        found = re.match(r"(.*\.experts)\.(\d+)\.(.+)", name)
        if found:
            tails.setdefault(found[1], {}).setdefault(int(found[2]), set()).add(found[3])
    lost = []
    for prefix, experts in tails.items():
        usual = Counter(tail for own in experts.values() for tail in own)
        common = {tail for tail, count in usual.items() if count * 2 > len(experts)}
        lost += [
            f"{prefix}.{number}.{tail}"
            for number in range(max(experts) + 1)
            for tail in common - experts.get(number, set())
        ]
    if lost:
        findings.add(
            "tensors-missing",
            lost,
            f"{len(lost)} tensors that the other experts of their layers have",
        )


def _compare_kinds(
    structure: Structure, survey: Survey, described: Described, findings: DiagnosisFindings
) -> None:
    """What is quantized of each kind of linear."""
    lost = {row.name for row in structure.lost}
    rows = [row for row in structure.rows if row.name not in lost]
    routed: dict[int | None, list[Parameter]] = {}
    fused: dict[str, list[Parameter]] = {}
    for row in rows:
        if row.expert is not None and row.role == "linear":
            routed.setdefault(row.layer, []).append(row)
        if row.fused is not None:
            fused.setdefault(row.fused, []).append(row)
    mixed = [row.module for own in routed.values() for row in _fewer(own, described)]
    if mixed:
        findings.add(
            "experts-mixed",
            mixed,
            "the other experts of their layers are stored otherwise, and engines run them as one",
        )
    uneven = [own for own in fused.values() if own[0].expert is None and _fewer(own, described)]
    if uneven:
        told = "engines run them as one linear, and only some are quantized"
        findings.add("siblings-mixed", [row.module for own in uneven for row in own], told)
    experts = [row for own in routed.values() for row in own if not row.mtp]
    others = [row for row in rows if row.role == "linear" and row.expert is None and not row.mtp]
    if (
        experts
        and not any(described.is_quantized(row.module) for row in experts)
        and any(described.is_quantized(r.module) for r in others)
    ):
        held = sum(survey.tensors[row.name].nbytes for row in experts)
        told = f"every routed expert is plain: {held / max(survey.nbytes, 1):.0%} of the bytes"
        findings.add("experts-plain", [row.module for row in experts], told)
    routers = [
        row.module
        for row in rows
        if row.role in ("router", "embedding") and described.is_quantized(row.module)
    ]
    if routers:
        findings.add("router-quantized", routers, "engines build it in 16 bits")


def _compare_routers(
    structure: Structure,
    survey: Survey,
    described: Described,
    where: str,
    findings: DiagnosisFindings,
) -> None:
    """Some engines build routers as linears that may be quantized. Whoever listed them meant all;
    writers that know them list none."""
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
    format = described.format
    if (
        described.ignored is None
        or format is None
        or format.name not in _HEADS_LISTED
        or not isinstance(entries, list)
        or not routers
    ):
        return
    bare = [module for module in routers if not described.ignored(module)]
    leaf = routers[0].rpartition(".")[2]
    meant = [entry for entry in entries if str(entry).rstrip("$*.\\").endswith(leaf)]
    if bare and (meant or len(bare) < len(routers)):
        told = (
            f"{where} lists {meant[0] if meant else 'other routers'} as unquantized, which "
            f"does not match {bare[0]}"
        )
        findings.add("list-matches-nothing", bare, told)


def _fewer(rows: Iterable[Parameter], described: Described) -> list[Parameter]:
    """Of rows that are partly quantized, those of the smaller half."""
    halves: tuple[list[Parameter], list[Parameter]] = ([], [])
    for row in rows:
        halves[described.is_quantized(row.module)].append(row)
    return min(halves, key=len)


def is_tied(survey: Survey, structure: Structure) -> bool:
    """Whether the head is the embedding, by the table."""
    return (
        bool(structure.rows)
        and not any(row.role == "head" and not row.mtp for row in structure.rows)
        and f"{HEAD}.weight" in survey.tensors
    )
