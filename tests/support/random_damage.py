"""Damage of a checkpoint's files without a thought of what they mean: bytes are flipped, cut and
repeated, and random values are put at random places of the JSON. Nothing in quantkit was written
with its cases in mind.
"""

import copy
import json
import random

from damage import JSON_FILES, VALUES, written


def at_random(model, seed, count):
    """`count` damages of files of a checkpoint that depend on the seed alone."""
    draw = random.Random(seed)
    shard = next(model.glob("*.safetensors")).name
    for number in range(count):
        file = draw.choice((*JSON_FILES, "config.json", shard))
        content = (model / file).read_bytes()
        if file == shard or draw.random() < 0.4:
            reach = 8 + int.from_bytes(content[:8], "little") if file == shard else len(content)
            yield written(file, f"bytes {seed}.{number}", shaken(content, reach, draw))
        else:
            yield written(
                file,
                f"values {seed}.{number}",
                json.dumps(perturbed(json.loads(content), draw)).encode(),
            )


def shaken(content, reach, draw):
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, length = draw.randrange(min(reach, len(changed))), draw.choice((1, 1, 2, 8, 50))
        match draw.randrange(4):
            case 0:
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = changed[at : at + length] * draw.choice((1, 3))
            case _:
                changed[at : at + length] = draw.randbytes(length)
    return bytes(changed)


def perturbed(value, draw):
    found = list(places(value))
    for _ in range(draw.choice((1, 1, 2, 3))):
        # The upper levels are few and matter most; a place further down is one of thousands.
        holder, key = draw.choice(found[:40] if draw.random() < 0.7 else found)
        other, other_key = draw.choice(found)
        try:
            held = holder[key]
            holder[key] = draw.choice(
                (
                    *(copy.deepcopy(other[other_key]), [held] * 3, {"x": held}, str(held)),
                    *(not held, draw.choice(VALUES), 10 ** draw.uniform(-320, 308)),
                    -(2 ** draw.randrange(80)),
                )
            )
            if draw.random() < 0.2:
                holder.pop(key)
        except (KeyError, IndexError):  # an earlier change took the place away
            continue
    return value


def places(value):
    level = [value]
    while level:
        inner = []
        for holder in level:
            for key, held in holder.items() if isinstance(holder, dict) else enumerate(holder):
                yield holder, key
                if isinstance(held, dict | list):
                    inner.append(held)
        level = inner
