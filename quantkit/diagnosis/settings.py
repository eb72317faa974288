"""What stands beside the weights: tokenizer, end of a text, chat template, and config.json against
the source's."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from quantkit.checkpoint.aux_files import TOKENIZER_FILES
from quantkit.diagnosis.fields import check_fields
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.generation import (
    FILE,
    check_generation,
    compare_generation,
    end_tokens,
    ends_that_count,
)
from quantkit.diagnosis.structure import Structure
from quantkit.diagnosis.survey import Survey
from quantkit.diagnosis.templates import check_template, content_of, template_of
from quantkit.diagnosis.texts import (
    added_tokens,
    check_added,
    check_length,
    compare_additions,
    compare_lengths,
    compare_texts,
    load,
)

_ADAPTER = "adapter_config.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_COMPUTED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "sliding_window",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "tie_word_embeddings",
)
"""Keys that change what any decoder computes: compared for an architecture without a table."""
_TOLD = 80


def check_settings(survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
    """What the files say of themselves and of each other."""
    rows = _embedding_rows(survey, structure)
    vocabulary, added = _vocabulary(survey, findings)
    if not any(name in survey.names for name in TOKENIZER_FILES):
        findings.add(
            "tokenizer-missing",
            str(survey.path),
            "no tokenizer.json, tokenizer.model or vocab.json",
        )
    if rows and vocabulary and max(vocabulary.values()) >= rows:
        beyond = [token for token, number in vocabulary.items() if number >= rows]
        told = (
            f"{len(beyond)} tokens have numbers of {rows} and more, and the embedding has "
            f"{rows} rows"
        )
        findings.add("tokenizer-too-large", "tokenizer.json", told)
    if _ADAPTER in survey.names and survey.tensors:
        told = (
            "where PEFT is installed, transformers loads the model that it names, and the "
            "adapter, in the place of these weights"
        )
        findings.add("adapter-beside", _ADAPTER, told)
    check_fields(survey, structure, findings)
    check_generation(survey, rows, findings)
    check_added(survey, rows, findings)
    _check_ends(survey, rows, {**vocabulary, **added}, findings)
    check_template(survey, {**vocabulary, **added}, findings)
    check_length(survey, findings)
    load(survey, findings)


def _embedding_rows(survey: Survey, structure: Structure) -> int:
    name = next(
        (row.name for row in structure.rows if row.role == "embedding" and not row.mtp),
        "model.embed_tokens.weight",
    )
    stored = survey.tensors.get(name)
    claimed = survey.config.get("vocab_size")
    return (
        stored.shape[0]
        if stored is not None and stored.shape
        else claimed
        if type(claimed) is int
        else 0
    )


def _vocabulary(
    survey: Survey, findings: DiagnosisFindings
) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens and their numbers, and those that were added. Empty where there is no tokenizer.json,
    or another kind of it."""
    tokenizer = survey.settings.get("tokenizer.json", {})
    model = tokenizer.get("model")
    if tokenizer and not isinstance(model, dict):
        findings.add("tokenizer-broken", "tokenizer.json", "it has no model of tokens")
    found = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(found, list):  # Unigram: [token, score] in order
        vocabulary = {
            str(entry[0]): number
            for number, entry in enumerate(found)
            if isinstance(entry, list) and entry
        }
    else:
        vocabulary = (
            {token: number for token, number in (found or {}).items() if type(number) is int}
            if isinstance(found, dict)
            else {}
        )
    if tokenizer and isinstance(model, dict) and not vocabulary:
        findings.add("tokenizer-broken", "tokenizer.json", "its vocabulary is empty")
    numbers = Counter(vocabulary.values())
    shared = [token for token, number in vocabulary.items() if numbers[number] > 1]
    if shared:
        findings.add(
            "tokenizer-broken",
            "tokenizer.json",
            f"{shared[0]!r} and {shared[1]!r} have one number, {vocabulary[shared[0]]}",
        )
    return vocabulary, added_tokens(tokenizer)


def _check_ends(
    survey: Survey, rows: int, tokens: Mapping[str, int], findings: DiagnosisFindings
) -> None:
    ends = end_tokens(survey)
    for name, numbers in ends.items():
        outside = [
            number
            for number in numbers
            if type(number) is not int or number < 0 or (rows and number >= rows)
        ]
        if outside:
            findings.add(
                "eos-outside",
                name,
                f"eos_token_id {outside[0]!r}, and the embedding has {rows} rows",
            )
    tokenizer_config = survey.settings.get("tokenizer_config.json", {})
    special = {name: content_of(tokenizer_config.get(name)) for name in _SPECIAL}
    unknown = [
        f"{name} {token!r}"
        for name, token in special.items()
        if token and tokens and token not in tokens
    ]
    if unknown:
        findings.add(
            "special-token-unknown",
            "tokenizer_config.json",
            f"{', '.join(unknown)}: tokenizer.json does not have it",
        )
    end, said = special["eos_token"], ends_that_count(ends)
    if survey.config and not ends and end in tokens:
        findings.add(
            "eos-lost",
            "config.json",
            "neither it nor generation_config.json ends a text, and the tokenizer does with "
            f"{end!r}",
        )
    if end in tokens and said and str(tokens[end]) not in said:
        told = (
            f"the tokenizer ends a text with {end!r}, number {tokens[end]}, and the model with "
            f"{', '.join(sorted(said))}"
        )
        findings.add("eos-differs", FILE if ends.get(FILE) else "config.json", told)


def compare_settings(
    survey: Survey,
    structure: Structure,
    source: Survey,
    source_structure: Structure,
    findings: DiagnosisFindings,
) -> None:
    """The same files of the source: what has another value there, or is not here."""
    _compare_configs(survey, structure, source, source_structure, findings)
    ours, theirs = survey.settings.get("tokenizer.json"), source.settings.get("tokenizer.json")
    if ours and theirs and _tokens(ours) != _tokens(theirs):
        findings.add(
            "tokenizer-differs",
            "tokenizer.json",
            "another vocabulary, or other merges, than the source's",
        )
    elif (tokenizer := load(survey, findings)) is not None and (
        original := load(source, DiagnosisFindings())
    ) is not None:
        compare_texts(tokenizer, original, source, findings)
    compare_additions(survey, source, findings)
    compare_generation(survey, source, findings)
    compare_lengths(survey, source, findings)
    mine, other = template_of(survey), template_of(source)
    if other and not mine:
        findings.add("template-missing", "chat template", "the source has one")
    elif other.strip() != mine.strip() and other:
        findings.add("template-differs", "chat template", "it is not the source's")
    here = {str(number) for numbers in end_tokens(survey).values() for number in numbers}
    there = {str(number) for numbers in end_tokens(source).values() for number in numbers}
    if there - here:
        findings.add(
            "eos-lost", FILE, f"the source also ends a text with {', '.join(sorted(there - here))}"
        )
    dtypes = [
        values.config.get("torch_dtype", values.config.get("dtype")) for values in (survey, source)
    ]
    if all(dtypes) and dtypes[0] != dtypes[1]:
        findings.add(
            "dtype-differs",
            "config.json",
            f"torch_dtype {dtypes[0]}, and the source's is {dtypes[1]}",
        )


def _tokens(tokenizer: Mapping[str, Any]) -> str:
    """What decides the numbers of a text: saving a tokenizer anew may change the rest, and how
    merges are written."""
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    merges = [
        " ".join(pair) if isinstance(pair, list) else pair for pair in model.get("merges") or []
    ]
    return json.dumps([model.get("vocab"), merges], sort_keys=True)


def _compare_configs(
    survey: Survey,
    structure: Structure,
    source: Survey,
    source_structure: Structure,
    findings: DiagnosisFindings,
) -> None:
    if structure.config is not None and type(structure.config) is type(source_structure.config):
        differ = _different_fields(structure.config, source_structure.config)
    else:
        differ = [
            (key, survey.config[key], source.config[key])
            for key in _COMPUTED
            if key in survey.config
            and key in source.config
            and survey.config[key] != source.config[key]
        ]
    begin, other = (values.config.get("bos_token_id") for values in (survey, source))
    if type(begin) is int and type(other) is int and begin != other:
        differ.append(("bos_token_id", begin, other))
    # An MTP layer that was left out is told by its tensors.
    differ = [entry for entry in differ if entry[0] != "num_nextn_predict_layers"]
    if differ:
        told = ", ".join(
            f"{key} {_short(ours)} (source {_short(theirs)})" for key, ours, theirs in differ
        )
        findings.add("config-differs", [key for key, _, _ in differ], told)


def _different_fields(ours: Any, theirs: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for one in fields(ours):
        mine, other = getattr(ours, one.name), getattr(theirs, one.name)
        if is_dataclass(mine) and type(mine) is type(other):
            found += _different_fields(mine, other, f"{prefix}{one.name}.")
        elif mine != other:
            found.append((prefix + one.name, mine, other))
    return found


def _short(value: Any) -> str:
    told = str(value)
    return told if len(told) <= _TOLD else told[: _TOLD - 3] + "..."
