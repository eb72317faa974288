"""The 25 kinds of verifiable instructions of IFEval, each a function of the reply and the
instruction's parameters.

After "Instruction-Following Evaluation for Large Language Models" (Zhou et al., 2023): the verdicts
are those of the authors' checker, its patterns included where they are more lenient than the
instruction (a postscript may be anywhere). `make test-lm-eval` compares them. An empty reply
follows no instruction. `loose` accepts a reply that follows without its first line, its last line
or its asterisks.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import regex

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.grading.languages import language_of
from quantkit.evaluation.grading.sentences import capital_words, count_sentences

Check = Callable[[str, dict[str, Any]], bool]


def _satisfies(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


def _paragraphs(reply: str, given: dict[str, Any]) -> bool:
    """Paragraphs are separated by ***; an empty one counts only against the reply, at its ends not
    at all."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", reply)]
    return all(parts[1:-1]) and sum(bool(part) for part in parts) == given["num_paragraphs"]


def _first_word(reply: str, given: dict[str, Any]) -> bool:
    """Paragraphs are separated by empty lines; the nth begins with a word."""
    parts = reply.split("\n\n")
    count, place = sum(bool(part.strip()) for part in parts), given["nth_paragraph"]
    if place > count or not parts[place - 1].strip():
        return False
    word = parts[place - 1].split()[0].lstrip("'").lstrip('"')
    return (
        count == given["num_paragraphs"]
        and re.split(r"[.,?!'\"]", word)[0].lower() == given["first_word"].lower()
    )


def _postscript(reply: str, given: dict[str, Any]) -> bool:
    marker = given["postscript_marker"].strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, marker.lower()), reply.lower()) is not None


def _bullets(reply: str, given: dict[str, Any]) -> bool:
    starred = re.findall(r"^\s*\*[^*].*$", reply, re.MULTILINE)
    dashed = re.findall(r"^\s*-.*$", reply, re.MULTILINE)
    return len(starred) + len(dashed) == given["num_bullets"]


def _highlights(reply: str, given: dict[str, Any]) -> bool:
    single = [piece for piece in re.findall(r"\*[^\n*]*\*", reply) if piece.strip("*").strip()]
    double = [piece for piece in re.findall(r"\*\*[^\n*]*\*\*", reply) if piece[2:-2].strip()]
    return len(single) + len(double) >= given["num_highlights"]


def _json(reply: str, given: dict[str, Any]) -> bool:
    text = reply.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(reply: str, given: dict[str, Any]) -> bool:
    parts = [part.strip() for part in reply.split("******")]
    said = [part for part in parts if part]
    return all(parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def _quoted(reply: str, given: dict[str, Any]) -> bool:
    text = reply.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda reply, given: all(
        re.search(word, reply, re.IGNORECASE) for word in given["keywords"]
    ),
    "keywords:frequency": lambda reply, given: _satisfies(
        len(re.findall(given["keyword"].strip(), reply, re.IGNORECASE)),
        given["relation"],
        given["frequency"],
    ),
    "keywords:forbidden_words": lambda reply, given: (
        not any(
            re.search(rf"\b{word}\b", reply, re.IGNORECASE) for word in given["forbidden_words"]
        )
    ),
    "keywords:letter_frequency": lambda reply, given: _satisfies(
        reply.lower().count(given["letter"].strip().lower()),
        given["let_relation"],
        given["let_frequency"],
    ),
    "language:response_language": lambda reply, given: (
        language_of(reply) in (None, given["language"])
    ),
    "length_constraints:number_sentences": lambda reply, given: _satisfies(
        count_sentences(reply), given["relation"], given["num_sentences"]
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda reply, given: _satisfies(
        len(regex.findall(r"\w+", reply)), given["relation"], given["num_words"]
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda reply, given: (
        len(re.findall(r"\[.*?\]", reply)) >= given["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda reply, given: any(
        f"My answer is {word}." in reply for word in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda reply, given: (
        len(re.findall(rf"{given['section_spliter'].strip()}\s?\d+", reply))
        >= given["num_sections"]
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda reply, given: any(
        title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", reply)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda reply, given: (
        reply.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda reply, given: (
        reply.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": lambda reply, given: _satisfies(
        capital_words(reply), given["capital_relation"], given["capital_frequency"]
    ),
    "change_case:english_capital": lambda reply, given: (
        reply.isupper() and language_of(reply) in (None, "en")
    ),
    "change_case:english_lowercase": lambda reply, given: (
        reply.islower() and language_of(reply) in (None, "en")
    ),
    "punctuation:no_comma": lambda reply, given: "," not in reply,
}
"""Instruction id -> whether a reply that is not empty follows it."""


def check_row(fields: dict[str, Any]) -> str:
    """The ids of a row's instructions in one line. Raises QuantkitError where one is not known or
    lacks its parameters."""
    ids, given = fields["instructions"], fields["parameters"]
    for name, parameters in zip(ids, given, strict=False):
        if name not in CHECKS:
            raise QuantkitError(
                f"instruction {name!r} is not known", f"IFEval has {', '.join(CHECKS)}"
            )
        try:
            CHECKS[name]("A reply.", parameters)
        except (KeyError, TypeError, AttributeError, re.error) as error:
            raise QuantkitError(
                f"instruction {name} lacks or cannot use a parameter ({error})",
                "use the rows of google/IFEval",
            ) from error
    if len(ids) != len(given):
        raise QuantkitError(
            f"{len(ids)} instructions have {len(given)} sets of parameters",
            "use the rows of google/IFEval",
        )
    return ", ".join(ids)


def check_instructions(
    reply: str, ids: list[str], given: list[dict[str, Any]], loose: bool
) -> list[bool]:
    """Whether the reply follows each instruction."""
    readings = _readings(reply) if loose else [reply]
    return [
        any(text.strip() and CHECKS[name](text, parameters) for text in readings)
        for name, parameters in zip(ids, given)
    ]


def _readings(reply: str) -> list[str]:
    """The reply, without its first line, its last, both; each also without asterisks."""
    lines = reply.split("\n")
    cut = [reply, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(text.replace("*", "") for text in cut)]
