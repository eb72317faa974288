"""Detect the language of a text among those of IFEval, by script and, where languages share one,
by common words."""

import re
from collections import Counter

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
