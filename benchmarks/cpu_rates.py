"""What cpu_decode.py measures of every engine: prompts, and rates by processor time. Needs nothing
beyond Python, so that an engine's own environment runs it."""

import random
import time
from collections.abc import Callable
from functools import partial

INPUT, OUTPUT, PROMPT = 32, 16, 1024
CONTEXT = PROMPT + OUTPUT
CONCURRENCIES = (1, 8)

Generate = Callable[[list[list[int]], int], object]
"""Continues prompts by so many tokens."""


def prompts(count: int, vocab: int, length: int = INPUT) -> list[list[int]]:
    drawn = random.Random(count)
    return [[drawn.randrange(2, vocab) for _ in range(length)] for _ in range(count)]


def prompt_rate(
    generate: Generate, vocab: int, counts: tuple[int, ...] = CONCURRENCIES
) -> dict[int, float]:
    """Prompt tokens per second by concurrency."""
    found = {}
    generate(prompts(1, vocab, PROMPT // 2), 1)
    for count in counts:
        asked, began = prompts(count, vocab, PROMPT), time.process_time()
        generate(asked, 1)
        found[count] = count * PROMPT / (time.process_time() - began)
    return found


def decoding_rate(generate: Generate, vocab: int) -> dict[int, float]:
    """Tokens per second by concurrency."""
    found = {}
    for count in CONCURRENCIES:
        asked, seconds = prompts(count, vocab), {}
        for length in (4, 1, OUTPUT):  # the first warms up
            began = time.process_time()
            generate(asked, length)
            seconds[length] = time.process_time() - began
        found[count] = count * (OUTPUT - 1) / (seconds[OUTPUT] - seconds[1])
    return found


Rate = Callable[[Generate, int], dict[int, float]]
RATES: dict[str, Rate] = {
    "decode": decoding_rate,
    "prompts": prompt_rate,
    "one prompt": partial(prompt_rate, counts=(1,)),
}
