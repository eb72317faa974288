"""Text of files, servers and models as a person may be shown it: nothing in it is obeyed, and
nothing is hidden."""

import re

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tab and line feed, those that turn the direction of writing, and halves of
characters."""


def visible(text: str) -> str:
    """`text` with characters that a terminal would act on written as escapes."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """`visible`, with line feeds and tabs written as escapes too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")
