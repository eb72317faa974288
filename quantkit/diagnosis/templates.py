"""The chat template, by trying it: a question, a conversation, and what it writes before an
answer."""

import re
from collections.abc import Mapping
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.survey import TEMPLATE, Survey
from quantkit.tokenizer.template import ChatTemplate

_PLACE = "chat template"
_ASKED, _ANSWERED, _ASKED_AGAIN = (
    "How many apples are left",
    "Seven of them are",
    "What of the pears",
)
"""Words of a user and of a model, which every template writes."""
_MARKER = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>")
"""How families write what stands between messages: <|im_start|>, and DeepSeek's with wide bars."""
_SHOWN = 3


def templates_of(survey: Survey) -> dict[str, str]:
    """Chat templates by the file that holds them, the one that counts first; of several with names
    the default one."""
    found = {} if survey.template is None else {TEMPLATE: survey.template}
    for name in ("tokenizer_config.json", "chat_template.json"):
        said = survey.settings.get(name, {}).get("chat_template")
        if isinstance(said, list):
            said = {
                entry.get("name"): entry.get("template")
                for entry in said
                if isinstance(entry, dict)
            }.get("default")
        if isinstance(said, str):
            found[name] = said
    return found


def template_of(survey: Survey) -> str:
    """The chat template that counts; empty without."""
    return next(iter(templates_of(survey).values()), "")


def content_of(token: Any) -> str:
    """A special token of tokenizer_config.json: a text, or an object that holds one."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def check_template(survey: Survey, tokens: Mapping[str, int], findings: DiagnosisFindings) -> None:
    """Whether it is one, and what it makes of conversations. tokens: all that the tokenizer has,
    empty if that is not known."""
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
            _PLACE,
            f"{TEMPLATE} has another one than tokenizer_config.json, and engines take either",
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
        told, text = _try(
            ChatTemplate(template, "this checkpoint"), {"tools": None, "documents": None, **special}
        )
    except QuantkitError as fault:
        told, text = fault.problem, ""
    if told:
        findings.add("template-broken", _PLACE, told)
    markers = list(dict.fromkeys(_MARKER.findall(text)))
    if tokens and markers and not any(marker in tokens for marker in markers):
        told = (
            f"it writes {', '.join(markers[:_SHOWN])}, and the tokenizer has none of these: it "
            "is of another family"
        )
        findings.add("template-foreign", _PLACE, told)


def _try(template: ChatTemplate, given: dict[str, Any]) -> tuple[str, str]:
    """What is wrong, empty if nothing is, and what it makes of a question. Raises QuantkitError
    where it fails."""

    def made(*said: str, answer: bool) -> str:
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": content}
            for number, content in enumerate(said)
        ]
        return template.render({**given, "messages": messages, "add_generation_prompt": answer})

    question = made(_ASKED, answer=True)
    if _ASKED not in question:
        return f"of {_ASKED!r}, which a user says, it makes {question[:80]!r}", question
    conversation = made(_ASKED, _ANSWERED, _ASKED_AGAIN, answer=True)
    lost = [said for said in (_ASKED, _ANSWERED, _ASKED_AGAIN) if said not in conversation]
    if lost:
        return f"of a conversation of three messages it leaves out {lost[0]!r}", question
    begun = _not_begun(question, made(_ASKED, answer=False), made(_ASKED, _ANSWERED, answer=False))
    return (
        f"answers begin with {begun!r}, and it does not write that where it asks for one"
        if begun
        else "",
        question,
    )


def _not_begun(question: str, without: str, answered: str) -> str:
    """What stands before answers in `answered`, and not at the end of `question`, which is the same
    where no answer is asked for. Empty, too, where answers begin as questions do: then nobody is
    named."""
    head, _, behind = question.rpartition(_ASKED)
    before = answered.rpartition(_ANSWERED)[0].rpartition(_ASKED)[2]
    begun = before.removeprefix(behind).strip()
    return (
        begun
        if question == without and before.startswith(behind) and not head.strip().endswith(begun)
        else ""
    )
