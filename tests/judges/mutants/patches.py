"""Mutants by patch: faults of audits and mistakes that the rules do not make.

A file of patches/ has the header of a unified diff and then hunks, each after a line `# what the
fault is`. A hunk is found by its lines, which occur once in the source; its line numbers are a help
to the reader alone.
"""

from functools import cache
from pathlib import Path

from by_rule import Mutant

FOLDER = Path(__file__).parent / "patches"


@cache
def hunks():
    """By path of a source: (fault, lines before, lines after) of each hunk."""
    found = {}
    for file in sorted(FOLDER.glob("*.patch")):
        _, header, *lines = file.read_text().splitlines()
        own = found.setdefault(header.removeprefix("+++ b/"), [])
        for hunk in "\n".join(lines).removeprefix("# ").split("\n# "):
            what, _, *body = hunk.split("\n")
            before = "\n".join(line[1:] for line in body if line[:1] != "+")
            after = "\n".join(line[1:] for line in body if line[:1] != "-")
            own.append((what, before, after))
    return found


def of_patches(path, source):
    return [_placed(path, source, *hunk) for hunk in hunks().get(path, [])]


def _placed(path, source, what, before, after):
    count = f"\n{source}".count(f"\n{before}\n")
    assert count == 1, f"{path} has the lines of {what!r} {count} times: the patch is out of date"
    start = f"\n{source}".index(f"\n{before}\n")
    line = source.count("\n", 0, start) + 1
    return Mutant(path, start, start + len(before), after, before, f"by hand: {what}", line, "")
