"""Short problems in words, several at a time: a thought that works through all of them, and a reply with the results."""

from __future__ import annotations

import random
from collections.abc import Callable

Worked = tuple[str, list[str], str]
"""A problem, the steps of its solution, and the sentence that answers it."""

NAMES = [
    "Amara",
    "Bela",
    "Carlos",
    "Dilek",
    "Elif",
    "Femi",
    "Gita",
    "Henrik",
    "Imani",
    "Joris",
    "Kofi",
    "Lina",
    "Marek",
    "Nadia",
    "Otto",
    "Priya",
    "Rosa",
    "Selim",
    "Tomasz",
    "Yuki",
]
THINGS = [
    "marbles",
    "stickers",
    "eggs",
    "bricks",
    "tickets",
    "candles",
    "shells",
    "oranges",
    "stamps",
    "screws",
    "tiles",
    "buttons",
]


def rows(rng: random.Random) -> Worked:
    name, thing = (
        rng.choice(NAMES),
        rng.choice(["cabbages", "tulips", "leeks", "vines", "strawberries"]),
    )
    a, b, c, d = rng.randint(6, 30), rng.randint(8, 45), rng.randint(3, 9), rng.randint(5, 20)
    lost = rng.randint(10, a * b // 2)
    steps = [
        f"{a} * {b} = {a * b}.",
        f"{c} * {d} = {c * d}.",
        f"{a * b} + {c * d} = {a * b + c * d}.",
        f"{a * b + c * d} - {lost} = {a * b + c * d - lost}.",
    ]
    question = f"{name} plants {a} rows of {b} {thing} and {c} rows of {d}. Hail destroys {lost} of them. How many are left?"
    return question, steps, f"\\boxed{{{a * b + c * d - lost}}} {thing} are left."


def pages(rng: random.Random) -> Worked:
    name, first, rate, rest_days, rest_rate = (
        rng.choice(NAMES),
        rng.randint(3, 9),
        rng.randint(12, 60),
        rng.randint(2, 8),
        rng.randint(10, 50),
    )
    total = first * rate + rest_days * rest_rate
    steps = [
        f"{first} * {rate} = {first * rate}.",
        f"{total} - {first * rate} = {rest_days * rest_rate}.",
        f"{rest_days * rest_rate} / {rest_days} = {rest_rate}.",
    ]
    return (
        f"A report has {total} pages. {name} checks {rate} pages a day for {first} days, and the rest in {rest_days} days. How many pages a day is that at the end?",
        steps,
        f"It is \\boxed{{{rest_rate}}} pages a day.",
    )


def change(rng: random.Random) -> Worked:
    name, n, m = rng.choice(NAMES), rng.randint(2, 9), rng.randint(2, 7)
    p, q = rng.randint(15, 95) * 10, rng.randint(10, 60) * 10
    cost = n * p + m * q
    paid = (cost // 2000 + 1) * 2000
    steps = [
        f"{n} * {p} = {n * p}.",
        f"{m} * {q} = {m * q}.",
        f"{n * p} + {m * q} = {cost}.",
        f"{paid} - {cost} = {paid - cost}.",
    ]
    return (
        f"{name} buys {n} lamps at {p} cents and {m} cables at {q} cents and pays with {paid} cents. How much change is that?",
        steps,
        f"The change is \\boxed{{{paid - cost}}} cents.",
    )


def hours(rng: random.Random) -> Worked:
    name, begin, end, breaks, length = (
        rng.choice(NAMES),
        rng.randint(360, 600),
        rng.randint(780, 1150),
        rng.randint(1, 4),
        rng.randint(5, 25),
    )
    told = [f"{moment // 60}:{moment % 60:02d}" for moment in (begin, end)]
    steps = [
        f"{end // 60} * 60 + {end % 60} = {end}.",
        f"{begin // 60} * 60 + {begin % 60} = {begin}.",
        f"{end} - {begin} = {end - begin}.",
        f"{breaks} * {length} = {breaks * length}.",
        f"{end - begin} - {breaks * length} = {end - begin - breaks * length}.",
    ]
    return (
        f"{name} works at the harbour from {told[0]} to {told[1]} with {breaks} breaks of {length} minutes. How many minutes of work is that?",
        steps,
        f"{name} works \\boxed{{{end - begin - breaks * length}}} minutes.",
    )


def multiples(rng: random.Random) -> Worked:
    (x, y, z), thing, n, k, j = (
        rng.sample(NAMES, 3),
        rng.choice(THINGS),
        rng.randint(6, 60),
        rng.randint(2, 5),
        rng.randint(2, 4),
    )
    steps = [
        f"{y}: {n} * {k} = {n * k}.",
        f"{z}: {n * k} * {j} = {n * k * j}.",
        f"In all: {n} + {n * k} + {n * k * j} = {n + n * k + n * k * j}.",
    ]
    return (
        f"{x} has {n} {thing}. {y} has {k} times as many as {x}, and {z} has {j} times as many as {y}. How many do they have in all?",
        steps,
        f"They have \\boxed{{{n + n * k + n * k * j}}} {thing}.",
    )


def machine(rng: random.Random) -> Worked:
    value = start = rng.randint(5, 400)
    told, steps = [], []
    for _ in range(rng.randint(3, 6)):
        kind, n = rng.choice("+-*"), rng.randint(2, 90)
        n = rng.randint(2, 5) if kind == "*" else min(n, value) if kind == "-" else n
        after = {"+": value + n, "-": value - n, "*": value * n}[kind]
        told.append({"+": f"adds {n}", "-": f"takes away {n}", "*": f"multiplies by {n}"}[kind])
        steps.append(f"{value} {kind} {n} = {after}.")
        value = after
    return (
        f"A machine is given {start}. It {', then '.join(told)}. What comes out?",
        steps,
        f"The machine gives \\boxed{{{value}}}.",
    )


def share(rng: random.Random) -> Worked:
    people, each, left, thing = (
        rng.randint(3, 12),
        rng.randint(4, 30),
        rng.randint(0, 2),
        rng.choice(THINGS),
    )
    boxes = rng.choice([one for one in range(2, 12)])
    total = people * each + left
    extra = total % boxes
    steps = [
        f"{boxes} * {total // boxes} = {total - extra}.",
        f"{total - extra} + {extra} = {total}.",
        f"{total} - {left} = {total - left}.",
        f"{total - left} / {people} = {each}.",
    ]
    return (
        f"There are {boxes} boxes with {total // boxes} {thing} each and {extra} loose ones. {people} children share them equally and {left} remain. How many does each child get?",
        steps,
        f"Each child gets \\boxed{{{each}}} {thing}.",
    )


def journey(rng: random.Random) -> Worked:
    name, v, t, w, u = (
        rng.choice(NAMES),
        rng.randint(4, 30) * 3,
        rng.randint(2, 6),
        rng.randint(4, 25) * 3,
        rng.randint(1, 5),
    )
    far = v * t + w * u
    more = rng.randint(5, 90)
    steps = [
        f"{v} * {t} = {v * t}.",
        f"{w} * {u} = {w * u}.",
        f"{v * t} + {w * u} = {far}.",
        f"{far + more} - {far} = {more}.",
    ]
    return (
        f"{name} drives {t} hours at {v} km/h and {u} hours at {w} km/h. The whole way is {far + more} km. How far is it still?",
        steps,
        f"It is still \\boxed{{{more}}} km.",
    )


def ages(rng: random.Random) -> Worked:
    (x, y), young, gap, years = (
        rng.sample(NAMES, 2),
        rng.randint(4, 30),
        rng.randint(2, 25),
        rng.randint(2, 20),
    )
    total = young + young + gap + 2 * years
    steps = [
        f"{years} + {years} = {2 * years}.",
        f"{total} - {2 * years} = {2 * young + gap}.",
        f"{2 * young + gap} - {gap} = {2 * young}.",
        f"{2 * young} / 2 = {young}.",
    ]
    return (
        f"{x} is {gap} years older than {y}. In {years} years they will be {total} together. How old is {y} today?",
        steps,
        f"{y} is \\boxed{{{young}}} years old.",
    )


def tank(rng: random.Random) -> Worked:
    inflow, outflow, minutes, start = (
        rng.randint(12, 60),
        rng.randint(2, 11),
        rng.randint(8, 50),
        rng.randint(20, 300),
    )
    steps = [
        f"{inflow} - {outflow} = {inflow - outflow}.",
        f"{inflow - outflow} * {minutes} = {(inflow - outflow) * minutes}.",
        f"{start} + {(inflow - outflow) * minutes} = {start + (inflow - outflow) * minutes}.",
    ]
    return (
        f"A tank holds {start} litres. {inflow} litres a minute run in and {outflow} run out. How many litres are in it after {minutes} minutes?",
        steps,
        f"There are \\boxed{{{start + (inflow - outflow) * minutes}}} litres in it.",
    )


FAMILIES: tuple[Callable[[random.Random], Worked], ...] = (
    rows,
    pages,
    change,
    hours,
    multiples,
    machine,
    share,
    journey,
    ages,
    tank,
)
_ASKED = [
    "Please solve these.",
    "Work these out, one after the other.",
    "My homework. Show me the results, please.",
    "Answer each in one sentence.",
]


def conversation(
    rng: random.Random, long_enough: Callable[[list[dict[str, str]]], bool]
) -> list[dict[str, str]]:
    """So many problems that it is long enough; thought about in order."""
    worked: list[Worked] = []
    messages: list[dict[str, str]] = []
    while not long_enough(messages):
        worked.append(rng.choice(FAMILIES)(rng))
        asked = "\n".join(
            f"{number}. {question}" for number, (question, _, _) in enumerate(worked, start=1)
        )
        thought = "\n".join(step for _, steps, _ in worked for step in steps)
        reply = "\n".join(
            f"{number}. {answer}" for number, (_, _, answer) in enumerate(worked, start=1)
        )
        messages = [
            {"role": "user", "content": f"{rng.choice(_ASKED)}\n\n{asked}"},
            {"role": "assistant", "reasoning_content": thought, "content": reply},
        ]
    return messages
