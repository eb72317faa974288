"""tiny-r1 on one and several ranks in float32: greedy tokens compared, and its own MTP layer's
acceptance and gain.

    python benchmarks/tiny_ranks.py [--tp 1,4] [--device cuda] [--dtype float32] [--draft-length
    1,2] [--count 16]

The trained model on questions of its own kind, greedy to the answers' ends for the tokens, 96
tokens each for the speed. Other ranks are started by the engine.
"""

import argparse
import time
from typing import Any

from quantkit.checkpoint.hub import find_model
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams


def load(options: argparse.Namespace, tp: int, draft_length: int) -> Engine:
    sizes = {"max_batch": 8, "max_model_len": 512, "draft_length": draft_length, "tp": tp}
    return Engine.load(find_model("tiny-r1"), device=options.device, dtype=options.dtype, **sizes)


def questions(engine: Engine, count: int) -> list[list[int]]:
    asked = [f"What is {17 * i % 89 + 11}+{29 * i % 97 + 3}?" for i in range(count)]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": one}]) for one in asked]


def measure(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Answers, and tokens a second at concurrency 1 and 8, the same tokens computed once before."""
    params = SamplingParams(max_new_tokens=256)
    answers = [
        done.token_ids
        for done in sorted(engine.generate(prompts, params), key=lambda done: done.index)
    ]
    accepted = engine.speculation.acceptance.rate
    found: dict[str, Any] = {"answers": answers, "acceptance": accepted}
    fixed = SamplingParams(max_new_tokens=96, ignore_eos=True)
    for users in (1, 8):
        for _ in range(2):
            began = time.perf_counter()
            done = list(engine.generate(prompts[:users], fixed))
            seconds = time.perf_counter() - began
        found[f"tokens_per_s_{users}"] = sum(len(one.token_ids) for one in done) / seconds
    found["why_eager"] = engine.runner.why_eager
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", default="1,4")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft-length", default="1")
    parser.add_argument("--count", type=int, default=16)
    options = parser.parse_args()
    first: list[list[int]] = []
    for tp in map(int, options.tp.split(",")):
        for draft_length in (0, *map(int, options.draft_length.split(","))):
            engine = load(options, tp, draft_length)
            found = measure(engine, questions(engine, options.count))
            engine.close()
            answers = found.pop("answers")
            first = first or answers
            same = sum(ours == theirs for ours, theirs in zip(answers, first))
            numbers = "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value!r}"
                for key, value in found.items()
            )
            print(
                f"tp {tp}, {draft_length} drafts: {same} of {len(first)} answers as the first's, "
                f"{numbers}",
                flush=True,
            )


if __name__ == "__main__":
    main()
