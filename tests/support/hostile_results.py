"""Damage of a results folder: what anyone could hand to `compare`, `regrade`, `ppl` and --baseline.

Nothing here knows what a field means: bytes are shaken, values are put at random places of the
JSON, and files become pipes, folders and links.
"""

import json
import os
import random
import re
from dataclasses import dataclass

from damage import DEEP, VALUES
from random_damage import perturbed, shaken

TEXTS = ("$x_{$", "a$\\frac{$", "\x1b[31m", "</script><b>evil", "../../evil", "\u202e", "x" * 5000)
WHOLES = (b"", b"[]", b"null", b"5", b"{}", b"\n", b"\x00" * 512, DEEP.encode(), b"\xff\xfe{}")


@dataclass(frozen=True)
class Change:
    """A file of the folder, by a glob, and what becomes of it. kind: bytes, whole, values, huge (a
    number of its last line, the seed's), pipe, folder, link."""

    glob: str
    kind: str
    seed: int

    def apply(self, folder):
        """Returns the file's name."""
        draw = random.Random(self.seed)
        path = next(folder.glob(self.glob))
        content = path.read_bytes()
        match self.kind:
            case "bytes":
                path.write_bytes(shaken(content, len(content), draw))
            case "whole":
                path.write_bytes(draw.choice(WHOLES))
            case "pipe" | "folder" | "link":
                path.unlink()
                outside = folder.parent / "outside"
                {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda p: os.symlink(outside, p)}[
                    self.kind
                ](path)
            case "huge":
                *lines, last = content.decode().splitlines()
                number = list(re.finditer(r": \d[\d.e-]*", last))[self.seed]
                last = f"{last[: number.start()]}: {10**22}{last[number.end() :]}"
                path.write_text("\n".join([*lines, last, ""]))
            case "values":
                path.write_text("".join(_lines(path, content, draw)))
            case kind:
                raise AssertionError(kind)
        return path.name


def _lines(path, content, draw):
    """The file with values put into its document, or into one of its lines."""
    if path.suffix == ".json":
        yield json.dumps(_spoilt(json.loads(content), draw))
        return
    lines = content.decode().split("\n")[:-1]
    chosen = 0 if draw.random() < 0.4 else draw.randrange(len(lines))
    for number, line in enumerate(lines):
        yield (json.dumps(_spoilt(json.loads(line), draw)) if number == chosen else line) + "\n"


def _spoilt(value, draw):
    match draw.randrange(6):
        case 0:
            return draw.choice(VALUES)
        case 1 if isinstance(value, dict):  # one field of any depth becomes a hostile text
            holder = value
            while True:
                key = draw.choice(sorted(holder))
                if isinstance(holder[key], dict) and holder[key] and draw.random() < 0.7:
                    holder = holder[key]
                    continue
                holder[key] = draw.choice(TEXTS)
                return value
        case _:
            return perturbed(value, draw)


GLOBS = (
    "results.json",
    "samples.jsonl",
    "completions/*-*.jsonl",
    "completions/order.json",
    "prompts.jsonl",
)
KINDS = ("bytes", "whole", "values", "values", "values", "values", "pipe", "folder", "link")


def changes(seed, count):
    draw = random.Random(seed)
    drawn = [
        Change(draw.choice(GLOBS), draw.choice(KINDS), draw.randrange(2**32)) for _ in range(count)
    ]
    return drawn + [Change(glob, "huge", n) for glob in GLOBS[1:3] for n in range(2)]
