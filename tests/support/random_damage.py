"""Damage of a checkpoint's files without a thought of what they mean: bytes are flipped, cut and
repeated, and random values are put at random places of the JSON. Nothing in quantkit was written
with its cases in mind.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from damage import INFINITY, JSON_FILES, NAN, VALUES, Damage, written


def at_random(model: Path, seed: int, count: int) -> Iterator[Damage]:
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


def shaken(content: bytes, reach: int, draw: random.Random) -> bytes:
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


def perturbed(value: Any, draw: random.Random) -> Any:
    places = list(_places(value))
    for _ in range(draw.choice((1, 1, 2, 3))):
        # The upper levels are few and matter most; a place further down is one of thousands.
        holder, key = draw.choice(places[:40] if draw.random() < 0.7 else places)
        other, other_key = draw.choice(places)
        try:
            match draw.randrange(5):
                case 0:
                    holder.pop(key)
                case 1:
                    holder[key] = copy.deepcopy(other[other_key])
                case 2 if isinstance(holder[key], int | float):
                    holder[key] = draw.choice((-1, 2, 0.5, 1000, 10**9)) * holder[
                        key
                    ] + draw.choice((-1, 0, 1))
                case 3:
                    holder[key] = _wrapped(holder[key], draw)
                case _:
                    holder[key] = _random_value(draw, 0)
        except (KeyError, IndexError):  # an earlier change took the place away
            continue
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    level = [value]
    while level:
        inner = []
        for holder in level:
            for key, held in holder.items() if isinstance(holder, dict) else enumerate(holder):
                yield holder, key
                if isinstance(held, dict | list):
                    inner.append(held)
        level = inner


def _wrapped(value: Any, draw: random.Random) -> Any:
    return draw.choice(([value], {"x": value}, str(value), [value] * 3, not value))


def _random_value(draw: random.Random, depth: int) -> Any:
    match draw.randrange(8 if depth < 3 else 6):
        case 0:
            return draw.randint(-(2 ** draw.randrange(80)), 2 ** draw.randrange(80))
        case 1:
            return draw.choice((-1, 1)) * 10 ** draw.uniform(-320, 308)
        case 2:
            return "".join(
                chr(draw.choice((draw.randrange(128), draw.randrange(0xD800), 0xD800)))
                for _ in range(draw.randrange(20))
            )
        case 3:
            return draw.choice((True, False, None))
        case 4:
            return draw.choice((NAN, INFINITY, 0, ""))
        case 5:
            return draw.choice(VALUES)
        case 6:
            return [_random_value(draw, depth + 1) for _ in range(draw.randrange(5))]
        case _:
            return {
                str(_random_value(draw, 3))[:9]: _random_value(draw, depth + 1)
                for _ in range(draw.randrange(5))
            }
