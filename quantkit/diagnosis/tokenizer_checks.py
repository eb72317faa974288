"""Checks of the tokenizer and the chat template by running them: they load, texts get the source's
token ids and decode to the same text, and conversations are rendered completely."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from quantkit.common.errors import QuantkitError, library_errors
from quantkit.diagnosis import Findings
from quantkit.diagnosis.survey import TEMPLATE, Survey
from quantkit.tokenizer.chat import ChatTemplate

_SAMPLES = (
    "Hello, World! It's 10:45 and 3.14159 > 2,718.",
    "  two  blanks\n\n\ttabs and\r\nlines",
    "def f(x_1): return x_1**2 # CamelCase",
    "Grüße, ÉCOLE, 你好，世界！ Привет 🙂 e\u0301",
)
"""Texts that reveal another normalizer, pre-tokenizer or encoding of spaces."""


def added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Added tokens of a tokenizer.json and their ids."""
    entries = tokenizer.get("added_tokens")
    return {
        entry["content"]: entry["id"]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and type(entry.get("id")) is int
    }


def vocabulary_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of a tokenizer.json's model and their ids; empty if it has none of a known kind."""
    model = tokenizer.get("model")
    found = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(found, list):  # Unigram: [token, score] in order
        found = {
            str(entry[0]): number
            for number, entry in enumerate(found)
            if isinstance(entry, list) and entry
        }
    entries = found.items() if isinstance(found, dict) else ()
    return {token: number for token, number in entries if type(number) is int}


def token_count(survey: Survey) -> int:
    """Largest token id + 1; more than any id if tokenizer.json does not define it."""
    tokenizer = survey.settings.get("tokenizer.json", {})
    numbers = vocabulary_of(tokenizer).values()
    return max([*numbers, *added_tokens(tokenizer).values()]) + 1 if numbers else 1 << 40


def load_tokenizer(survey: Survey, findings: Findings) -> Tokenizer | None:
    """tokenizer.json as every engine loads it; None if it is missing or does not load."""
    tokenizer = survey.settings.get("tokenizer.json")
    if not tokenizer or findings.has("tokenizer-broken"):
        return None
    try:
        with library_errors("it does not load", ""):
            loaded = Tokenizer.from_str(json.dumps(tokenizer))
    except QuantkitError as fault:
        findings.add("tokenizer-broken", "tokenizer.json", fault.problem[:140])
        return None
    # Engines disable both at every call, as transformers does.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def check_added_tokens(survey: Survey, rows: int, findings: Findings) -> None:
    """Added tokens have unique ids within the embedding, the same in both files."""
    added = added_tokens(survey.settings.get("tokenizer.json", {}))
    vocabulary = vocabulary_of(survey.settings.get("tokenizer.json", {}))
    by_number = {number: token for token, number in vocabulary.items()}
    for token, number in added.items():
        other = by_number.setdefault(number, token)
        if other != token:
            findings.add(
                "tokenizer-broken",
                "tokenizer.json",
                f"{other!r} and {token!r} have the same id, {number}",
            )
            break
    listed = survey.settings.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    outside = [token for token, number in added.items() if rows and number >= rows]
    outside += [
        number for number in listed if rows and number.isdecimal() and int(number[:12]) >= rows
    ]
    processor = survey.settings.get("tokenizer.json", {}).get("post_processor")
    outside += [str(number) for number in _put_around(processor) if rows and number >= rows]
    if outside:
        evidence = (
            f"{len(outside)} added tokens such as {outside[0]!r} have ids of {rows} and more, "
            f"and the embedding has {rows} rows"
        )
        findings.add("tokenizer-too-large", "tokenizer.json", evidence)
    for number, entry in listed.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if content in added and str(added[content]) != number:
            evidence = (
                f"tokenizer_config.json gives {content!r} the id {number}, and tokenizer.json "
                f"{added[content]}"
            )
            findings.add("tokenizer-broken", "tokenizer_config.json", evidence)
            break


def _put_around(processor: Any) -> Iterator[int]:
    """Ids of the tokens that a post_processor of tokenizer.json puts around texts."""
    if not isinstance(processor, dict):
        return
    for one in processor.get("processors") or ():
        yield from _put_around(one)
    entries = processor.get("special_tokens")
    for entry in entries.values() if isinstance(entries, dict) else ():
        ids = entry.get("ids") if isinstance(entry, dict) else None
        yield from (number for number in ids or () if type(number) is int)
    for key in ("sep", "cls"):  # BertProcessing: [token, id]
        if isinstance(pair := processor.get(key), list) and type(pair[-1]) is int:
            yield pair[-1]


def check_truncation(survey: Survey, findings: Findings) -> None:
    """Truncation and padding that were saved with the tokenizer apply wherever the caller does not
    disable them."""
    tokenizer = survey.settings.get("tokenizer.json", {})
    truncation, padding = tokenizer.get("truncation"), tokenizer.get("padding")
    evidence = []
    if isinstance(truncation, dict) and "max_length" in truncation:
        evidence.append(f"it truncates every text to {truncation['max_length']} tokens")
    if isinstance(padding, dict) and isinstance(strategy := padding.get("strategy"), dict):
        evidence.append(f"it pads every text to {strategy.get('Fixed')} tokens")
    if evidence:
        findings.add(
            "tokenizer-cuts",
            "tokenizer.json",
            " and ".join(evidence) + ", unless its reader disables that as transformers does",
        )


def compare_token_ids(
    ours: Tokenizer, theirs: Tokenizer, source: Survey, findings: Findings
) -> None:
    """Texts and the source's added tokens must get the same token ids, and these must decode to the
    same text."""
    added = list(added_tokens(source.settings.get("tokenizer.json", {})))
    for text in (*_SAMPLES, *added):
        ids, source_ids = (
            each.encode(text, add_special_tokens=False).ids for each in (ours, theirs)
        )
        if ids != source_ids:
            evidence = (
                f"{text!r:.40} is encoded as {ids[:4]}, and by the source's as {source_ids[:4]}"
            )
            findings.add("tokenizer-differs", "tokenizer.json", evidence)
            return
        decoded, source_decoded = (
            each.decode(source_ids, skip_special_tokens=True) for each in (ours, theirs)
        )
        if decoded != source_decoded:
            evidence = (
                f"{source_ids[:4]} is decoded as {decoded!r:.40}, and by the source's "
                f"as {source_decoded!r:.40}"
            )
            findings.add("tokenizer-differs", "tokenizer.json", evidence)
            return


def compare_added_specials(survey: Survey, source: Survey, findings: Findings) -> None:
    """Tokens that tokenizer_config.json adds to every text, if both define it."""
    ours, theirs = (each.settings.get("tokenizer_config.json", {}) for each in (survey, source))
    differ = [
        key
        for key in ("add_bos_token", "add_eos_token")
        if key in ours and key in theirs and bool(ours[key]) != bool(theirs[key])
    ]
    if ours.get("add_eos_token") and "add_eos_token" not in theirs:
        differ.append("add_eos_token")
    if differ:
        evidence = ", ".join(f"{key} {ours[key]} (source {theirs.get(key)})" for key in differ)
        findings.add("tokenizer-differs", "tokenizer_config.json", evidence)


def compare_max_length(survey: Survey, source: Survey, findings: Findings) -> None:
    """vLLM accepts no text longer than the tokenizer's model_max_length."""
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


_TEMPLATE = "chat template"
_QUESTION, _ANSWER, _FOLLOW_UP = (
    "How many apples are left",
    "Seven of them are",
    "What of the pears",
)
"""User and model messages that every template must render."""
_MARKER = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>|\[gMASK\]"
)
"""Special tokens between messages, as families spell them: <|im_start|>, DeepSeek's with fullwidth
bars, Gemma's and GLM's."""
_SHOWN = 3


def templates_of(survey: Survey) -> dict[str, str]:
    """Chat templates by file, in order of precedence; of several named templates the default
    one."""
    found = {} if survey.template is None else {TEMPLATE: survey.template}
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = survey.settings.get(name, {}).get("chat_template")
        if isinstance(template, list):
            template = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, dict)
            }.get("default")
        if isinstance(template, str):
            found[name] = template
    return found


def template_of(survey: Survey) -> str:
    """The effective chat template; empty without one."""
    return next(iter(templates_of(survey).values()), "")


def content_of(token: Any) -> str:
    """The text of a special token in tokenizer_config.json, which is a string or an object with
    `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def check_template(survey: Survey, tokens: Mapping[str, int], findings: Findings) -> None:
    """Check that the template is valid, and what it renders. tokens: all of the tokenizer, empty if
    unknown."""
    tokenizer_config, found = survey.settings.get("tokenizer_config.json", {}), templates_of(survey)
    if tokenizer_config.get("chat_template") and not found:
        findings.add(
            "template-broken",
            "tokenizer_config.json",
            "chat_template is neither a text nor a list with one named default",
        )
    texts = [found[name].strip() for name in (TEMPLATE, "tokenizer_config.json") if name in found]
    if len(set(texts)) > 1:
        findings.add(
            "templates-disagree",
            _TEMPLATE,
            f"{TEMPLATE} differs from the one in tokenizer_config.json, and engines take either",
        )
    template = template_of(survey)
    if not template:
        return
    special = {
        name: content_of(token)
        for name, token in tokenizer_config.items()
        if name.endswith("_token") and content_of(token)
    }
    try:
        fault, text = _render_chats(
            ChatTemplate(template, "this checkpoint"), {"tools": None, "documents": None, **special}
        )
    except QuantkitError as error:
        fault, text = error.problem, ""
    if fault:
        findings.add("template-broken", _TEMPLATE, fault)
    markers = list(dict.fromkeys(_MARKER.findall(text)))
    if tokens and markers and not any(marker in tokens for marker in markers):
        evidence = (
            f"it writes {', '.join(markers[:_SHOWN])}, and the tokenizer has none of these: "
            "it belongs to another model family"
        )
        findings.add("template-foreign", _TEMPLATE, evidence)


def _render_chats(template: ChatTemplate, variables: dict[str, Any]) -> tuple[str, str]:
    """The fault, empty if there is none, and the rendered question. Raises QuantkitError if
    rendering fails."""

    def rendered(*contents: str, prompt: bool) -> str:
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": content}
            for number, content in enumerate(contents)
        ]
        return template.render({**variables, "messages": messages, "add_generation_prompt": prompt})

    question = rendered(_QUESTION, prompt=True)
    if _QUESTION not in question:
        return f"the user message {_QUESTION!r} is rendered as {question[:80]!r}", question
    conversation = rendered(_QUESTION, _ANSWER, _FOLLOW_UP, prompt=True)
    missing = [
        content for content in (_QUESTION, _ANSWER, _FOLLOW_UP) if content not in conversation
    ]
    if missing:
        return f"a conversation of three messages is rendered without {missing[0]!r}", question
    prefix = _missing_prefix(
        question, rendered(_QUESTION, prompt=False), rendered(_QUESTION, _ANSWER, prompt=False)
    )
    return (
        f"answers begin with {prefix!r}, which the generation prompt does not contain"
        if prefix
        else "",
        question,
    )


def _missing_prefix(question: str, without: str, answered: str) -> str:
    """The text before answers in `answered` that is missing at the end of `question`, if `question`
    is the same without a generation prompt. Also empty if answers begin as questions do, because
    then no roles are named."""
    head, _, after = question.rpartition(_QUESTION)
    before = answered.rpartition(_ANSWER)[0].rpartition(_QUESTION)[2]
    prefix = before.removeprefix(after).strip()
    return (
        prefix
        if question == without and before.startswith(after) and not head.strip().endswith(prefix)
        else ""
    )
