"""Tokenizer, generation settings and chat template next to the weights, and config.json compared
with the source's."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from quantkit.checkpoint.aux_files import TOKENIZER_FILES
from quantkit.diagnosis import Findings
from quantkit.diagnosis.structure import Structure, check_fields
from quantkit.diagnosis.survey import Survey
from quantkit.diagnosis.tokenizer_checks import (
    added_tokens,
    check_added_tokens,
    check_template,
    check_truncation,
    compare_added_specials,
    compare_max_length,
    compare_token_ids,
    content_of,
    load_tokenizer,
    template_of,
    vocabulary_of,
)

_ADAPTER = "adapter_config.json"
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
"""Keys that affect any decoder's computation: compared for an architecture without a table."""
_MAX_VALUE_CHARS = 80


def check_settings(survey: Survey, structure: Structure, findings: Findings) -> None:
    """Check the files by themselves and against each other."""
    rows = _embedding_rows(survey, structure)
    vocabulary, added = _vocabulary(survey, findings)
    if not any(name in survey.names for name in TOKENIZER_FILES):
        findings.add(
            "tokenizer-missing",
            str(survey.path),
            "no tokenizer.json, tokenizer.model or vocab.json",
        )
    if rows and vocabulary and max(vocabulary.values()) >= rows:
        outside = [token for token, number in vocabulary.items() if number >= rows]
        evidence = (
            f"{len(outside)} tokens have ids of {rows} and more, and the embedding has {rows} rows"
        )
        findings.add("tokenizer-too-large", "tokenizer.json", evidence)
    if _ADAPTER in survey.names and survey.tensors:
        evidence = (
            "if PEFT is installed, transformers loads the model that it names, and the "
            "adapter, instead of these weights"
        )
        findings.add("adapter-beside", _ADAPTER, evidence)
    check_fields(survey, structure, findings)
    check_generation(survey, rows, findings)
    check_added_tokens(survey, rows, findings)
    _check_end_tokens(survey, rows, {**vocabulary, **added}, findings)
    check_template(survey, {**vocabulary, **added}, findings)
    check_truncation(survey, findings)
    load_tokenizer(survey, findings)


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


def _vocabulary(survey: Survey, findings: Findings) -> tuple[dict[str, int], dict[str, int]]:
    """Token ids of the vocabulary, and of the added tokens. Empty without a tokenizer.json of this
    kind."""
    tokenizer = survey.settings.get("tokenizer.json", {})
    vocabulary = vocabulary_of(tokenizer)
    if tokenizer and not vocabulary:
        evidence = "it has no model, or the vocabulary of its model is empty"
        findings.add("tokenizer-broken", "tokenizer.json", evidence)
    numbers = Counter(vocabulary.values())
    shared = [token for token, number in vocabulary.items() if numbers[number] > 1]
    if shared:
        findings.add(
            "tokenizer-broken",
            "tokenizer.json",
            f"{shared[0]!r} and {shared[1]!r} have the same id, {vocabulary[shared[0]]}",
        )
    return vocabulary, added_tokens(tokenizer)


_SPECIAL_TOKENS = ("special_tokens", "added_tokens_decoder")


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Special tokens by role (`mask_token`, say), and those in a list or an object by role."""
    for key, value in tokenizer_config.items():
        if key.endswith("_token"):
            yield key, content_of(value)
        elif key.endswith(_SPECIAL_TOKENS) and isinstance(value, list | dict):
            for token in value.values() if isinstance(value, dict) else value:
                yield key, content_of(token)


def _check_end_tokens(
    survey: Survey, rows: int, tokens: Mapping[str, int], findings: Findings
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
    named = survey.settings.get("special_tokens_map.json", {}) | tokenizer_config
    more = survey.settings.get("added_tokens.json", {})
    unknown = [
        f"{name} {token!r}"
        for name, token in [*_special_tokens(named), *(("added_tokens.json", one) for one in more)]
        if token and tokens and token not in tokens
    ]
    if unknown:
        findings.add(
            "special-token-unknown",
            "tokenizer_config.json",
            f"{', '.join(unknown)}: not in tokenizer.json",
        )
    end, model_ends = content_of(tokenizer_config.get("eos_token")), effective_end_tokens(ends)
    if survey.config and not ends and end in tokens:
        findings.add(
            "eos-lost",
            "config.json",
            "neither it nor generation_config.json has an end-of-text token, and the "
            f"tokenizer has {end!r}, eos_token_id {tokens[end]}",
        )
    is_known = end in tokens and not findings.has("eos-outside", "tokenizer-broken")
    if is_known and model_ends and str(tokens[end]) not in model_ends:
        evidence = (
            f"the tokenizer's end-of-text token is {end!r}, id {tokens[end]}, and the "
            f"model's is {', '.join(sorted(model_ends))}"
        )
        findings.add("eos-differs", FILE if ends.get(FILE) else "config.json", evidence)


def compare_settings(
    survey: Survey,
    structure: Structure,
    source: Survey,
    source_structure: Structure,
    findings: Findings,
) -> None:
    """Compare with the same files of the source: other values, and what is missing here."""
    _compare_configs(survey, structure, source, source_structure, findings)
    ours, theirs = survey.settings.get("tokenizer.json"), source.settings.get("tokenizer.json")
    if ours and theirs and _tokens(ours) != _tokens(theirs):
        findings.add(
            "tokenizer-differs",
            "tokenizer.json",
            "the vocabulary or the merges differ from the source's",
        )
    elif (tokenizer := load_tokenizer(survey, findings)) is not None and (
        original := load_tokenizer(source, Findings())
    ) is not None:
        compare_token_ids(tokenizer, original, source, findings)
    compare_added_specials(survey, source, findings)
    compare_generation(survey, source, findings)
    compare_max_length(survey, source, findings)
    template, source_template = template_of(survey), template_of(source)
    if source_template and not template:
        findings.add("template-missing", "chat template", "the source has one")
    elif source_template and source_template.strip() != template.strip():
        findings.add("template-differs", "chat template", "it differs from the source's")
    here = {str(number) for numbers in end_tokens(survey).values() for number in numbers}
    there = {str(number) for numbers in end_tokens(source).values() for number in numbers}
    if there - here:
        findings.add(
            "eos-lost",
            FILE,
            (f"the source also ends a text with {', '.join(sorted(there - here))}"),
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
    """The parts that determine token ids: saving a tokenizer again may change the rest, and the
    format of merges."""
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
    findings: Findings,
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
    bos, source_bos = (values.config.get("bos_token_id") for values in (survey, source))
    if type(bos) is int and type(source_bos) is int and bos != source_bos:
        differ.append(("bos_token_id", bos, source_bos))
    # Found by their tensors: a missing MTP layer, and a head with a tensor of its own.
    differ = [entry for entry in differ if entry[0] != "num_nextn_predict_layers"]
    differ = [entry for entry in differ if entry != ("tie_word_embeddings", False, True)]
    if differ:
        evidence = ", ".join(
            f"{key} {_short(ours)} (source {_short(theirs)})" for key, ours, theirs in differ
        )
        findings.add("config-differs", [key for key, _, _ in differ], evidence)


def _different_fields(ours: Any, theirs: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for one in fields(ours):
        own, other = getattr(ours, one.name), getattr(theirs, one.name)
        if is_dataclass(own) and type(own) is type(other):
            found += _different_fields(own, other, f"{prefix}{one.name}.")
        elif own != other:
            found.append((prefix + one.name, own, other))
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


FILE = "generation_config.json"
_TOKENS = (
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
_TOKEN_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, float("inf")),
    "repetition_penalty": (1e-6, 100.0),
}
"""Ranges that transformers and vLLM accept, inclusive."""
_INTEGERS = ("top_k",)
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
}
"""Defaults of transformers, which omits values equal to them."""
_LENGTHS = ("max_new_tokens", "max_length")


def check_generation(survey: Survey, rows: int, findings: Findings) -> None:
    """Check token ids and sampling settings in config.json and generation_config.json. rows: of the
    embedding, 0 if unknown."""
    generation = survey.settings.get(FILE, {})
    for file, values in (("config.json", survey.config), (FILE, generation)):
        outside = [f"{key} {number}" for key, number in _numbers(values) if rows and number >= rows]
        if outside:
            findings.add(
                "token-outside", file, f"{', '.join(outside)}: the embedding has {rows} rows"
            )
    wrong = [
        key for key, (low, high) in _RANGES.items() if _is_outside(generation.get(key), low, high)
    ]
    wrong += [
        key for key in _INTEGERS if isinstance(generation.get(key), float) and key not in wrong
    ]
    if wrong:
        findings.add(
            "sampling-wrong",
            FILE,
            f"{', '.join(f'{key} {generation[key]!r:.40}' for key in wrong)}: engines reject it",
        )
    ends, suppressed = effective_end_tokens(end_tokens(survey)), generation.get("suppress_tokens")
    if ends and isinstance(suppressed, list) and ends <= set(map(str, suppressed)):
        findings.add(
            "sampling-wrong",
            FILE,
            f"suppress_tokens has every end-of-text token, {', '.join(sorted(ends))}: "
            "replies never end",
        )


def compare_generation(survey: Survey, source: Survey, findings: Findings) -> None:
    """Sampling settings that differ from the source's, with transformers' defaults. Writers may
    omit the file, or set do_sample."""
    ours, theirs = survey.settings.get(FILE), source.settings.get(FILE, {})
    if ours is None:
        return
    differ = [
        (key, ours.get(key, default), theirs.get(key, default))
        for key, default in _DEFAULTS.items()
    ]
    differ += [(key, ours.get(key), theirs.get(key)) for key in _LENGTHS]
    evidence = [f"{key} {value} (source {other})" for key, value, other in differ if value != other]
    if evidence:
        findings.add("sampling-differs", FILE, ", ".join(evidence))


def end_tokens(survey: Survey) -> dict[str, list[Any]]:
    """End-of-text token ids by file, including invalid values."""
    places = {"config.json": survey.config, FILE: survey.settings.get(FILE, {})}
    found = {}
    for name, values in places.items():
        ids = values.get("eos_token_id")
        numbers = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if numbers:
            found[name] = numbers
    return found


def effective_end_tokens(ends: Mapping[str, list[Any]]) -> set[str]:
    """The effective end-of-text ids: engines that read generation_config.json ignore the others.
    ends: as from end_tokens()."""
    return set(map(str, ends.get(FILE) or ends.get("config.json", [])))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key in (*_TOKENS, *_TOKEN_LISTS):
        found = [values.get(key)]
        while found:
            number = found.pop()
            if isinstance(number, list):  # bad_words_ids holds lists of tokens
                found += number
            elif type(number) is int:
                yield key, number


def _is_outside(value: Any, low: float, high: float) -> bool:
    if value is None:
        return False
    return not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high
