"""Read the answer from prose: from a sentence that states it, or from the last sentence of a
text without a statement."""

import functools
import re
from fractions import Fraction

from quantkit.evaluation.grading import answer_phrases
from quantkit.evaluation.grading.claims import find_better_number
from quantkit.evaluation.grading.closing_phrases import is_refusal, strip_verification
from quantkit.evaluation.grading.quantities import begin_quantity, read_quantity
from quantkit.evaluation.grading.roles import has_cases, strip_circumstances
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain
from quantkit.evaluation.grading.values import (
    CHANGES,
    LONGEST,
    NUMBER_BEGINS,
    UNSOLVED,
    Value,
    read_value,
)

_NUMBER_WORD = (
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six"
    r"|seven|eigh|nine)ty|half|a\s+(?:half|quarter|third|dozen|hundred|thousand|million)|dozen)"
)
_DETERMINER = r"(?:the|a|this|that|these|those|its|his|her|their)"
# Where a sentence goes on after its number, and the number is over.
_GOES_ON = re.compile(
    "|".join(
        (
            r",(?=\s+[$]?\d[\d.,]*\s+(?:more|fewer|less)(?![A-Za-z]))",
            r",(?=\s+[$]?\d[\d.,]*\s+(?:[a-z]+\s+)?(?:(?:in|for|from)\s+)?(?:each|every|per)(?![A-Za-z]))",
            rf",(?!\s*\d|\s+{_NUMBER_WORD}\s+hundred)|,(?=\s+\d+\sof\s)",
            r"[;。；、\n—]|\.(?=\s|$)|[!?](?=\s|$)|:(?=\s)|\s-+\s(?=[A-Za-z]{2})|</",
            r"(?<=[a-z])(?<!cent)\sof(?=\s[^,;.]*\d)|(?<=[a-z])\s(?:out\s+of|less\s+than|greater\s+than|not\s+exceeding)(?![A-Za-z])",
            rf"(?<!%)(?<!cent)\s(?:out\s+)?of(?=\s+{_DETERMINER}(?![A-Za-z]))|\sover(?=\s+(?:{_DETERMINER}|\d+\s+[a-z])(?![A-Za-z]))",
            r"\s(?:because|since|(?<!times\s)(?:as|that)|which|so|where|when|given|due|for|after|before|by|if|but|while|from|with|on|at)(?![A-Za-z])",
            r"\s(?:is|was|are|were|every|each)(?![A-Za-z])|\sin(?!\s+\d+\W*$)(?![A-Za-z])|\sto(?!\s+(?:[$]?\d|the\s+power))(?![A-Za-z])",
            rf"\sand(?![A-Za-z])(?!\s+(?:maybe\s+)?[$]?(?:\d|{_NUMBER_WORD}(?![A-Za-z])))",
        )
    ),
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"(?:\s|(?<=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]))"
    r"\((?!\s*(?:or\s|\\?[pb]?mod|dozen|hundred|thousand|million|billion))[^()]*\)"
)
_FACTORIAL = re.compile(r"(\d)!(?=\s*(?:\$|\\\)|[.,;])|\s+[a-z])")
_NOT_BUT = re.compile(
    rf"(?i)^\s*(?:not|nicht|pas|no|não|non|не|nie)\s.{{1,60}}?\s{answer_phrases.CORRECTION}(?:\srather)?\s"
)
# What is said instead of the number before it; without a word between them, both are offered.
_INSTEAD = re.compile(
    r"(?i)[;,.?!—\s-]*(?:(?:no|wait|hmm|oh|sorry|actually|rather|or rather|i "
    r"mean|but)[\s,.:;!—]+)+(?:(?:it|that|this|the answer)"
    r"(?:'s| is| should be| must be)\s+)?(?:actually\s+)?(?=[$]?-?\d)"
)
_OFFERED = re.compile(
    r"(?i);\s*or\b[^.]*\d|[^.]*\d[^.\d]*\botherwise\b|[;,]\s*otherwise\b|[^.]*\b(?:might|could|may)\s+(?:\w+\s+){0,3}?be\s+\d"
    r"|[;?]\s*[$]?-?\d[\d.,]*(?!\d|\s+(?:would|is|was|has|does|misses|counts|ignores|can)\b)"
    r"|,\s*(?:or\s+)?(?:perhaps|maybe|possibly|alternatively)\s+[$]?-?\d|[,;]\s*也(?:可能|许)"
)
_ROUNDED = re.compile(
    r"(?i)\d,?\s+(?:(?:which|that|and)\s+)?(?:is\s+|can "
    r"be\s+)?(?:rounds?|rounded|rounding)\s+(?:up\s+|down\s+|off\s+)?to\s+(?:about\s+)?"
    r"(?=[$]?\d)(?!\d+\s+(?:decimal|significant|places|digits))"
)
# The circumstances, before what is claimed: `In 3 years, ...`, `Since it is 9, ...`; and after it
# the reason, what it is not, what fails.
_IN_FRONT = re.compile(
    r"(?i)^\s*(?:in|after|before|for|over|at|with|on|during|within|of|out "
    r"of|given|since|because|as|given that|if|when|to\s+[a-z]+)\s"
    r"[^,.;]*\d[^,;]*,\s+(?=.*\d)"
    r"|^[^,。]*\d[^,。]*(?:后|以后|之后|时|前|的话|中),"
    r"|^\s*(?:in|after|by)\s+(?:week\s+|day\s+|year\s+)?\d+\s+(?:(?:second|minute|hour|day|week|month|year)s?\s+)?"
    r"(?=(?:she|he|they|it|we|you|I|[A-Z][a-z]+)\s.*\d)"
)
_BEHIND = re.compile(
    r"(?i)(?<=[\w)%]),?\s+(?:since|because|where|while|whereas|rather\s+than|instead\s+of|compared\s+(?:to|with)|unlike|not(?=\s+[$]?\d)|as(?=\s[^,;]*=))\s.*$"
    r"|,?\s+and\s+(?:it\s+)?(?:occurs|is\s+(?:attained|achieved|reached|obtained))\b.*$|,\s*当(?:且仅当)?[^,。]*时.*$"
    r"|,\s+(?:which\s+is\s+|that\s+is\s+)?[$]?\d[\d.,]*(?:\s+[a-z]+){0,2}\s+(?:more|fewer|less|[a-z]{3,}er)\s+than\b.*$|,\s+who(?:se)?\s[^,]*$"
    r"|,\s+which\s+is\s+(?:about|approximately|roughly|around|nearly|almost)\s.*$|才能?[^,]*$"
    r"|,\s+and\s+in\s+\d+\s+[a-z]+\s+(?:it\s+is\s+)?\d+\W*$"
    r"|(?<=\d)\s*—\s.*$|;\s*(?:for|since|because|indeed|note|here|with|when|if)\s[^,]*$"
    r"|:\s+(?=[^=:]*\d[^=:]*(?:,|\sand\s|\+)[^=:]*\d)[^=:]*$"
)
_MIDDLE = re.compile(
    r"(?i),?\s+(?:and|but|so)\s+(?:since|because|as)\s[^,]*,\s+(?=.*\d)"
)  # = 7.5, and since there is no half bus, 8
_ROUND = re.compile(
    r"(?i)\b(?:we\s+)?round\s+(?:it\s+|this\s+)?(?:up|down|off)?\s*to\s+(?=[$]?\d+\W*(?:[a-z]+\W*)?$)"
)
_PARTICLE = re.compile(
    r"(?i)^(?P<said>.*\b(?:heeft|heb|hebben|houdt|houden|blijven|blijft)\b.*\d.*?)\s+over(?=\W*$)"
)
_MORE_THAN = re.compile(
    r"(?i)(?P<said>\d[\d.,]*(?:\s+[^\W\d_]+){0,2}?)\s+(?:de\s+plus|de\s+moins|más|menos|mehr|weniger|in\s+più|in\s+meno|a\s+mais|a\s+menos|meer|minder)"
    r"\s+(?:que|als|di|do\s+que|rispetto|dan)\s+\D*$"
)
# What it is now, then what it will be.
_LATER = re.compile(
    r"(?i)^(?=[^,]*\b(?:now|currently|presently|today)\b)(?P<said>[^,]*\d[^,]*),?\s+and\s+in\s+\d+\s+[a-z]+\s.*$"
)
# What it is, then when or by what it is so: `is 540 when the side is 18`, `p + q = 540 with p =
# 539`.
_AND_WHEN = re.compile(
    r"(?i)(?<=[\w)])(?P<said>\s*(?:=|\s(?:is|are|was|were|equals?)\s)\s*(?:exactly\s|just\s|only\s|thus\s|therefore\s)*[$]?-?\d[\d,.]*(?:\s+[a-z]+)?)"
    r"(?<![.,]),?\s+(?:when|with|if|for|at|attained|achieved|reached|obtained|occurring)\s(?!.*\b(?:so|which|thus|hence|therefore|total|altogether)\b).*$"
)
_TO_DO = re.compile(
    r"(?i)^(?P<said>\D*\d[\d,.]*(?:\s+[a-z]+){0,6}?)\s+to\s+(?!(?:get|obtain|give)\s+[$]?\d|(?:an?|the|his|her|their|each)\b|[$]?\d|the\s+power)"
    r"[a-z]+\s+(?!.*\sand\s)[^,;=]*$"
)
_NOT_THIS = re.compile(r"不是[^,。]*,\s*而?是")
# Numbers that are known already, where there is another: `the 6 people`, `her 5 friends`.
_KNOWN = re.compile(
    r"(?i)(?<![a-z])(?P<whose>the(?:\s+(?:remaining|other|first|last|next))?|these|those|his|(?:of|in|for|to|with|from|at|on|over)\s+her|their|its|my"
    r"|our|your|all)\s+\d[\d,]*\s+(?=[a-z]{3})(?!(?:of|is|are|was|minus|plus|times)\b)"
)
_ASKED_AND_DENIED = re.compile(r"(?i)(?<![\w.])[$]?\d[\d.,]*\?\s*no\b[\s,.:—-]*(?=.*\d)")
_NEEDED = re.compile(
    r"(?i)(\b(?:needs?|must|has to|have to|had to|should|requires?|required)\b[^.;,\d]{0,40}\s)at "
    r"least\s(?=[$]?\d)"
    r"|(\b(?:can|could|may)\b[^.;,\d]{0,40}\s)(?:at most|up to)\s(?=[$]?\d)"
    r"|()\bat "
    r"least\s(?=[$]?\d[\d.,]*\s+(?:[a-z]+\s+){1,3}(?:is|are)\s+(?:needed|required|necessary)\b)"
)
_SHARE = re.compile(
    r"(?i)^[^,]*\d\s?%[^,\d]*,\s+(?:or|i\.e\.|that is,?|which (?:is|makes|equals))\s+(?=[$]?\d)"
)
_TAKEN_BACK = re.compile(
    r"(?i)^[\s*.)}\]$\\]*(?:is|are|was|were|can|could|would|seems)?\s*(?:not|n't|never|wrong|incorrect|too\s|false|impossible)"
)
# The same once more: "7 hours 30 minutes, i.e. 7.5 hours".
_AGAIN = re.compile(
    r"(?i),?\s(?:i\.e\.|that is|namely|or equivalently)[,:]?\s+(?P<again>[$]?\d.*)$"
)


_COMPOUND = re.compile(r"(?<![\w.,])\d[\d,]*-[a-z]{3,}(?=\s+[a-z])")  # the 300-page book
_OTHER_UNIT = re.compile(
    r"(?P<exact>\d\s*(?P<unit>[A-Za-z]{1,12}))(?:\s*≈\s*[\d.,]+\s*(?!(?P=unit)\b)[A-Za-z]+(?=\W*$)|\s*\(\s*(?:or\s+)?(?:≈|about|approx\w*\.?|roughly)[^()]*\))"
)  # 1250 L ≈ 330 gallons, 45 mph (≈ 72 km/h)
_WHERE = re.compile(
    r"(?<=\d)\s*,\s*where\s+[A-Za-z]\w?\s*=\s*-?\d[\d.,]*(?=\W*$)"
)  # Q + R = 699, where N = 5694
_CITED = re.compile(r"(?<=[\w.,;!?)*])\[\d+\](?!\()|【[^【】]*】")


def has_number(text: str) -> bool:
    return (
        re.search(
            rf"(?i)\d|(?<![A-Za-z]){_NUMBER_WORD}(?![A-Za-z])|[零一二两三四五六七八九十百千万½¼¾]",
            text,
        )
        is not None
    )


def _claim(sentence: str) -> str:
    """Without remarks in brackets, the circumstances in front, the reasons after."""
    sentence = re.sub(r"\s+(?=[,;])", "", re.sub(r"\s+", " ", sentence))
    sentence = _MIDDLE.sub(" so ", _ROUND.sub("is ", sentence))
    sentence = _PARTICLE.sub(r"\g<said>", _MORE_THAN.sub(r"\g<said>", sentence))
    for pattern in (_REMARK, _BEHIND, _IN_FRONT):
        without = pattern.sub("", sentence)
        sentence = without if has_number(without) else sentence
    sentence = _PART_OF.sub(r"\g<part>", _LATER.sub(r"\g<said>", sentence))
    sentence = strip_circumstances(_TO_DO.sub(r"\g<said>", _AND_WHEN.sub(r"\g<said>", sentence)))
    without = _KNOWN.sub(r"\g<whose> ", sentence)
    return without if re.search(r"\d", without) else sentence


def _conclusion(sentence: str) -> str:
    """What follows its last `so`, `which leaves`, `a total of`."""
    last = _CONCLUDES.split(_SHARE.sub("", sentence))[-1]
    return last if re.search(r"\d", last) else sentence


def read_sentence(text: str, letters: bool = True) -> Value | None:
    """What the sentence `text`, which states the answer, says: its number, if the number is over
    where the sentence goes on."""
    shown = _FACTORIAL.sub(r"\1 factorial", text[: 2 * LONGEST])
    shown = re.sub(r"(?:\b[A-Z]{1,3})?\$", " ", plain(shown)) + " "
    shown = _NOT_THIS.sub("", _NOT_BUT.sub("", shown)).replace(TEXT, " ").replace(END_TEXT, " ")
    shown = _claim(shown)
    shown = shown if NUMBER_BEGINS.match(shown.strip()) else _conclusion(shown)
    if (rounded := _ROUNDED.search(shown)) is not None:
        return read_sentence(shown[rounded.end() :], letters)
    begins = NUMBER_BEGINS.search(shown)
    start = begins.end() if begins else 0
    goes_on = _GOES_ON.search(shown, start)
    if goes_on is not None:
        if _TAKEN_BACK.match(shown[goes_on.start() :]) or _OFFERED.match(shown, goes_on.start()):
            return None
        if (instead := _INSTEAD.match(shown, goes_on.start())) is not None:
            return read_sentence(shown[instead.end() :], letters)
    core = (shown[: goes_on.start()] if goes_on else shown).strip(" ,.:!\"'*、")
    core = core.rstrip("} \"'") if core.count("}") > core.count("{") else core
    value = read_value(core, letters) if core else None
    again = _AGAIN.search(shown.rstrip()) if value is None else None
    return read_value(again["again"], letters) if again is not None else value


_TOKEN = re.compile(
    r"(?<![A-Za-z\d_.])(?:[-+]\s?)?[$€£¥₹]?\s?(?:\d{1,3}(?: \d{3})+(?![\d-])|(?:\d|\.\d)[\d,.'_]*)"
)
_NO_ANSWER_BEFORE = re.compile(
    r"(?:[-+*/^×÷·√:<>≤≥≠±(]|\\[A-Za-z]+\{?|(?<![A-Za-z])(?:or|to|of the|of her|of his|of "
    r"their)|\d\s*(?:,|and|&|和|到|至|或))\s*$"
    r"|[不非]是\s*$"
)
# Of how many: 7 of 12 children are 7; without what is counted, 7 of 12 may be 7/12, and is never
# 12.
_PART_OF = re.compile(
    rf"(?i)(?P<part>(?<![\w.,/%$])(?:\d[\d,]*|{_NUMBER_WORD}))\s+(?:out\s+)?of\s+\d[\d,]*(?=\s+[a-z]{{3}})(?!\s+(?:is|are|was|equals)\b)"
)
_IS_PART_OF = re.compile(rf"(?i)(?<![\w.,/%$])(?:\d[\d,]*|{_NUMBER_WORD})\s+(?:out\s+)?of\s*$")
_END = r"(?<=[.!?。])(?<!i\.e\.)(?<!e\.g\.)(?<!vs\.)(?<!approx\.)\s+|[\n。]"
# Numbers that only name something, irrelevant sentences, and what is only assumed.
_NAMED = re.compile(
    r"(?i)\b(?:step|attempt|equation|eqn?\.|theorem|lemma|corollary|proposition|problem|question|case|page|chapter|section|figure|fig\.|table"
    r"|(?<!real )(?<!imaginary )part|line|example|exercise|version|method|approach|hint|row)"
    r"\s*[(#]?\d+(?:\.\d+)*(?![\d/]|[.,]\d|\s*[-+*/^=×])\)?[:.]?"
)
_O_CLOCK = re.compile(
    r"(?i)(?<![\d:])(\d{1,2}(?=\s?[ap]\.?m\b)|\d{1,2}(?=:00(?!\d)))(?::00)?(?:\s?[ap]\.?m\.?(?![a-z]))?"
)
ASIDE = re.compile(
    r"(?i)^\s*\(?(?:note|notice|observe|remember)\s+that\b|^\s*\[\d+\]\s|^\s*\(?for\s+(?:comparison|reference)\b|^\s*\([^()]*\)\s*$"
    r"|^\s*(?:to\s+)?(?:double[- ]?)?(?:verify|check|verification|verifying|checking)\s*(?=:)"
    r"|^\s*(?:please|let\s+me\s+know|feel\s+free|i\s+hope|hope|(?:would|do|if)\s+you)\b"
)
_ASSUMED = re.compile(
    r"(?i)^\s*(?:for|when|if)\s+\w+\s*=\s*-?\d[\d.,]*\s[^\d=]*$|^\s*(?:(?:now|next|then),?\s+)?(?:we\s+)?(?:suppose|assume|set|try|consider|let(?!\s+(?:me|us)\b|'s))\b[^,]*$|\b(?:where|let|if|suppose|assume|assuming)\s+\w+\s*(?:=|is|be|equals)\s*[$]?-?\d[\d.,]*\s*\.?\s*$"
)
_CUT = re.compile(
    r"(?i)(?:[=+,:(×]|=\s*[$€£]|\b(?:the|an?|of|to|and|or|but|we|i|is|are|that|which|so|then|let|if|with|for|by|from|at|as|because|since|when|need|he|she|they))\s*$"
)
_ASKED = re.compile(r"(?i)^\s*(?:is|are|was|could|can|would|does|do|should)\s.*\?\s*$")
_CONCLUDES = re.compile(
    r"(?i)[\s,](?:so|thus|hence|therefore|gives|yields|now|leaving)[\s,]|,\s*i\.e\.,?\s|,\s*giving\s|,\s+(?:which\s+)?mean(?:s|ing)\s(?:that\s)?"
    r"|,\s*(?:for\s+|making\s+|giving\s+)?a\s+(?:grand\s+)?total\s+of\s|,?\s+(?:totall?ing|amounting\s+to|adding\s+up\s+to|bringing\s+the\s+\w+\s+to)\s"
    r"|(?:\bper\s+[a-z]+|(?<=\d)\s+an?\s+[a-z]+|\beach\s+[a-z]+),?\s+and\s+(?=[$]?\d[\d.,]*(?:\s+[a-z]+)?\s+(?:per|an?|each)\s)|\sin\s+(?=\d[\d,]*\s+(?:[a-z]+\s+)?ways\b)"
    r"|\san?\s+(?:total|sum|remainder|difference|product|profit|quotient|average|balance)\s+of\s(?=[$]?\d)"
    r"|,\s+which\s+(?:is|makes|leaves|equals|comes\s+to)\s+(?=[$]?\d[\d,.]*(?:\s+[a-z]+)?\W*$)"
    r"|\sand\s+(?:then\s+)?(?:(?:he|she|they|it)\s+)?(?:has|have|had|made|makes|got|gets|spent|[a-z]{2,}ed)\s(?=(?:an?\s+)?[$]?\d)"
    r"|[,;。]\s*即(?=\s*\d)|[,;]\s*(?:所以|因此|因而|于是|故)|:\s(?=[$]?\d[^:]*$)"
)
_DENIED = re.compile(rf"(?i){answer_phrases.DENIAL}(?!.*\s{answer_phrases.CORRECTION}\s)")


# The subject, its verb, and all that it is: "The sum of the 3 shares is $48."
_STATES = "|".join(
    (
        "is|are|was|were|be|equals?|makes?|totals|amounts\\s+to|comes?\\s+to",
        "weighs?|lasts?|measures?|holds?|contains?|(?:takes?|costs?|earns?|pays?)(?:\\s+(?:her|him|them|us|me|you|it))?",
        "to\\s+(?:get|obtain|give|reach|make)(?=\\s+[$]?\\d)",
        "(?:we|I|you|which|that|this)\\s+(?:get|obtain|have|find|makes?|gives?|yields?|arrive\\s+at)",
        "(?:rose|rises?|fell|falls?|dropped|drops|went|goes|grew|grows|changed|changes|increased?s?|decreased?s?|shrank|climbed|reduced|raised"
        "|lowered)(?:\\s+(?:up|down))?\\s+(?:from|by)\\s+[$]?\\d[\\d.,]*%?(?:\\s+[a-z]+)?\\s+to",
    )
)
_PREDICATE = re.compile(
    rf"(?i)^(?P<subject>.*)(?:(?<![A-Za-z])(?:{_STATES})(?![A-Za-z])|[=≡](?!\s*$)|(?<=[A-Za-z)]):(?=\s))"
    r"\s*(?:therefore|thus|then|hence|now|exactly|just|simply|only|equal\s+to|precisely)?:?\s*(?P<said>[^=≡]+?)\s*$"
)
_TWO_NAMED = re.compile(
    r"(?<![+*/-])(?<![+*/-]\s)\b[A-Za-z]\w?\s*=\s*-?\d[\d.]*\s*(?:,\s*and|,|and|\s)\s*[A-Za-z]\w?\s*=\s*-?\d[\d.]*\W*$"
)
_BESIDE = re.compile(r"(?i)(?:[^\W\d_]+\s+)*(?:in|on|at|for|from|by|with|of|to|among|between)\s")
_COMPUTED = re.compile(
    r"(?i)[\d\s.()]+(?:[-+*/×·]\s*[\d\s.()]+)+,\s+(?:or|i\.e\.|which is|that is),?\s+(?P<result>.*)"
)
_DOUBTED = re.compile(
    r"(?i)(?:\bin\s+base\s+(?!ten|10)|\b(?:if|(?:is|are|was|were|be|do|does|did|has|have|could|would|will|may|might)\s+not|never|cannot|doubt|hardly|unlikely|whether|assum\w+|suppos\w+)\b|n't\b)[^,;]*$"
)
_TOTAL = re.compile(
    r"(?i)[,;]\s*(?:or\s+|and\s+)?(?P<total>[^,;]*?(?:\d,\d|[^,;])*?)\s+(?:altogether|in\s+total|in\s+all|overall|all\s+together)\W*$"
)
_EACH_ITS_OWN = re.compile(
    r"(?P<verb>[a-z]{3,})\s+[$]?\d[\d.,]*[^.]*\s(?:and|while|but)\s+(?:[A-Z]|the\s|his\s|her\s)[^.]*?\b(?P=verb)\s+[$]?\d[\d.,]*\W*$"
)
_GIVES_UP = re.compile(
    r"(?i)\b(?:unable|failed?|not\s+able|cannot|can't|could\s*n[o']t|couldn't|did\s*n[o']t|didn't)\s+(?:to\s+)?(?:fully\s+)?"
    r"(?:determine|find|solve|complete|compute|finish|decide|derive|obtain|answer|continue|proceed)\b|\bstuck\b|\bgive\s+up\b"
)


def _predicate(sentence: str, letters: bool) -> Value | None:
    """What the sentence says of its subject, where that is all that follows its last verb or
    equals sign."""
    match = _PREDICATE.match(_FACTORIAL.sub(r"\1 factorial", sentence).rstrip(" .!*"))
    if (
        match is None
        or not has_number(match["said"])
        or _DOUBTED.search(match["subject"])
        or _BESIDE.match(match["said"])
    ):
        return None
    if match["subject"].rstrip().endswith("which") and re.search(r"(?i)\bthan\b", match["said"]):
        return None
    computed = _COMPUTED.match(match["said"])
    return read_value(computed["result"] if computed else match["said"], letters)


def read_last(
    text: str, letters: bool = True, question: str = ""
) -> tuple[str | None, Value | None]:
    """The last number of a text that states no answer, as written and as a value: None where it is
    part of something else.

    Of a text that says it has no answer, neither. Of several numbers that which the question asks
    for.
    """
    if is_refusal(text):
        return None, None
    text = _NOT_THIS.sub("", strip_verification(re.sub(r"(?<=\d)!+(?=\s*$)", "", text)))
    text = _ASKED_AND_DENIED.sub("", text)
    text = _CITED.sub("", _NEEDED.sub(r"\1\2\3", text))
    text = without if has_number(without := _COMPOUND.sub(" ", text)) else text
    if _CUT.search(text):
        return text.strip()[-100:], None
    shown, paid = (
        _visible_text(plain(text).replace("$", " ")),
        _visible_text(_with_money(plain(_TIMES.sub("×", text)))),
    )
    is_one = (
        not re.search(_END, shown.strip())
        and not _DENIED.search(strip_circumstances(shown))
        and not _ASSUMED.search(shown)
        and not has_cases(shown)
    )
    whole = (
        read_value(
            _AND_WHEN.sub(r"\g<said>", strip_circumstances(_PART_OF.sub(r"\g<part>", shown))),
            letters,
        )
        if is_one
        else None
    )
    asks = functools.partial(_best_answer, _sentences(paid), question)
    if whole is not None:
        return shown, asks(whole)
    sentences = _sentences(shown)
    if not sentences:
        words = [part for part in re.split(_END, shown) if has_number(part)]
        if not words:
            return None, None
        return words[-1].strip(), _best_answer(
            words, question, _predicate(words[-1], letters) or read_number_words(words[-1], letters)
        )
    if (
        _ASSUMED.search(sentences[-1])
        or _DENIED.search(strip_circumstances(sentences[-1]))
        or _ASKED.match(sentences[-1])
        or has_cases(sentences[-1])
    ):
        return sentences[-1].strip(), None
    claim = _claim(sentences[-1])
    conclusion = _conclusion(claim)
    if not re.search(r"\d", claim):
        return sentences[-1].strip(), read_number_words(claim, letters)
    if any(_GIVES_UP.search(part) for part in sentences[-2:]):
        return sentences[-1].strip(), None
    if UNSOLVED.match(sentences[-1]):
        return sentences[-1].strip(), None
    if _TWO_NAMED.search(claim) or _EACH_ITS_OWN.search(conclusion):
        return sentences[-1].strip(), asks(None)
    total = _TOTAL.search(claim)
    said = _predicate(conclusion, letters) or (
        read_sentence(total["total"], letters) if total and has_number(total["total"]) else None
    )
    if said is not None:
        return sentences[-1].strip(), asks(said)
    stated = read_sentence(conclusion, letters)
    if stated is not None:
        return sentences[-1].strip(), asks(stated)
    clause = re.split(r"[=≈]", claim)[-1]
    tokens = list(_TOKEN.finditer(clause))
    if not tokens:
        return None, None
    last = tokens[-1]
    before, token = clause[: last.start()], clause[last.start() :]
    changed = (
        _NO_ANSWER_BEFORE.search(before)
        or _IS_PART_OF.search(before)
        or CHANGES.search(re.split(r"[,;.]\s", before)[-1][-30:])
    )
    return last[0].strip(" ,."), asks(None if changed else read_sentence(token, letters))


_TIMES = re.compile(r"(?<=\d)\s*\*\s*(?=[$(]?[\d.])")
_CLOSES = re.compile(
    r"\S[$](?=[\s.,;:!?)]|$)"
)  # dollar signs are mathematics' where one closes a piece, else of what is paid


def _with_money(text: str) -> str:
    """Dollar signs stay where they are of what is paid."""
    return text.replace("$", " ") if _CLOSES.search(text) else text


def _visible_text(text: str) -> str:
    """Without the marks of text, numbers that only name something, and the same in another unit."""
    text = _O_CLOCK.sub(r"\1", text.replace(TEXT, " ").replace(END_TEXT, " "))
    return _OTHER_UNIT.sub(r"\g<exact>", _WHERE.sub("", _NAMED.sub(" ", text)))


def _sentences(shown: str) -> list[str]:
    """The sentences with digits; irrelevant ones only where there is no other."""
    found = [part for part in re.split(_END, shown) if re.search(r"\d", part)]
    return [part for part in found if not ASIDE.match(part)] or found


def _best_answer(sentences: list[str], question: str, said: Value | None) -> Value | None:
    """`said`, which the last sentence's grammar says, or the number that answers the question
    clearly better."""
    if not question or isinstance(said, str):
        return said
    better = find_better_number(sentences, question, said)
    return said if better is None else better


def read_number_words(sentence: str, letters: bool) -> Fraction | None:
    """`There are eighteen apples left.`, `一共有一千五百元。`"""
    if (
        numerals := re.search(
            r"(?<![第每])[一二两三四五六七八九十][零一二两三四五六七八九十百千万亿]+(?:点[零一二三四五六七八九]+)?",
            sentence,
        )
    ) is not None:
        return read_quantity(sentence[numerals.start() :], letters)
    for match in re.finditer(rf"(?i)(?<![A-Za-z-]){_NUMBER_WORD}(?![A-Za-z])", sentence):
        if CHANGES.search(sentence[: match.start()]):
            return None
        found = begin_quantity(sentence[match.start() :])
        if found is not None:
            value = read_sentence(sentence[match.start() :], letters)
            return value if isinstance(value, Fraction) else None
    return read_quantity(sentence, letters)
