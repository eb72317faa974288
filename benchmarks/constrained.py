"""What answers held to a grammar cost: tiny-r1 on a CPU, by users, with guesses and without.

    python benchmarks/constrained.py [--users 32] [--tokens 96] [--rounds 3] [--out FILE.json]

Every user's answer has so many tokens: free, or by a JSON schema whose arrays are long enough. Time
is the processor's of the whole process, the threads that write masks included: with a processor to
spare these cost nothing. Kinds take turns; medians, and ratios to the free answers.
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
from quantkit.executor.sampling.grammar import json_schema
from quantkit.executor.sampling.params import SamplingParams

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SCHEMA = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": ITEM, "minItems": 200}},
    "required": ["people"],
}


def seconds(engine: Engine, users: int, tokens: int, grammar: str | None) -> float:
    prompts = [[20 + user % 50] * 8 for user in range(users)]
    asked = [
        SamplingParams(
            max_new_tokens=tokens, temperature=0.8, seed=user, grammar=grammar, ignore_eos=True
        )
        for user in range(users)
    ]
    began = time.process_time()
    done = list(engine.generate(prompts, asked))
    took = time.process_time() - began
    assert all(len(one.token_ids) == tokens for one in done), "an answer ended early"
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    schema = json_schema(SCHEMA)
    report: dict[str, Any] = {"users": options.users, "tokens": options.tokens, "rows": []}
    for drafts in (0, 2):
        engine = Engine.load(
            find_model("tiny-r1"),
            device="cpu",
            max_batch=options.users,
            max_model_len=256,
            draft_length=drafts,
        )
        seconds(engine, options.users, 4, schema)
        rounds = [
            [seconds(engine, options.users, options.tokens, one) for one in (None, schema)]
            for _ in range(options.rounds)
        ]
        free, held = (statistics.median(times) for times in zip(*rounds))
        ratio = statistics.median(with_it / without for without, with_it in rounds)
        row = {
            "drafts": drafts,
            "free_ms_a_step": free / options.tokens * 1e3,
            "held_ms_a_step": held / options.tokens * 1e3,
            "ratio": ratio,
        }
        report["rows"].append(row)
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
