"""Count sentences and capital words of English as NLTK does (IFEval's verdicts depend on these
counts), without its models.

A sentence ends at a full stop, question mark or exclamation mark before a blank, unless the full
stop belongs to an abbreviation, an initial or a number. Words follow the Penn Treebank: a
contraction is two.
"""

import re

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
