"""Worked mathematics: families of problems whose numbers are drawn and whose solutions are computed, step by step, in English or Chinese."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Exercise:
    question: str
    steps: list[str]
    answer: str


def linear_system(rng: random.Random) -> Exercise:
    x, y = rng.randint(-9, 12), rng.randint(-9, 12)
    a, b, c, d = (rng.choice([-5, -4, -3, -2, 2, 3, 4, 5, 7]) for _ in range(4))
    while a * d == b * c:
        d = rng.randint(2, 11)
    p, q = a * x + b * y, c * x + d * y
    steps = [
        f"Multiply the first equation by {c} and the second by {a}, so that both have {a * c}x.",
        f"First: {a * c}x + ({b * c})y = {p * c}. Second: {a * c}x + ({a * d})y = {q * a}.",
        f"Subtract the first from the second: ({a * d} - ({b * c}))y = {q * a} - ({p * c}), so {a * d - b * c}y = {q * a - p * c} and y = {y}.",
        f"Put that into the first equation: {a}x = {p} - ({b})({y}) = {p - b * y}, so x = {x}.",
        f"Check in the second: {c}({x}) + ({d})({y}) = {c * x} + {d * y} = {q}. Right.",
    ]
    return Exercise(
        f"Solve for x and y: {a}x + ({b})y = {p} and {c}x + ({d})y = {q}.",
        steps,
        f"x = {x}, y = {y}",
    )


def quadratic(rng: random.Random) -> Exercise:
    a, r, s = rng.choice([1, 1, 2, 3]), rng.randint(-11, 11), rng.randint(-11, 11)
    b, c = -a * (r + s), a * r * s
    disc = b * b - 4 * a * c
    root = math.isqrt(disc)
    steps = [
        f"Here a = {a}, b = {b}, c = {c}.",
        f"The discriminant is b^2 - 4ac = {b * b} - ({4 * a * c}) = {disc}, and {disc} = {root}^2.",
        f"So t = ({-b} ± {root}) / {2 * a}: t = {Fraction(-b + root, 2 * a)} or t = {Fraction(-b - root, 2 * a)}.",
        f"Vieta as a check: the sum is {r + s} = -b/a and the product {r * s} = c/a.",
    ]
    answer = f"t = {r}" if r == s else f"t = {min(r, s)} or t = {max(r, s)}"
    return Exercise(f"Find all real t with {a}t^2 + ({b})t + ({c}) = 0.", steps, answer)


def euclid(rng: random.Random) -> Exercise:
    g = rng.choice([1, 3, 4, 6, 7, 12, 13, 15, 18])
    m, n = g * rng.randint(11, 160), g * rng.randint(11, 160)
    a, b = max(m, n), min(m, n)
    steps, p, q, (s0, s1, t0, t1) = [], a, b, (1, 0, 0, 1)
    while q:
        k = p // q
        steps.append(f"{p} = {k} * {q} + {p % q}")
        p, q = q, p % q
        s0, s1, t0, t1 = s1, s0 - k * s1, t1, t0 - k * t1
    steps.append(f"The last remainder that is not zero is {p}, so gcd({a}, {b}) = {p}.")
    steps.append(
        f"Going back up: {p} = ({s0}) * {a} + ({t0}) * {b}. Check: {s0 * a} + ({t0 * b}) = {s0 * a + t0 * b}."
    )
    steps.append(f"The least common multiple is {a} * {b} / {p} = {a * b // p}.")
    return Exercise(
        f"Compute the greatest common divisor and the least common multiple of {a} and {b}, and write the divisor as a combination of both.",
        steps,
        f"gcd = {p}, lcm = {a * b // p}, {p} = ({s0})*{a} + ({t0})*{b}",
    )


def divisors(rng: random.Random) -> Exercise:
    n = math.prod(rng.choice([2, 2, 2, 3, 3, 5, 7, 11, 13, 17]) for _ in range(rng.randint(4, 7)))
    steps, rest, powers, p = [], n, {}, 2
    while rest > 1:
        while rest % p == 0:
            steps.append(f"{rest} / {p} = {rest // p}")
            rest, powers[p] = rest // p, powers.get(p, 0) + 1
        p += 1
    product = " * ".join(f"{p}^{e}" for p, e in powers.items())
    count = math.prod(e + 1 for e in powers.values())
    total = math.prod((p ** (e + 1) - 1) // (p - 1) for p, e in powers.items())
    steps.append(f"So {n} = {product}.")
    steps.append(
        f"Each exponent can be chosen from 0 up to its value: {' * '.join(str(e + 1) for e in powers.values())} = {count} divisors."
    )
    parts = " * ".join(
        f"({p}^{e + 1} - 1)/{p - 1}" if p > 2 else f"(2^{e + 1} - 1)" for p, e in powers.items()
    )
    steps.append(f"Their sum is {parts} = {total}.")
    return Exercise(
        f"Factor {n}. How many positive divisors does it have, and what is their sum?",
        steps,
        f"{product}; {count}; {total}",
    )


def price_changes(rng: random.Random) -> Exercise:
    price = rng.randint(12, 480) * 5
    changes = [
        rng.choice([-30, -25, -20, -15, -10, -5, 5, 8, 10, 12, 20, 25])
        for _ in range(rng.randint(3, 4))
    ]
    thing = rng.choice(
        [
            "A coat",
            "A share",
            "A bicycle",
            "The monthly rent of a stall",
            "A crate of oranges",
            "A second-hand camera",
        ]
    )
    steps, now = [], Fraction(price)
    for change in changes:
        after = now * (100 + change) / 100
        steps.append(
            f"{'+' if change > 0 else '-'}{abs(change)} %: {float(now):.2f} * {(100 + change) / 100:.2f} = {float(after):.2f}"
        )
        now = after
    ratio = float(now / price)
    steps.append(
        f"Altogether the factor is {ratio:.4f}, a change of {100 * (ratio - 1):+.2f} %. Adding the percentages would give {sum(changes):+d} %,"
    )
    steps.append("which is wrong because each percentage is taken of another base.")
    told = ", then ".join(
        f"{'rises' if change > 0 else 'falls'} by {abs(change)} %" for change in changes
    )
    question = f"{thing} costs {price}. The price {told}. What is it now, and by how many percent did it change altogether?"
    return Exercise(question, steps, f"{float(now):.2f}, {100 * (ratio - 1):+.2f} %")


def urn(rng: random.Random) -> Exercise:
    red, blue, green = rng.randint(2, 8), rng.randint(2, 8), rng.randint(1, 6)
    n = red + blue + green
    total = math.comb(n, 3)
    each = red * blue * green
    same = sum(math.comb(k, 3) for k in (red, blue, green))
    steps = [
        f"There are C({n}, 3) = {total} ways to draw three of {n}.",
        f"One of each colour: {red} * {blue} * {green} = {each} ways, probability {each}/{total} = {Fraction(each, total)}.",
        f"All alike: C({red}, 3) + C({blue}, 3) + C({green}, 3) = {same} ways, probability {Fraction(same, total)}.",
        f"Whatever is left, exactly two alike, has 1 - {Fraction(each, total)} - {Fraction(same, total)} = {1 - Fraction(each + same, total)}.",
    ]
    question = (
        f"A bag holds {red} red, {blue} blue and {green} green marbles. Three are drawn without putting any back. "
        "How likely are three different colours, three equal ones, and exactly two of one colour?"
    )
    return Exercise(
        question,
        steps,
        f"{Fraction(each, total)}, {Fraction(same, total)}, {1 - Fraction(each + same, total)}",
    )


def cubic(rng: random.Random) -> Exercise:
    u, v = sorted(rng.sample(range(-6, 8), 2))
    if (u + v) % 2:
        v += 1
    k = rng.randint(-20, 20)
    b, c = -3 * (u + v) // 2, 3 * u * v

    def f(x: int) -> int:
        return x**3 + b * x**2 + c * x + k

    steps = [
        f"f'(x) = 3x^2 + ({2 * b})x + ({c}) = 3(x - ({u}))(x - ({v})).",
        f"It vanishes at x = {u} and x = {v}, is positive outside and negative between.",
        f"So x = {u} is a local maximum: f({u}) = {u**3} + ({b * u * u}) + ({c * u}) + ({k}) = {f(u)}.",
        f"And x = {v} is a local minimum: f({v}) = {v**3} + ({b * v * v}) + ({c * v}) + ({k}) = {f(v)}.",
        f"f''(x) = 6x + ({2 * b}) changes its sign at x = {Fraction(-b, 3)}, the point of inflection, half way between them.",
    ]
    question = f"Find the local extrema and the point of inflection of f(x) = x^3 + ({b})x^2 + ({c})x + ({k})."
    return Exercise(
        question,
        steps,
        f"maximum ({u}, {f(u)}), minimum ({v}, {f(v)}), inflection at x = {Fraction(-b, 3)}",
    )


def series(rng: random.Random) -> Exercise:
    if rng.random() < 0.5:
        a, d, n = rng.randint(-8, 30), rng.randint(2, 13), rng.randint(12, 60)
        last = a + (n - 1) * d
        steps = [
            f"The differences are constant: {d}. It is arithmetic, the k-th term is {a} + (k - 1) * {d}.",
            f"The {n}th term is {a} + {n - 1} * {d} = {last}.",
            f"The sum is {n} * ({a} + {last}) / 2 = {n * (a + last) // 2}.",
        ]
        shown = ", ".join(str(a + i * d) for i in range(4))
        return Exercise(
            f"What is the sum of the first {n} terms of {shown}, ...?",
            steps,
            str(n * (a + last) // 2),
        )
    a, r, n = rng.randint(1, 9), rng.choice([2, 3, 4, 5, -2, -3]), rng.randint(6, 11)
    total = a * (r**n - 1) // (r - 1)
    steps = [
        f"Each term is {r} times the one before: geometric with ratio {r}.",
        f"The sum of n terms is a(r^n - 1)/(r - 1) = {a} * ({r}^{n} - 1) / ({r - 1}).",
        f"({r})^{n} = {r**n}, so the sum is {a} * {r**n - 1} / ({r - 1}) = {total}.",
    ]
    return Exercise(
        f"What is the sum of the first {n} terms of {', '.join(str(a * r**i) for i in range(4))}, ...?",
        steps,
        str(total),
    )


def spread(rng: random.Random) -> Exercise:
    values = [rng.randint(3, 60) for _ in range(rng.randint(6, 9))]
    n, ordered = len(values), sorted(values)
    mean = Fraction(sum(values), n)
    median = Fraction(ordered[n // 2] + ordered[(n - 1) // 2], 2)
    squares = sum((value - mean) ** 2 for value in values)
    steps = [
        f"Sum: {' + '.join(map(str, values))} = {sum(values)}. Mean: {sum(values)} / {n} = {float(mean):.4f}.",
        f"In order: {', '.join(map(str, ordered))}. The median is {float(median):g}.",
        f"Squared deviations: {', '.join(f'{float((value - mean) ** 2):.2f}' for value in values)}; their sum is {float(squares):.2f}.",
        f"Sample variance: {float(squares):.2f} / {n - 1} = {float(squares / (n - 1)):.3f}; its root is {math.sqrt(squares / (n - 1)):.3f}.",
    ]
    answer = f"mean {float(mean):.3f}, median {float(median):g}, standard deviation {math.sqrt(squares / (n - 1)):.3f}"
    return Exercise(
        f"Give mean, median and sample standard deviation of {', '.join(map(str, values))}.",
        steps,
        answer,
    )


def power_mod(rng: random.Random) -> Exercise:
    m, base, e = rng.randint(23, 211), rng.randint(2, 40), rng.randint(20, 220)
    bits, value = bin(e)[2:], base % m
    steps = [
        f"{e} is {bits} in binary. Begin with {base} mod {m} = {value} and read the remaining bits: square, and multiply where the bit is 1."
    ]
    for bit in bits[1:]:
        squared = value * value % m
        after = squared * base % m if bit == "1" else squared
        note = f", times {base} is {squared * base}, mod {m} = {after}" if bit == "1" else ""
        steps.append(f"bit {bit}: {value}^2 = {value * value}, mod {m} = {squared}{note}")
        value = after
    return Exercise(f"Compute {base}^{e} mod {m} by hand.", steps, str(pow(base, e, m)))


def determinant(rng: random.Random) -> Exercise:
    m = [[rng.randint(-6, 9) for _ in range(3)] for _ in range(3)]
    (a, b, c), (d, e, f), (g, h, i) = m
    parts = (e * i - f * h, d * i - f * g, d * h - e * g)
    value = a * parts[0] - b * parts[1] + c * parts[2]
    steps = [
        "Expand along the first row.",
        f"Minor of {a}: {e}*{i} - ({f})*({h}) = {parts[0]}. Minor of {b}: {d}*{i} - ({f})*({g}) = {parts[1]}. Minor of {c}: {d}*{h} - ({e})*({g}) = {parts[2]}.",
        f"det = {a}*({parts[0]}) - ({b})*({parts[1]}) + ({c})*({parts[2]}) = {a * parts[0]} - ({b * parts[1]}) + ({c * parts[2]}) = {value}.",
        "It is not zero, so the matrix is invertible."
        if value
        else "It is zero: the rows are linearly dependent and there is no inverse.",
    ]
    return Exercise(
        f"Compute the determinant of [[{a}, {b}, {c}], [{d}, {e}, {f}], [{g}, {h}, {i}]]. Is it invertible?",
        steps,
        str(value),
    )


def long_product(rng: random.Random) -> Exercise:
    a, b = rng.randint(234, 9876), rng.randint(123, 987)
    steps, total = [], 0
    for place, digit in enumerate(reversed(str(b))):
        part = a * int(digit) * 10**place
        total += part
        steps.append(f"{a} * {int(digit) * 10**place} = {part}; so far {total}")
    steps.append(
        f"Last digit: {a % 10} * {b % 10} ends in {a * b % 10}, as the result does. Size: about {round(a, -2)} * {round(b, -2)} = {round(a, -2) * round(b, -2)}."
    )
    steps.append(
        f"Nines: {a} leaves {a % 9}, {b} leaves {b % 9}, the product of these {a % 9 * (b % 9) % 9}; {a * b} leaves {a * b % 9}."
    )
    return Exercise(
        f"Multiply {a} by {b} without a calculator and check the result in two ways.",
        steps,
        f"{a * b}",
    )


def letters(rng: random.Random) -> Exercise:
    word = rng.choice(
        [
            "BANANA",
            "PEPPER",
            "LETTER",
            "COFFEE",
            "ALGEBRA",
            "MISSISSIPPI",
            "PARALLEL",
            "COMMITTEE",
            "BALLOON",
            "TOMORROW",
            "NEEDLESS",
        ]
    )
    counts = {letter: word.count(letter) for letter in sorted(set(word))}
    repeated = {letter: count for letter, count in counts.items() if count > 1}
    total = math.factorial(len(word)) // math.prod(
        math.factorial(count) for count in counts.values()
    )
    vowels = [letter for letter in word if letter in "AEIOU"]
    rest = len(word) - len(vowels) + 1
    others = [letter for letter in word if letter not in "AEIOU"]
    inner = math.factorial(len(vowels)) // math.prod(
        math.factorial(vowels.count(one)) for one in set(vowels)
    )
    outer = math.factorial(rest) // math.prod(
        math.factorial(others.count(one)) for one in set(others)
    )
    steps = [
        f"{word} has {len(word)} letters; repeated are {', '.join(f'{letter} ({count} times)' for letter, count in repeated.items())}.",
        f"All orders: {len(word)}! / ({' * '.join(f'{count}!' for count in repeated.values())}) = {total}.",
        f"With the {len(vowels)} vowels side by side, glue them into one block: {rest} things, {outer} orders.",
        f"Inside the block the vowels {', '.join(vowels)} have {inner} orders. Together {outer} * {inner} = {outer * inner}.",
        f"The share is {Fraction(outer * inner, total)}.",
    ]
    return Exercise(
        f"In how many orders can the letters of {word} be written, and in how many of them do all vowels stand together?",
        steps,
        f"{total} and {outer * inner}",
    )


def meeting(rng: random.Random) -> Exercise:
    a, b, hours = rng.randint(4, 30) * 3, rng.randint(4, 30) * 3, Fraction(rng.randint(2, 14), 2)
    late = rng.choice([1, 2])
    distance = (a + b) * hours + a * late
    steps = [
        f"甲先走 {late} 小时，走了 {a} × {late} = {a * late} 千米。",
        f"剩下 {distance} − {a * late} = {distance - a * late} 千米由两车同时相向行驶，速度和是 {a} + {b} = {a + b} 千米/时。",
        f"还需要 {distance - a * late} ÷ {a + b} = {float(hours):g} 小时相遇。",
        f"甲一共走了 {float(hours + late):g} 小时，相遇点离 A 地 {a} × {float(hours + late):g} = {float(a * (hours + late)):g} 千米。",
        f"检验：乙走了 {float(b * hours):g} 千米，{float(a * (hours + late)):g} + {float(b * hours):g} = {distance}，正确。",
    ]
    question = f"A、B 两地相距 {distance} 千米。甲车从 A 地出发，每小时 {a} 千米，{late} 小时后乙车从 B 地出发相向而行，每小时 {b} 千米。乙车出发后多久相遇？相遇点离 A 地多远？"
    return Exercise(
        question, steps, f"{float(hours):g} 小时后相遇，离 A 地 {float(a * (hours + late)):g} 千米"
    )


def work_together(rng: random.Random) -> Exercise:
    x, y = rng.sample([6, 8, 9, 10, 12, 15, 18, 20, 24, 30], 2)
    alone = rng.randint(1, min(x, y) - 3)
    left = 1 - Fraction(alone, x)
    both = Fraction(1, x) + Fraction(1, y)
    steps = [
        f"把整个工程看作 1。甲每天做 1/{x}，乙每天做 1/{y}。",
        f"甲先独做 {alone} 天，完成 {Fraction(alone, x)}，还剩 {left}。",
        f"两队合作每天完成 1/{x} + 1/{y} = {both}。",
        f"还需要 {left} ÷ {both} = {left / both} 天，约 {float(left / both):.2f} 天。",
        f"乙做了全部工程的 {left / both} × 1/{y} = {left / both / y}，甲做了其余的 {1 - left / both / y}。",
    ]
    question = f"一项工程甲队单独做要 {x} 天，乙队单独做要 {y} 天。甲队先做 {alone} 天，余下的两队合作，还要几天完成？乙队做了全部的几分之几？"
    return Exercise(question, steps, f"还要 {left / both} 天，乙队做了 {left / both / y}")


def zh_sequence(rng: random.Random) -> Exercise:
    a, d, n = rng.randint(1, 20), rng.randint(2, 9), rng.randint(15, 60)
    k = rng.randint(n + 5, n + 60)
    total = n * (2 * a + (n - 1) * d) // 2
    steps = [
        f"由 a₁ = {a}，公差 d = {d}，通项为 aₙ = {a} + (n − 1) × {d} = {d}n + ({a - d})。",
        f"第 {k} 项：{d} × {k} + ({a - d}) = {a + (k - 1) * d}。",
        f"前 {n} 项和：Sₙ = n(a₁ + aₙ)/2 = {n} × ({a} + {a + (n - 1) * d}) ÷ 2 = {total}。",
        f"若某一项等于 {a + (k - 1) * d + 1}，则 {d}n = {a + (k - 1) * d + 1 - a + d}，"
        + ("n 不是整数，所以它不在数列中。" if d > 1 else ""),
    ]
    return Exercise(
        f"等差数列首项为 {a}，公差为 {d}。求第 {k} 项、前 {n} 项的和，并判断 {a + (k - 1) * d + 1} 是不是其中的一项。",
        steps,
        f"第 {k} 项为 {a + (k - 1) * d}，前 {n} 项和为 {total}，不是其中的项",
    )


ENGLISH: list[Callable[[random.Random], Exercise]] = [
    linear_system, quadratic, euclid, divisors, price_changes, urn, cubic, series, spread, power_mod, determinant, long_product, letters,
]  # fmt: skip
CHINESE: list[Callable[[random.Random], Exercise]] = [meeting, work_together, zh_sequence]

_OPENINGS = [
    "Let me go step by step.",
    "First what is given, then the calculation.",
    "I will write out every step.",
    "We need to be careful with signs here.",
    "",
]
_DOUBTS = [
    "Let me check that again.",
    "Does that make sense?",
    "So far so good.",
    "Wait, I should verify this step.",
    "",
]
_CLOSING = ["**{}**", "The answer: {}.", "So we get {}.", "Result: {}", "\\boxed{{{}}}"]


def turn(
    rng: random.Random, problem: Exercise, *, thinks: bool, chinese: bool
) -> list[dict[str, str]]:
    """A question and its reply: with the steps in the reply, or in a thought before a short one."""
    closing = "答案：{}。" if chinese else rng.choice(_CLOSING)
    final = closing.format(problem.answer)
    numbered = rng.random() < 0.4
    steps = [
        f"{number}. {step}" if numbered else step
        for number, step in enumerate(problem.steps, start=1)
    ]
    worked = "\n".join(steps)
    if not thinks:
        opening = "" if chinese else rng.choice(_OPENINGS)
        reply = "\n\n".join(part for part in (opening, worked, final) if part)
        return [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": reply},
        ]
    doubt = "再检查一遍，每一步都对得上。" if chinese else rng.choice(_DOUBTS)
    thought = "\n".join(
        part
        for part in ("" if chinese else rng.choice(_OPENINGS), "\n".join(problem.steps), doubt)
        if part
    )
    reply = f"{worked}\n\n{final}" if rng.random() < 0.5 else f"{problem.steps[-1]}\n\n{final}"
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "reasoning_content": thought, "content": reply},
    ]


def conversation(
    rng: random.Random, long_enough: Callable[[list[dict[str, str]]], bool], *, chinese: bool
) -> list[dict[str, str]]:
    """Problems of different families until it is long enough; in half of them the last one is thought about first."""
    families = rng.sample(CHINESE if chinese else ENGLISH, len(CHINESE if chinese else ENGLISH))
    messages: list[dict[str, str]] = []
    while not long_enough(messages):
        family = families.pop() if families else rng.choice(CHINESE if chinese else ENGLISH)
        messages += turn(rng, family(rng), thinks=False, chinese=chinese)
    if rng.random() < 0.5:
        messages += turn(
            rng, rng.choice(CHINESE if chinese else ENGLISH)(rng), thinks=True, chinese=chinese
        )
    return messages
