"""However a text is cut into pieces, its parts are the same."""

import pytest

from quantkit.executor.server.stream_parser import Parts, ReasoningSplitter

CASES = [
    ("2+2 is 4\n</think>\n\nThe answer is 4.\n", True, Parts("2+2 is 4", "The answer is 4.\n")),
    ("\na\n\nb</think>c", True, Parts("a\n\nb", "c")),
    ("cut in thou", True, Parts("cut in thou", "")),
    ("<think>\nx < y</think> yes", False, Parts("x < y", " yes")),
    ("  <thin air", False, Parts("", "  <thin air")),
    ("no thinking </think> here", False, Parts("", "no thinking </think> here")),
    ("a </thin b </think>c </think> d", True, Parts("a </thin b ", "c </think> d")),
    ("</think>now", True, Parts("", "now")),
    ("", True, Parts("", "")),
]


@pytest.mark.parametrize(("text", "inside", "parts"), CASES)
def test_whole_and_in_pieces(text, inside, parts):
    for size in (max(len(text), 1), 1, 2, 3, 7):
        splitter = ReasoningSplitter(inside)
        pieces = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)] + [
            splitter.finish()
        ]
        joined = Parts(
            "".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces)
        )
        assert joined == parts, size


def test_text_comes_out_as_soon_as_it_is_certain():
    splitter = ReasoningSplitter(inside=True)
    assert splitter.push("think") == Parts("think", "")
    assert splitter.push("ing</th") == Parts("ing", "")
    assert splitter.push("ink>so") == Parts("", "so")
