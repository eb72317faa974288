"""Host time of a step: microseconds of Python and of launching, at 64 users, by what their requests
ask for.

    python benchmarks/host_step.py [--users 64] [--steps 100] [--out FILE.json]

An engine with tiny-r1's tokenizer and vocabulary answers; in place of the model stand hidden states
and logits made once, so that what is left of a decode step is the host's: scheduling, tables,
sampling, grammars, texts, what requests ask of logits. Time is the process's own processor time,
which other work on the machine lengthens through caches: the least of the steps, told beside their
median, less so. Every answer is about 100 to 100 + steps tokens long while it is measured. Texts
that no stop string may end are read while the device computes: that time is told apart.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.hub import find_model
from quantkit.executor.engine import Engine
from quantkit.executor.runner.decode_batch import DecodeRows, StepResult
from quantkit.executor.sampling.grammar import json_schema
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, streamed": {"stop": ("never",)},
    "temperature, top-p, top-k": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "logit bias": {"logit_bias": tuple((token, 1.0) for token in range(20, 40))},
    "log-probabilities": {"logprobs": 5},
    "JSON schema": {"temperature": 0.8, "grammar": "schema"},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 400}},
    "required": ["a"],
}


GUESSES_OFF = "greedy, with an MTP layer that guesses nothing now"


class Stub:
    """Decode steps that compute nothing."""

    failure = ""

    def __init__(self, vocab: int, rows: int, rare: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden, self.logits = (
            torch.zeros(rows, 8),
            torch.randn(rows, vocab, generator=generator),
        )
        self.logits[:, rare] -= 30
        self.greedy = self.logits.argmax(-1)

    def run(self, rows: DecodeRows, *inputs: torch.Tensor) -> StepResult:
        count = len(rows.token_ids)
        return StepResult(self.hidden[:count], self.logits[:count], self.greedy[:count])


class TextReader:
    """Takes all running answers' texts, as a server does, and the time of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seconds = engine, 0.0
        engine.while_computing = self

    def __call__(self, brought: list[Sequence]) -> None:
        began = time.process_time()
        for sequence in self.engine.scheduler.running:
            sequence.take_text()
        self.seconds = time.process_time() - began


def microseconds(
    engine: Engine, users: int, steps: int, fields: dict[str, Any]
) -> dict[str, float]:
    """The median step's and the least without texts, and the median of those."""
    known = dict(fields)
    if "grammar" in known:
        known["grammar"] = json_schema(SCHEMA)
    for user in range(users):
        engine.submit(
            [20 + user % 50] * 8,
            SamplingParams(max_new_tokens=400, ignore_eos=True, seed=user, **known),
            user,
        )
    while sum(len(one.token_ids) for one in engine.scheduler.running) < 108 * users:
        engine.step()
    times, texts = [], TextReader(engine)
    for _ in range(steps):
        began = time.process_time()
        engine.step()
        times.append(((time.process_time() - began - texts.seconds) * 1e6, texts.seconds * 1e6))
    assert len(engine.scheduler.running) == users, "nobody has finished"
    for sequence in list(engine.scheduler.running):
        engine.cancel(sequence)
    steps_us, texts_us = zip(*times)
    return {
        "step": statistics.median(steps_us),
        "least": min(steps_us),
        "texts": statistics.median(texts_us),
    }


def loaded(users: int, draft_length: int = 0) -> Engine:
    engine = Engine.load(
        find_model("tiny-r1"),
        device="cpu",
        max_batch=users,
        max_model_len=512,
        draft_length=draft_length,
    )
    vocab, tokenizer = engine.loaded.config.vocab_size, engine.tokenizer.tokenizer
    # A fifth of this small vocabulary are bytes of characters of several, which texts have few of.
    stub: Any = Stub(
        vocab,
        users,
        [
            token
            for token in range(vocab)
            if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])
        ],
    )
    engine.runner.steps = stub
    engine.speculation.set_lengths(0, 0)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, found = loaded(options.users), {}
    for kind, fields in {**KINDS, GUESSES_OFF: {}}.items():
        engine = loaded(options.users, draft_length=1) if kind == GUESSES_OFF else plain
        found[kind] = one = microseconds(engine, options.users, options.steps, fields)
        told = f"{one['step']:.0f} us a step at {options.users} users, {one['least']:.0f} at least"
        print(f"{kind}: {told}, {one['texts']:.0f} us of texts beside the device", flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"users": options.users, "microseconds": found}, indent=1)
        )


if __name__ == "__main__":
    main()
