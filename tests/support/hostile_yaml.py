"""YAML that is small and asks for much: aliases, nesting, keys that are not scalars, tags, sizes."""

import random

BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(9))
FIXED = {
    "alias": "a: &a x\nb: *a\n",
    "alias bomb": BOMB,
    "alias bomb as a key": BOMB + "? [*a8, *a8]\n: x\n",
    "merge bomb": "\n".join(
        f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 99) if n else '{a: 1}'}]}}"
        for n in range(50)
    ),
    "itself": "a: &a [*a]\n",
    "sequence as a key": "? [a, b]\n: x\n",
    "mapping as a key": "? {a: b}\n: x\n",
    "deep": "[" * 20_000,
    "deep mappings": "{a: " * 20_000,
    "python tag": "!!python/object/apply:os.system ['true']\n",
    "unknown tag": "!x y\n",
    "long": "a: " + "x" * (1 << 20) + "\n",
    "number of digits": "a: " + "9" * 100_000 + "\n",
    "binary": "a: !!binary '!!!'\n",
    "twice": "a: 1\na: 2\n",
    "not text": "a: \x00\n",
    "two documents": "a: 1\n---\nb: 2\n",
}


def shaken(text, seed):
    """The text with pieces moved, repeated and replaced by YAML's own marks."""
    draw, marks = (
        random.Random(seed),
        ["*a", "&a ", "? ", "<<: ", "[", "{", "!!", "- ", "\n", ": ", "|", "'", "%", "\t"],
    )
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(text))
        piece = draw.choice(
            [draw.choice(marks) * draw.choice([1, 1, 50]), text[at : at + draw.randrange(40)]]
        )
        text = text[:at] + piece + text[at + draw.choice([0, 1, 20]) :]
    return text
