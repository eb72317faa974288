"""What a tokenizer does, by trying it: it loads, and texts become the source's tokens and are read
back alike."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.survey import Survey

_TRIED = (
    "Hello, World! It's 10:45 and 3.14159 > 2,718.",
    "  two  blanks\n\n\ttabs and\r\nlines",
    "def f(x_1): return x_1**2 # CamelCase",
    "Grüße, ÉCOLE, 你好，世界！ Привет 🙂 e\u0301",
)
"""Texts that differ where a tokenizer was saved with another normalizer, splitter or spelling of
blanks."""


def added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Tokens beside the vocabulary of a tokenizer.json, and their numbers."""
    entries = tokenizer.get("added_tokens")
    return {
        entry["content"]: entry["id"]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and type(entry.get("id")) is int
    }


def token_count(survey: Survey) -> int:
    """One more than the largest number of a token; where tokenizer.json does not tell, more than
    any."""
    tokenizer = survey.settings.get("tokenizer.json", {})
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        return max([len(vocabulary), *(number + 1 for number in added_tokens(tokenizer).values())])
    numbers = (
        [number for number in (vocabulary or {}).values() if type(number) is int]
        if isinstance(vocabulary, dict)
        else []
    )
    return max([*numbers, *added_tokens(tokenizer).values()]) + 1 if numbers else 1 << 40


def load(survey: Survey, findings: DiagnosisFindings) -> Tokenizer | None:
    """tokenizer.json as every engine loads it; None where there is none, or it does not load."""
    tokenizer = survey.settings.get("tokenizer.json")
    if not tokenizer or findings.has("tokenizer-broken"):
        return None
    try:
        loaded = Tokenizer.from_str(json.dumps(tokenizer))
        # Engines lift both at every call, as transformers does.
        loaded.no_truncation()
        loaded.no_padding()
        return loaded
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        findings.add("tokenizer-broken", "tokenizer.json", f"it does not load: {str(error)[:120]}")
        return None


def check_added(survey: Survey, rows: int, findings: DiagnosisFindings) -> None:
    """Added tokens: a number each, inside the embedding, the same in both files."""
    added = added_tokens(survey.settings.get("tokenizer.json", {}))
    by_number: dict[int, str] = {}
    for token, number in added.items():
        other = by_number.setdefault(number, token)
        if other != token:
            findings.add(
                "tokenizer-broken",
                "tokenizer.json",
                f"{other!r} and {token!r} have one number, {number}",
            )
            break
    beyond = [token for token, number in added.items() if rows and number >= rows]
    if beyond:
        told = (
            f"{len(beyond)} added tokens such as {beyond[0]!r} have numbers of {rows} and "
            f"more, and the embedding has {rows} rows"
        )
        findings.add("tokenizer-too-large", "tokenizer.json", told)
    listed = survey.settings.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        content = entry.get("content") if isinstance(entry, dict) else None
        if content in added and str(added[content]) != number:
            told = (
                f"tokenizer_config.json gives {content!r} the number {number}, and "
                f"tokenizer.json {added[content]}"
            )
            findings.add("tokenizer-broken", "tokenizer_config.json", told)
            break


def check_length(survey: Survey, findings: DiagnosisFindings) -> None:
    """A tokenizer that was saved while it cut texts, or filled them up to one length, does so
    wherever nobody lifts it."""
    tokenizer = survey.settings.get("tokenizer.json", {})
    cut, filled = tokenizer.get("truncation"), tokenizer.get("padding")
    told = []
    if isinstance(cut, dict) and "max_length" in cut:
        told.append(f"it cuts every text to {cut['max_length']} tokens")
    if isinstance(filled, dict) and isinstance(strategy := filled.get("strategy"), dict):
        told.append(f"it fills up every text to {strategy.get('Fixed')} tokens")
    if told:
        findings.add(
            "tokenizer-cuts",
            "tokenizer.json",
            " and ".join(told) + ", where its reader does not lift that as transformers does",
        )


def compare_texts(
    ours: Tokenizer, theirs: Tokenizer, source: Survey, findings: DiagnosisFindings
) -> None:
    """Texts, and the source's added tokens, must become the same numbers, and these the same texts
    again."""
    added = list(added_tokens(source.settings.get("tokenizer.json", {})))
    for text in (*_TRIED, *added):
        mine, other = (each.encode(text, add_special_tokens=False).ids for each in (ours, theirs))
        if mine != other:
            told = f"{text!r:.40} becomes {mine[:4]}, and by the source's {other[:4]}"
            findings.add("tokenizer-differs", "tokenizer.json", told)
            return
        again, others = (each.decode(other, skip_special_tokens=True) for each in (ours, theirs))
        if again != others:
            told = (
                f"{other[:4]} is read back as {again!r:.40}, and by the source's as {others!r:.40}"
            )
            findings.add("tokenizer-differs", "tokenizer.json", told)
            return


def compare_additions(survey: Survey, source: Survey, findings: DiagnosisFindings) -> None:
    """What tokenizer_config.json puts around every text, where it says so in both."""
    ours, theirs = (each.settings.get("tokenizer_config.json", {}) for each in (survey, source))
    differ = [
        key
        for key in ("add_bos_token", "add_eos_token")
        if key in ours and key in theirs and bool(ours[key]) != bool(theirs[key])
    ]
    if ours.get("add_eos_token") and "add_eos_token" not in theirs:
        differ.append("add_eos_token")
    if differ:
        told = ", ".join(f"{key} {ours[key]} (source {theirs.get(key)})" for key in differ)
        findings.add("tokenizer-differs", "tokenizer_config.json", told)


def compare_lengths(survey: Survey, source: Survey, findings: DiagnosisFindings) -> None:
    """vLLM takes no longer text than the tokenizer's model_max_length."""
    ours, theirs = (
        each.settings.get("tokenizer_config.json", {}).get("model_max_length")
        for each in (survey, source)
    )
    if isinstance(ours, int | float) and isinstance(theirs, int | float) and 0 < ours < theirs:
        positions = source.config.get("max_position_embeddings")
        if not isinstance(positions, int) or ours < positions:
            findings.add(
                "text-cut",
                "tokenizer_config.json",
                f"model_max_length is {ours:g}, and the source's {theirs:g}",
            )
