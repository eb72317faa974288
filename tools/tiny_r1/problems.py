"""Generator of the word problems that tiny-r1 is trained on and judged by.

Ten families of problems of two to six arithmetic steps. The reasoning is a function of the
question, so a model can learn it exactly.

Split. A problem's `key` is its family and the numbers and operations in order, without names,
things or wording. `side(key)` hashes it: one key in 16 belongs to "eval", the others to "train".
`sample` discards problems of the other side, so no combination of numbers and operations of an
evaluation problem is ever seen in training, whatever its wording.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from words import CONTAINERS, EVENTS, ITEMS, LIQUIDS, NAMES, PLACES, PLANTS

Side = Literal["train", "eval"]
SUFFIX = "Please reason step by step, and put your final answer within \\boxed{}."
TOP = 1999  # largest number that any step produces


@dataclass(frozen=True)
class StoryProblem:
    """A question, the thought that answers it, and the sentence given as the answer."""

    family: str
    key: str
    question: str
    reasoning: str
    sentence: str  # with one `{}` where the boxed answer goes
    answer: int

    @property
    def steps(self) -> int:
        """Lines of the thought, each of which computes one number."""
        return self.reasoning.count("\n") + 1

    @property
    def response(self) -> str:
        """What follows the `<think>\\n` that the chat template prefills, up to but without the
        end-of-sentence token."""
        boxed = f"\\boxed{{{self.answer}}}"
        return f"{self.reasoning}\n</think>\n\n{self.sentence.format(boxed)}"


class Rejected(Exception):
    """The drawn numbers make no sensible problem; draw again."""


def side(key: str) -> Side:
    """The side of the split that a key belongs to."""
    return "eval" if hashlib.sha256(key.encode()).digest()[0] % 16 == 0 else "train"


def _need(condition: bool) -> None:
    if not condition:
        raise Rejected


def _within(*values: int) -> None:
    _need(all(0 < value <= TOP for value in values))


def ledger(rng: random.Random, length: int | None = None) -> StoryProblem:
    """A stock that grows and shrinks, `length` times; 3 to 6 in training."""
    place, item, name = rng.choice(PLACES), rng.choice(ITEMS), rng.choice(NAMES)
    value = rng.randint(20, 400)
    key, story, steps = [str(value)], [f"The {place} holds {value} {item}."], []
    for _ in range(length or rng.randint(3, 6)):
        kind, before = rng.choice("+-**xx/"), value
        if kind == "+":
            n = rng.randint(11, 499)
            value += n
            story.append(
                rng.choice((f"Then {n} more arrive.", f"{rng.choice(NAMES)} brings {n} more."))
            )
            steps.append(f"{before} + {n} = {value}.")
        elif kind == "-":
            n = rng.randint(11, 499)
            value -= n
            story.append(
                rng.choice(
                    (f"Then {n} of them are sold.", f"{rng.choice(NAMES)} takes away {n} of them.")
                )
            )
            steps.append(f"{before} - {n} = {value}.")
        elif kind == "/":
            n = rng.choice((2, 3, 4))
            _need(before % n == 0)
            value //= n
            part = {2: "Half", 3: "A third", 4: "A quarter"}[n]
            story.append(f"{part} of them stay and the rest are shipped.")
            steps.append(f"{before} / {n} = {value}.")
        else:
            k, n, box = rng.randint(2, 12), rng.randint(3, 48), rng.choice(CONTAINERS)
            value += k * n if kind == "*" else -k * n
            verb, sign = ("come in", "+") if kind == "*" else ("go out", "-")
            story.append(f"Then {k} {box} of {n} {item} each {verb}.")
            steps.append(f"{before} {sign} {k} * {n} = {value}.")
            n = f"{k}*{n}"
            kind = sign
        _within(value)
        key.append(f"{kind}{n}")
    story.append(
        rng.choice(
            (
                f"How many {item} does the {place} hold now?",
                f"{name} counts the {item}. How many are there?",
            )
        )
    )
    return StoryProblem(
        "ledger",
        "ledger:" + "".join(key),
        " ".join(story),
        "\n".join(steps),
        f"There are {{}} {item}.",
        value,
    )


def relay(rng: random.Random) -> StoryProblem:
    """Each person's count is told by that of the one before."""
    people, item = rng.sample(NAMES, rng.choice((3, 4, 4, 5))), rng.choice(ITEMS)
    values = [rng.randint(12, 250)]
    key, story, steps = [str(values[0])], [f"{people[0]} has {values[0]} {item}."], []
    for previous, name in itertools.pairwise(people):
        before, kind = values[-1], rng.choice("+-*/")
        n = rng.randint(5, 250) if kind in "+-" else rng.choice((2, 3, 4))
        if kind == "+":
            values.append(before + n)
            story.append(f"{name} has {n} more {item} than {previous}.")
        elif kind == "-":
            values.append(before - n)
            story.append(f"{name} has {n} fewer {item} than {previous}.")
        elif kind == "*":
            values.append(before * n)
            story.append(
                f"{name} has { ({2: 'twice', 3: 'three times', 4: 'four times'}[n]) } as many "
                f"{item} as {previous}."
            )
        else:
            _need(before % n == 0)
            values.append(before // n)
            story.append(
                f"{name} has { ({2: 'half', 3: 'a third', 4: 'a quarter'}[n]) } as many {item} as "
                f"{previous}."
            )
        steps.append(f"{name}: {before} {kind} {n} = {values[-1]}.")
        key.append(f"{kind}{n}")
    total = sum(values)
    _within(*values, total)
    if rng.random() < 0.6:
        story.append(f"How many {item} do they have in all?")
        steps.append(f"In all: {' + '.join(map(str, values))} = {total}.")
        return StoryProblem(
            "relay",
            "relay:" + "".join(key) + "sum",
            " ".join(story),
            "\n".join(steps),
            f"They have {{}} {item}.",
            total,
        )
    high, low = (0, -1) if values[0] > values[-1] else (-1, 0)
    _need(values[0] != values[-1])
    gap = values[high] - values[low]
    story.append(f"How many more {item} does {people[high]} have than {people[low]}?")
    steps.append(f"{values[high]} - {values[low]} = {gap}.")
    return StoryProblem(
        "relay",
        "relay:" + "".join(key) + "gap",
        " ".join(story),
        "\n".join(steps),
        f"The difference is {{}} {item}.",
        gap,
    )


def beds(rng: random.Random) -> StoryProblem:
    """Two products, and a loss."""
    name, plant = rng.choice(NAMES), rng.choice(PLANTS)
    rows, each, rows2, each2, lost = (
        rng.randint(3, 29),
        rng.randint(11, 48),
        rng.randint(3, 19),
        rng.randint(11, 48),
        rng.randint(11, 295),
    )
    first, second = rows * each, rows2 * each2
    left = first + second - lost
    _within(left, first + second)
    question = (
        f"{name} plants {rows} rows of {each} {plant} and {rows2} rows of {each2} {plant}. "
        f"{rng.choice(('Frost kills', 'Snails eat', 'The wind breaks'))} {lost} of them. How many "
        f"{plant} are left?"
    )
    steps = (
        f"{rows} * {each} = {first}.\n{rows2} * {each2} = {second}.\n{first} + {second} - "
        f"{lost} = {left}."
    )
    return StoryProblem(
        "beds",
        f"beds:{rows}*{each}+{rows2}*{each2}-{lost}",
        question,
        steps,
        f"{{}} {plant} are left.",
        left,
    )


def tickets(rng: random.Random) -> StoryProblem:
    """Income of two prices, less the rent."""
    event, name = rng.choice(EVENTS), rng.choice(NAMES)
    adults, price, children, less = (
        rng.randint(11, 65),
        rng.randint(4, 24),
        rng.randint(11, 85),
        rng.randint(2, 12),
    )
    rent = rng.randint(20, 650)
    first, second = adults * price, children * less
    profit = first + second - rent
    _within(profit, first + second)
    question = (
        f"For the {event} {name} sells {adults} tickets at {price} dollars and {children} child "
        f"tickets at {less} dollars. "
        f"The {rng.choice(('hall', 'stage', 'tent'))} costs {rent} dollars. How many dollars of "
        f"profit does {name} make?"
    )
    steps = (
        f"{adults} * {price} = {first}.\n{children} * {less} = {second}.\n{first} + {second} "
        f"- {rent} = {profit}."
    )
    key = f"tickets:{adults}*{price}+{children}*{less}-{rent}"
    return StoryProblem("tickets", key, question, steps, "The profit is {} dollars.", profit)


def tank(rng: random.Random) -> StoryProblem:
    """Filling against a leak."""
    liquid, start = rng.choice(LIQUIDS), rng.randint(15, 600)
    fill, leak, minutes, later = (
        rng.randint(12, 80),
        rng.randint(2, 45),
        rng.randint(3, 19),
        rng.randint(2, 12),
    )
    rate = fill - leak
    _need(rate > 1)
    gain, drain = rate * minutes, leak * later
    full = start + gain
    end = full - drain
    _within(full, drain, end)
    question = (
        f"A tank holds {start} liters of {liquid}. A pump adds {fill} liters a minute while a leak "
        f"loses {leak} liters a minute. "
        f"After {minutes} minutes the pump stops and the leak goes on for {later} minutes. How "
        "many liters are in the tank?"
    )
    steps = (
        f"{fill} - {leak} = {rate}.\n{start} + {rate} * {minutes} = {full}.\n{full} - {leak} "
        f"* {later} = {end}."
    )
    return StoryProblem(
        "tank",
        f"tank:{start}+({fill}-{leak})*{minutes}-{leak}*{later}",
        question,
        steps,
        "The tank holds {} liters.",
        end,
    )


def shares(rng: random.Random) -> StoryProblem:
    """Pool, divide among friends, give some away."""
    item, box, name = rng.choice(ITEMS), rng.choice(CONTAINERS), rng.choice(NAMES)
    friends, share, count, each = (
        rng.randint(3, 9),
        rng.randint(12, 195),
        rng.randint(2, 15),
        rng.randint(6, 48),
    )
    pool = friends * share
    loose = pool - count * each
    gift = rng.randint(2, share - 1)
    _within(pool, loose)
    question = (
        f"{name} has {count} {box} of {each} {item} and {loose} loose {item}. "
        f"{friends} friends share them equally, and each gives {gift} to a neighbor. How many "
        f"{item} does each friend keep?"
    )
    steps = (
        f"{count} * {each} + {loose} = {pool}.\n{pool} / {friends} = {share}.\n{share} - "
        f"{gift} = {share - gift}."
    )
    key = f"shares:({count}*{each}+{loose})/{friends}-{gift}"
    return StoryProblem(
        "shares", key, question, steps, f"Each friend keeps {{}} {item}.", share - gift
    )


def pages(rng: random.Random) -> StoryProblem:
    """A book read at two speeds."""
    name, daily, days, rest, later = (
        rng.choice(NAMES),
        rng.randint(11, 68),
        rng.randint(3, 16),
        rng.randint(2, 9),
        rng.randint(11, 95),
    )
    done = daily * days
    left = rest * later
    total = done + left
    _within(total)
    question = (
        f"{name} reads a book of {total} pages. For {days} days {name} reads {daily} pages a day. "
        f"The rest takes {rest} days. How many pages a day is that?"
    )
    steps = f"{total} - {days} * {daily} = {left}.\n{left} / {rest} = {later}."
    return StoryProblem(
        "pages",
        f"pages:({total}-{days}*{daily})/{rest}",
        question,
        steps,
        f"{name} reads {{}} pages a day.",
        later,
    )


def ages(rng: random.Random) -> StoryProblem:
    """Ages of three people some years on."""
    first, second, third = rng.sample(NAMES, 3)
    age, older, younger, years = (
        rng.randint(15, 70),
        rng.randint(3, 29),
        rng.randint(2, 19),
        rng.randint(3, 19),
    )
    second_age = age + older
    third_age = second_age - younger
    _need(third_age != age)
    total = age + second_age + third_age + 3 * years
    question = (
        f"{first} is {age} years old. {second} is {older} years older than {first}, and {third} is "
        f"{younger} years younger than {second}. "
        f"How old will the three be together in {years} years?"
    )
    steps = (
        f"{second}: {age} + {older} = {second_age}.\n{third}: {second_age} - {younger} = "
        f"{third_age}.\n"
    )
    steps += f"{age} + {second_age} + {third_age} + 3 * {years} = {total}."
    return StoryProblem(
        "ages",
        f"ages:{age}+{older}-{younger}+3*{years}",
        question,
        steps,
        "Together they will be {} years old.",
        total,
    )


def clock(rng: random.Random) -> StoryProblem:
    """Minutes worked between two times of day, less breaks."""
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    h1, m1, hours, m2 = rng.randint(1, 8), rng.randint(1, 59), rng.randint(2, 7), rng.randint(1, 59)
    breaks, minutes = rng.randint(2, 6), rng.randint(3, 19)
    h2 = h1 + hours
    start, end = 60 * h1 + m1, 60 * h2 + m2
    worked = end - start - breaks * minutes
    _within(start, end, worked)
    question = (
        f"{name} works at the {place} from {h1}:{m1:02d} to {h2}:{m2:02d} and takes {breaks} "
        f"breaks of {minutes} minutes. "
        f"How many minutes does {name} work?"
    )
    steps = (
        f"{h2} * 60 + {m2} = {end}.\n{h1} * 60 + {m1} = {start}.\n{end} - {start} - {breaks} "
        f"* {minutes} = {worked}."
    )
    return StoryProblem(
        "clock",
        f"clock:{h2}:{m2}-{h1}:{m1}-{breaks}*{minutes}",
        question,
        steps,
        f"{name} works {{}} minutes.",
        worked,
    )


def machine(rng: random.Random, length: int | None = None) -> StoryProblem:
    """A bare chain of `length` operations; 4 to 7 in training."""
    value = rng.randint(11, 450)
    key, story, steps = [str(value)], [f"A number machine starts with {value}."], []
    for _ in range(length or rng.randint(4, 7)):
        kind, before = rng.choice("+--*&&//"), value
        n = rng.randint(11, 899) if kind in "+-" else rng.randint(2, 9)
        if kind == "+":
            value += n
            story.append(f"It adds {n}.")
        elif kind == "-":
            value -= n
            story.append(f"It subtracts {n}.")
        elif kind == "*":
            value *= n
            story.append(f"It multiplies by {n}.")
        elif kind == "&":
            extra = rng.randint(11, 399)
            value = value * n + extra
            story.append(f"It multiplies by {n} and adds {extra}.")
            kind, n = "*", f"{n} + {extra}"
        else:
            _need(before % n == 0)
            value //= n
            story.append(f"It divides by {n}.")
        _within(value)
        steps.append(f"{before} {kind} {n} = {value}.")
        key.append(f"{kind}{n}".replace(" ", ""))
    story.append("Which number comes out?")
    return StoryProblem(
        "machine",
        "machine:" + "".join(key),
        " ".join(story),
        "\n".join(steps),
        "The machine gives {}.",
        value,
    )


FAMILIES: dict[Callable[[random.Random], StoryProblem], float] = {
    ledger: 0.22,
    relay: 0.14,
    machine: 0.14,
    beds: 0.08,
    tickets: 0.08,
    tank: 0.08,
    shares: 0.08,
    pages: 0.06,
    ages: 0.05,
    clock: 0.07,
}


def sample(
    rng: random.Random, which: Side, family: Callable[[random.Random], StoryProblem] | None = None
) -> StoryProblem:
    """A problem of one side of the split, of `family` or of a family drawn by its share."""
    draw = family or rng.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    while True:
        try:
            problem = draw(rng)
        except Rejected:
            continue
        if side(problem.key) == which:
            return problem
