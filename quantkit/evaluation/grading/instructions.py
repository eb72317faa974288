"""The 25 kinds of verifiable instructions of IFEval, each a function of the reply and the
instruction's parameters.

After "Instruction-Following Evaluation for Large Language Models" (Zhou et al., 2023): the verdicts
are those of the authors' checker, its patterns included where they are more lenient than the
instruction (a postscript may be anywhere). `make test-lm-eval` compares them. An empty reply
follows no instruction. `loose` accepts a reply that follows without its first line, its last line
or its asterisks.

Sentences and capital words of English are counted as NLTK does, without its models. A sentence ends
at a full stop, question mark or exclamation mark before a blank, unless the full stop belongs to an
abbreviation, an initial or a number. Words follow the Penn Treebank: a contraction is two. A text's
language is detected by script and, where languages share one, by common words.
"""

import json
import re
from collections import Counter
from collections.abc import Callable

import regex

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject

_SHORT = (
    "mr mrs ms dr prof st jr sr corp co cos ltd bros vs "
    "ct ft va gen sen sens rep reps col lt maj messrs inc fig "
    "jan feb aug sept sep oct nov dec tues wed fri calif mass minn "
    "fla tenn mich u.s u.k u.n u.s.a u.s.s.r d.c n.y l.a a.m p.m ph.d "
    "m.b.a"
)
_LAST = "inc co ltd corp jr sr a.m p.m u.s u.k ph.d"
_ABBREVIATIONS, _MAY_END = frozenset(_SHORT.split()), frozenset(_LAST.split())
_END = re.compile(r"(\S*?)([.?!]+)(?:[)\]}\"']*(?=\s+(\S+)|\s*$)|(?=[)\"';}\]*:@({\[]))")


def count_sentences(text: str) -> int:
    """Sentences of a text; what follows the last end counts as one."""
    text = text.strip()
    count, start = 0, 0
    for match in _END.finditer(text):
        if _ends(match[1], match[2], match[3]):
            count, start = count + 1, match.end()
    return count + (1 if re.search(r"\S", text[start:]) else 0)


def _ends(word: str, marks: str, following: str | None) -> bool:
    if following is None or "?" in marks or "!" in marks:
        return True
    if len(marks) > 1:
        return following[:1].isupper()
    bare = word.lower().lstrip("(\"'“*[")
    if re.fullmatch(r"[a-z]", bare):
        return False
    if bare in _ABBREVIATIONS:
        return following[:1].isupper() and bare in _MAY_END
    return not (re.fullmatch(r"-?[\d.,]+", bare) and following[:1].islower())


_CONTRACTION = re.compile(r"(?i)(n't|'(?:s|m|d|ll|re|ve))$")
_SPLIT = re.compile(r"\.\.\.|--|[\[\](){}<>\"“”„`;@#$%&?!*]|[,:](?!\d)")


def capital_words(text: str) -> int:
    """Words without a small letter and with a capital one."""
    count = 0
    for piece in _SPLIT.sub(" ", text).split():
        word = piece if re.fullmatch(r"(?:\w\.)+", piece) else piece.rstrip(".")
        tail = _CONTRACTION.search(word)
        parts = [word[: tail.start()], tail[0]] if tail else [word]
        count += sum(part.isupper() for part in parts)
    return count


_SCRIPTS = {
    "th": "\u0e00-\u0e7f",
    "ko": "\uac00-\ud7af\u1100-\u11ff",
    "ja": "\u3040-\u30ff",
    "zh": "\u4e00-\u9fff",
    "he": "\u0590-\u05ff",
    "el": "\u0370-\u03ff",
    "bn": "\u0980-\u09ff",
    "pa": "\u0a00-\u0a7f",
    "gu": "\u0a80-\u0aff",
    "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f",
    "kn": "\u0c80-\u0cff",
    "ml": "\u0d00-\u0d7f",
    "arabic": "\u0600-\u06ff",
    "devanagari": "\u0900-\u097f",
    "cyrillic": "\u0400-\u04ff",
    "latin": "a-zA-Z\u00c0-\u024f\u1e00-\u1eff",
}
_SHARED = {
    "arabic": {
        "ar": "في من على إلى أن هذا التي الذي مع كان",
        "fa": "است این که را با برای آن می های از",
        "ur": "ہے میں کی کے کا اور سے ہیں یہ کو",
    },
    "devanagari": {
        "hi": "है और के में की का से हैं यह को एक पर भी",
        "mr": "आहे आणि च्या मध्ये ते हे या आहेत एक नाही होते",
        "ne": "छ र को मा हो लागि यो छन् हरू गर्न पनि एक",
    },
    "cyrillic": {
        "ru": "и в не на что это с как по для из мы",
        "bg": "и на се да за от са е като това не с",
        "uk": "і в не на що це з як та для є у",
        "mk": "и на се да за од во е како тоа не со",
    },
    "latin": {
        "en": "the of and to in is that it for you with as on are this be your was not have from "
        "my we can will has",
        "de": "der die und das ist nicht ein eine zu den mit für auf sich im dem es auch wir",
        "fr": "le la les de des et est un une que pour dans pas vous nous sur avec qui au",
        "es": "el la los de que y en un una es por con para se las no su como más",
        "it": "il la di che e un una per non è con sono del della gli si le nel",
        "pt": "o a os de que e em um uma é para com não se as do da por mais",
        "nl": "de het een en van is dat op te in niet met voor zijn aan ook",
        "fi": "ja on ei se että oli hän ovat myös kun mutta joka olla voi tämä",
        "sv": "och att det som en är på för av med den till inte har ett",
        "pl": "i w nie na się że jest do z to jak dla są być oraz",
        "vi": "và của là một có không được trong cho những các người này với tôi",
        "sw": "na ya wa kwa ni katika za la kuwa hii cha watu yake kama pia",
        "id": "dan yang di dengan untuk ini itu dari pada adalah tidak dalam akan",
        "tr": "ve bir bu için ile da de olarak çok en ne gibi daha",
        "hr": "i je u da se na su za od kao što nije",
        "ro": "și de în a la cu este pe un o care nu să",
        "cs": "a je v se na to že s z do jako pro není",
        "da": "og er at det en til på som for med af ikke der",
        "tl": "ang ng sa na mga at ay ko ito si hindi para",
    },
}


def language_of(text: str) -> str | None:
    """ISO 639-1 code of the language that most of the text is in; None where there is no letter."""
    counts = {
        name: len(re.findall(f"[{characters}]", text)) for name, characters in _SCRIPTS.items()
    }
    script = max(counts, key=lambda name: counts[name])
    if not counts[script]:
        return None
    if script == "zh" and counts["ja"] * 10 > counts["zh"]:
        return "ja"
    if script not in _SHARED:
        return {"zh": "zh-cn"}.get(script, script)
    words = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]+)?", text.lower()))
    if script == "devanagari":
        words = Counter(re.findall(r"[\u0900-\u097f]+", text))
    scores = {
        name: sum(words[word] for word in common.split())
        for name, common in _SHARED[script].items()
    }
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] else next(iter(_SHARED[script]))


Check = Callable[[str, JsonObject], bool]


def _satisfies(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


def _paragraphs(reply: str, given: JsonObject) -> bool:
    """Paragraphs are separated by ***; an empty one counts only against the reply, at its ends not
    at all."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", reply)]
    return all(parts[1:-1]) and sum(bool(part) for part in parts) == given["num_paragraphs"]


def _first_word(reply: str, given: JsonObject) -> bool:
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


def _postscript(reply: str, given: JsonObject) -> bool:
    marker = given["postscript_marker"].strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, marker.lower()), reply.lower()) is not None


def _bullets(reply: str, given: JsonObject) -> bool:
    starred = re.findall(r"^\s*\*[^*].*$", reply, re.MULTILINE)
    dashed = re.findall(r"^\s*-.*$", reply, re.MULTILINE)
    return len(starred) + len(dashed) == given["num_bullets"]


def _highlights(reply: str, given: JsonObject) -> bool:
    single = [piece for piece in re.findall(r"\*[^\n*]*\*", reply) if piece.strip("*").strip()]
    double = [piece for piece in re.findall(r"\*\*[^\n*]*\*\*", reply) if piece[2:-2].strip()]
    return len(single) + len(double) >= given["num_highlights"]


def _json(reply: str, given: JsonObject) -> bool:
    text = reply.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(reply: str, given: JsonObject) -> bool:
    parts = [part.strip() for part in reply.split("******")]
    said = [part for part in parts if part]
    return all(parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def _quoted(reply: str, given: JsonObject) -> bool:
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


def check_row(fields: JsonObject) -> str:
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
    reply: str, ids: list[str], given: list[JsonObject], loose: bool
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
