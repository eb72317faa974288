"""llama.cpp as cpu_decode.py measures it, in an environment of its own: llama-cpp-python.

OMP_NUM_THREADS=1 python benchmarks/cpu_llama.py FILE.gguf VOCABULARY RATE
"""

import json
import os
import sys

import llama_cpp
import numpy as np
from cpu_rates import CONCURRENCIES, CONTEXT, RATES, Rate


def measure_llama(path: str, vocab: int, rate: Rate) -> dict[int, float]:
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
