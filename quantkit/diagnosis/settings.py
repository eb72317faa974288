"""What stands beside the weights: tokenizer, end of a text, chat template, and config.json against the source's."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.structure import Structure
from quantkit.diagnosis.survey import Survey

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
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
_TOLD, _SHOWN = 80, 4


def check_settings(survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
    """What the files say of themselves and of each other."""
    rows = _embedding_rows(survey, structure)
    vocabulary, added = _vocabulary(survey, findings)
    if not any(name in survey.names for name in _TOKENIZERS):
        findings.add("tokenizer-missing", str(survey.path), "no tokenizer.json, tokenizer.model or vocab.json")
    if rows and vocabulary and max(vocabulary.values()) >= rows:
        beyond = [token for token, number in vocabulary.items() if number >= rows]
        told = f"{len(beyond)} tokens have numbers of {rows} and more, and the embedding has {rows} rows"
        findings.add("tokenizer-too-large", "tokenizer.json", told)
    _check_ends(survey, rows, {**vocabulary, **added}, findings)
    _check_template(survey, findings)


def _embedding_rows(survey: Survey, structure: Structure) -> int:
    name = next((row.name for row in structure.rows if row.role == "embedding" and not row.mtp), "model.embed_tokens.weight")
    stored = survey.tensors.get(name)
    claimed = survey.config.get("vocab_size")
    return stored.shape[0] if stored is not None and stored.shape else claimed if type(claimed) is int else 0


def _vocabulary(survey: Survey, findings: DiagnosisFindings) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens and their numbers, and those that were added. Empty where there is no tokenizer.json, or another kind of it."""
    tokenizer = survey.settings.get("tokenizer.json", {})
    model = tokenizer.get("model")
    if tokenizer and not isinstance(model, dict):
        findings.add("tokenizer-broken", "tokenizer.json", "it has no model of tokens")
    found = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(found, list):  # Unigram: [token, score] in order
        vocabulary = {str(entry[0]): number for number, entry in enumerate(found) if isinstance(entry, list) and entry}
    else:
        vocabulary = {token: number for token, number in (found or {}).items() if type(number) is int} if isinstance(found, dict) else {}
    if tokenizer and isinstance(model, dict) and not vocabulary:
        findings.add("tokenizer-broken", "tokenizer.json", "its vocabulary is empty")
    numbers = Counter(vocabulary.values())
    shared = [token for token, number in vocabulary.items() if numbers[number] > 1]
    if shared:
        findings.add("tokenizer-broken", "tokenizer.json", f"{shared[0]!r} and {shared[1]!r} have one number, {vocabulary[shared[0]]}")
    entries = tokenizer.get("added_tokens") or []
    added = {
        entry["content"]: entry["id"]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int
    }
    return vocabulary, added


def end_tokens(survey: Survey) -> dict[str, list[int]]:
    """Numbers of the tokens that end a text, by the file that says so."""
    places = {"config.json": survey.config, "generation_config.json": survey.settings.get("generation_config.json", {})}
    found = {}
    for name, values in places.items():
        said = values.get("eos_token_id")
        numbers = said if isinstance(said, list) else [] if said is None else [said]
        if numbers:
            found[name] = [number for number in numbers if type(number) is int]
    return found


def _check_ends(survey: Survey, rows: int, tokens: Mapping[str, int], findings: DiagnosisFindings) -> None:
    ends = end_tokens(survey)
    for name, numbers in ends.items():
        outside = [number for number in numbers if number < 0 or (rows and number >= rows)]
        if outside:
            findings.add("eos-outside", name, f"eos_token_id {outside[0]}, and the embedding has {rows} rows")
    described = survey.settings.get("tokenizer_config.json", {})
    special = {name: _content(described.get(name)) for name in _SPECIAL}
    unknown = [f"{name} {token!r}" for name, token in special.items() if token and tokens and token not in tokens]
    if unknown:
        findings.add("special-token-unknown", "tokenizer_config.json", f"{', '.join(unknown)}: tokenizer.json does not have it")
    end, said = special["eos_token"], {number for numbers in ends.values() for number in numbers}
    if survey.config and not ends and end in tokens:
        findings.add("eos-lost", "config.json", f"neither it nor generation_config.json ends a text, and the tokenizer does with {end!r}")
    if end in tokens and said and tokens[end] not in said:
        told = f"the tokenizer ends a text with {end!r}, number {tokens[end]}, and the model with {sorted(said)}"
        findings.add("eos-differs", list(ends), told)


def _content(token: Any) -> str:
    """A token of tokenizer_config.json: a text, or an object that holds one."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def template_of(survey: Survey) -> str:
    """The chat template, wherever it stands; the default one of several. Empty without."""
    if survey.template is not None:
        return survey.template
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = survey.settings.get(name, {}).get("chat_template")
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return ""


def _check_template(survey: Survey, findings: DiagnosisFindings) -> None:
    template = template_of(survey)
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation(template))
    except TemplateSyntaxError as fault:
        findings.add("template-broken", "chat template", f"line {fault.lineno}: {fault.message}")


def _without_generation(template: str) -> str:
    """Without transformers' own tag, which marks what a model says."""
    for dash in ("", "-"):
        for end in ("", "-"):
            template = template.replace(f"{{%{dash} generation {end}%}}", "").replace(f"{{%{dash} endgeneration {end}%}}", "")
    return template


def compare_settings(
    survey: Survey, structure: Structure, source: Survey, source_structure: Structure, findings: DiagnosisFindings
) -> None:
    """The same files of the source: what has another value there, or is not here."""
    _compare_configs(survey, structure, source, source_structure, findings)
    ours, theirs = survey.settings.get("tokenizer.json"), source.settings.get("tokenizer.json")
    if ours and theirs and _tokens(ours) != _tokens(theirs):
        findings.add("tokenizer-differs", "tokenizer.json", "another vocabulary, or other merges, than the source's")
    elif ours and theirs and (moved := _moved_tokens(ours, theirs)):
        findings.add("tokenizer-differs", "tokenizer.json", f"{', '.join(moved[:_SHOWN])} have other numbers than in the source's")
    mine, original = template_of(survey), template_of(source)
    if original and not mine:
        findings.add("template-missing", "chat template", "the source has one")
    elif original.strip() != mine.strip() and original:
        findings.add("template-differs", "chat template", "it is not the source's")
    here = {number for numbers in end_tokens(survey).values() for number in numbers}
    there = {number for numbers in end_tokens(source).values() for number in numbers}
    if there - here:
        findings.add("eos-lost", "generation_config.json", f"the source also ends a text with {sorted(there - here)}")
    dtypes = [values.config.get("torch_dtype", values.config.get("dtype")) for values in (survey, source)]
    if all(dtypes) and dtypes[0] != dtypes[1]:
        findings.add("dtype-differs", "config.json", f"torch_dtype {dtypes[0]}, and the source's is {dtypes[1]}")


def _tokens(tokenizer: Mapping[str, Any]) -> str:
    """What decides the numbers of a text: saving a tokenizer anew may change the rest, and how merges are written."""
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model.get("merges") or []]
    return json.dumps([model.get("vocab"), merges], sort_keys=True)


def _moved_tokens(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Added tokens that have another number in each; tokens that one of them lacks do not count."""
    mine, other = (
        {str(one.get("content")): one.get("id") for one in each.get("added_tokens") or [] if isinstance(one, dict)}
        for each in (ours, theirs)
    )
    return [token for token, number in mine.items() if token in other and other[token] != number]


def _compare_configs(
    survey: Survey, structure: Structure, source: Survey, source_structure: Structure, findings: DiagnosisFindings
) -> None:
    if structure.config is not None and type(structure.config) is type(source_structure.config):
        differ = _different_fields(structure.config, source_structure.config)
    else:
        differ = [
            (key, survey.config[key], source.config[key])
            for key in _COMPUTED
            if key in survey.config and key in source.config and survey.config[key] != source.config[key]
        ]
    # An MTP layer that was left out is told by its tensors.
    differ = [entry for entry in differ if entry[0] != "num_nextn_predict_layers"]
    if differ:
        told = ", ".join(f"{key} {_short(ours)} (source {_short(theirs)})" for key, ours, theirs in differ)
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
