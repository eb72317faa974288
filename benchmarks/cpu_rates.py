"""What cpu_decode.py measures of every engine: prompts, and rates by processor time. As a script, of
llama.cpp, in an environment of its own with llama-cpp-python:

    OMP_NUM_THREADS=1 python benchmarks/cpu_rates.py FILE.gguf VOCABULARY RATE
"""

import json
import os
import random
import sys
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


def measure_llama(path: str, vocab: int, rate: Rate) -> dict[int, float]:
    import llama_cpp  # of the peer's environment alone
    import numpy as np

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    chosen = llama_cpp.llama_context_default_params()
    chosen.n_ctx, chosen.n_seq_max = max(CONCURRENCIES) * CONTEXT, max(CONCURRENCIES)
    chosen.n_threads = chosen.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
    context = llama_cpp.llama_init_from_model(model, chosen)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(chosen.n_batch, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest tokens after those rows (token, position, sequence) that ask for it."""
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = len(rows)
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama.cpp did not decode a batch")
        logits = [
            llama_cpp.llama_get_logits_ith(context, i) for i, row in enumerate(rows) if row[3]
        ]
        return [int(np.ctypeslib.as_array(one, (vocab,)).argmax()) for one in logits]

    def generate(asked: list[list[int]], length: int) -> None:
        llama_cpp.llama_memory_clear(memory, True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(asked)
            for position, token in enumerate(prompt)
        ]
        last = [
            token
            for first in range(0, len(rows), chosen.n_batch)
            for token in decode(rows[first : first + chosen.n_batch])
        ]
        for step in range(length - 1):
            last = decode(
                [
                    (token, len(asked[sequence]) + step, sequence, True)
                    for sequence, token in enumerate(last)
                ]
            )

    return rate(generate, vocab)


if __name__ == "__main__":
    answer, sys.stdout = sys.stdout, sys.stderr  # llama.cpp prints; the answer must be alone
    print(json.dumps(measure_llama(sys.argv[1], int(sys.argv[2]), RATES[sys.argv[3]])), file=answer)
