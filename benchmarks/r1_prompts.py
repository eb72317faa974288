"""Prompts of R1's shapes on a box, through an engine as a server has it: summed over ranks in 8
bits, and arriving while answers run.

r1_grid.py measures with it.
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from made_engine import led
from quantkit_kernels import CODES

from quantkit.executor.cache.cache import BLOCK_SIZE
from quantkit.executor.engine import Engine
from quantkit.executor.ranks.quantized_all_reduce import CodedSums
from quantkit.executor.runner.prefill_graphs import PrefillChunk
from quantkit.executor.sampling.params import SamplingParams

ROUNDS = 3
"""Prompts that are timed, after one that warms up."""
QUIET = 24
"""Steps without the prompt, before it comes."""


@torch.inference_mode()
def sum_rows(engine: Engine, lengths: list[int]) -> list[dict[str, Any]]:
    """Seconds of a prompt to its first token, by how its sums over ranks travel; all ranks compute
    it without messages between them."""
    rows = []
    for length in lengths:
        row: dict[str, Any] = {"tokens": length, "chunk": engine.scheduler.budget.prefill_only}
        for name, codes in ({"bf16": None} | CODES).items():
            engine.parallel.coded_sums = (
                None
                if codes is None
                else CodedSums(codes, engine.parallel.size, engine.scheduler.max_batch)
            )
            times = [
                _first_token(engine, length, engine.scheduler.budget.prefill_only)
                for _ in range(ROUNDS + 1)
            ]
            row[f"{name}_s"] = statistics.median(times[1:])
        engine.parallel.coded_sums = None
        rows.append(row)
    return rows


def _first_token(engine: Engine, length: int, chunk: int) -> float:
    """Of made-up ids, the same on every rank, in the cache's first blocks: nobody else may be
    running."""
    blocks = list(range(1, -(-length // BLOCK_SIZE) + 1))
    token_ids = [(7 * place) % engine.loaded.config.vocab_size for place in range(length)]
    engine.parallel.minimum(0)  # nobody begins before all do
    began = time.perf_counter()
    for start in range(0, length, chunk):
        hidden = engine.runner.prefill_runner.run(
            None, [PrefillChunk(token_ids[start : start + chunk], start, blocks)]
        )
    engine.runner.model.logits(hidden[-1:]).argmax(dim=-1).tolist()
    return time.perf_counter() - began


def beside_row(
    engine: Engine, answers: int, context: int, prompt: int, chunk: int | None
) -> dict[str, Any]:
    """While `answers` run at `context` tokens a prompt arrives: milliseconds between two tokens of
    an answer. Empty on ranks above 0.

    chunk: of its tokens computed beside a step of the answers; None: as the engine chose when it
    was loaded.
    """
    own = engine.scheduler.budget
    if chunk is not None:
        engine.scheduler.budget = replace(own, with_decodes=chunk)
    found = led(engine, lambda: _beside(engine, answers, context, prompt))
    row = {
        "with_decodes": engine.scheduler.budget.with_decodes,
        "mixed": engine.scheduler.budget.mixed,
        "own": chunk is None,
    }
    engine.scheduler.budget = own
    return {} if found is None else row | found


def _beside(engine: Engine, answers: int, context: int, prompt: int) -> dict[str, Any]:
    vocab = engine.loaded.config.vocab_size
    params = SamplingParams(max_new_tokens=engine.max_model_len - context, ignore_eos=True)
    running = [
        engine.submit([(i + 5 * place) % vocab for place in range(context)], params, i)
        for i in range(answers)
    ]
    while any(len(one.generated) < 4 for one in running):
        engine.step()
    quiet = [_gap(engine) for _ in range(QUIET)]
    late = engine.submit(
        [(3 * place) % vocab for place in range(prompt)],
        SamplingParams(max_new_tokens=1, ignore_eos=True),
        answers,
    )
    gaps = []
    while late.finish_reason is None:
        gaps.append(_gap(engine))
    gaps += [_gap(engine) for _ in range(4)]
    assert all(one.finish_reason is None for one in running), (
        "answers end before the prompt is read"
    )
    for one in running:
        engine.cancel(one)
    engine.step()  # tells the others
    return {
        "answers": answers,
        "context": context,
        "prompt": prompt,
        "quiet_gap_ms": statistics.median(quiet),
        "largest_gap_ms": max(gaps),
        "median_gap_ms": statistics.median(gaps),
        "ttft_s": late.first_token - late.arrival,
    }


def _gap(engine: Engine) -> float:
    """Every answer gets its next token in a step: milliseconds of one."""
    began = time.perf_counter()
    engine.step()
    return (time.perf_counter() - began) * 1e3
