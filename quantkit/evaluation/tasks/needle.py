"""Needle-in-a-haystack texts of exact token length for any tokenizer, after the retrieval tasks of
RULER (Hsieh et al., 2024).

`single`: one number in irrelevant text. `multikey`: eight named numbers, one of which is asked for.
`keys`: the text consists of named numbers only. Texts are generated from the seed: the same seed,
length and tokenizer give the same rows.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from quantkit.common.errors import QuantkitError

KINDS = ("single", "multikey", "keys")
NEEDLES = 8  # named numbers of a multikey text

_FIRST = (
    "amber brisk calm dusty early faded gentle hollow icy jolly keen lonely mellow narrow "
    "olive pale quiet rusty silent tidy upper warm"
)
_SECOND = (
    "anchor barrel canyon drawer engine feather garden hammer island jacket kettle lantern "
    "meadow needle orchard pillow quarry river saddle "
    "tunnel umbrella valley window yard"
)
_PLACES = (
    "the harbor, the station, the old mill, the market, the library, the bridge, the "
    "school, the workshop, the hill, the lake"
)
_PEOPLE = (
    "the baker, a traveller, the gardener, two neighbours, the clerk, a fisherman, the "
    "teacher, the mayor, a painter, the carpenter"
)
_DEEDS = (
    "waited for the rain, sold a few apples, read the morning paper, counted the boats, "
    "mended a fence, swept the floor, drew a map, "
    "told a long story, looked for a lost key, carried some wood, wrote a letter, slept "
    "until noon"
)
_TIMES = (
    "On Monday, Early in the morning, After lunch, Late in the day, During the storm, In "
    "spring, A week later, Before dawn"
)

_TASK = (
    "Numbers are hidden in the text below, each under a name. Remember them; you will be "
    "asked for one.\n\n{text}\n\n"
)
_QUESTION = "Which number does the text give for {name}? Reply with the number alone."


def needle_rows(
    count_tokens: Callable[[str], int], lengths: list[int], kinds: list[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """`count` problems for every length and kind, with the requested number at evenly spaced
    depths.

    A row has id, problem, answer (seven digits), length, kind, depth (0: at the beginning) and
    tokens, which is at most the length.
    """
    for length, kind, index in itertools.product(lengths, kinds, range(count)):
        draw, depth = random.Random(f"{seed} {length} {kind} {index}"), (index + 0.5) / count
        problem, answer = _problem(count_tokens, length, kind, depth, draw)
        yield {
            "id": f"{length}-{kind}-{index}",
            "problem": problem,
            "answer": answer,
            "length": length,
            "kind": kind,
            "group": f"{length} {kind}",
            "depth": round(depth, 3),
            "tokens": count_tokens(problem),
        }


def _problem(
    count_tokens: Callable[[str], int], length: int, kind: str, depth: float, draw: random.Random
) -> tuple[str, str]:
    """A text with its question, and the answer."""
    named = _named_numbers(draw)
    name, answer = next(named)
    question = _QUESTION.format(name=name)
    others = itertools.islice(named, NEEDLES - 1 if kind == "multikey" else 0)
    needles = [_needle(name, answer), *(_needle(*one) for one in others)]
    filler = (_needle(*one) for one in named) if kind == "keys" else _sentences(draw)
    room = length - count_tokens(_TASK.format(text=" ".join(needles)) + question)
    if room < 0:
        raise QuantkitError(
            f"a {kind} text has no room in {length} tokens", "give a larger --lengths"
        )
    text: list[str] = []
    while room > 0:
        text.append(next(filler, ""))
        room -= count_tokens(f" {text[-1]}") if text[-1] else room
    while True:
        placed = list(text)
        for number, needle in enumerate(needles):
            place = (depth + number / len(needles)) % 1
            placed.insert(round(place * len(placed)), needle)
        problem = _TASK.format(text=" ".join(filter(None, placed))) + question
        if count_tokens(problem) <= length:
            return problem, answer
        text.pop()


def _named_numbers(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Unique names with unique seven-digit numbers."""
    names = [f"{first} {second}" for first in _FIRST.split() for second in _SECOND.split()]
    draw.shuffle(names)
    numbers = draw.sample(range(10**6, 10**7), 100_000)
    for place, number in enumerate(numbers):
        turn, which = divmod(place, len(names))
        yield names[which] + (f" {turn + 1}" if turn else ""), str(number)


def _needle(name: str, number: str) -> str:
    return f"The number of {name} is {number}."


def _sentences(draw: random.Random) -> Iterator[str]:
    times, people, deeds, places = (
        words.split(", ") for words in (_TIMES, _PEOPLE, _DEEDS, _PLACES)
    )
    while True:
        yield (
            f"{draw.choice(times)}, {draw.choice(people)} {draw.choice(deeds)} near "
            f"{draw.choice(places)}."
        )
