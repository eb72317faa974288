"""How many guesses of tiny-r1's MTP layer are right, by scheme and in the source.

    python benchmarks/acceptance.py [--schemes awq-w4a16,fp4-w4a16,...] [--count 200] [--drafts 3]
    [--looked-up 8] [--out FILE.json]

Each checkpoint answers the same questions of the model's own kind, greedily to the answers' ends:
with one guess a step, with several, and with looked up ones alone. Reported are the share of
guesses kept and the tokens that a step brings to an answer, its own included. The standard error
counts guesses as if they were independent.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quantkit.checkpoint.hub import find_model
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams


def measure(path: Path, count: int, options: dict[str, int]) -> dict[str, Any]:
    engine = Engine.load(path, max_batch=32, max_model_len=512, **options)
    asked = [f"What is {17 * i % 889 + 11}+{29 * i % 997 + 3}?" for i in range(count)]
    prompts = [engine.tokenizer.encode_chat([{"role": "user", "content": one}]) for one in asked]
    tokens = sum(
        len(done.token_ids) for done in engine.generate(prompts, SamplingParams(max_new_tokens=256))
    )
    found = engine.speculation.acceptance
    steps = tokens - found.accepted
    return {
        "guesses": found.drafted,
        "kept": found.rate,
        "standard_error": (found.rate * (1 - found.rate) / max(found.drafted, 1)) ** 0.5,
        "tokens_a_step": tokens / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", default="awq-w4a16,fp4-w4a16,int8-a8w8c16,rtn-w4a16")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--looked-up", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = {
        "one": {"draft_length": 1},
        "several": {"draft_length": options.drafts},
        "looked up": {"prompt_lookup": options.looked_up},
    }
    report: dict[str, Any] = {
        "count": options.count,
        "drafts": options.drafts,
        "looked_up": options.looked_up,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for scheme in ("source", *options.schemes.split(",")):
            path = find_model("tiny-r1")
            if scheme != "source":
                path = Path(folder) / scheme
                make = [
                    sys.executable,
                    "-m",
                    "quantkit",
                    "quantize",
                    "tiny-r1",
                    "--scheme",
                    scheme,
                    "--out",
                    str(path),
                ]
                subprocess.run(make, check=True, capture_output=True)
            for kind, given in kinds.items():
                row = {"scheme": scheme, "kind": kind} | measure(path, options.count, given)
                report["rows"].append(row)
                print(
                    "  ".join(
                        f"{key} {round(value, 4) if isinstance(value, float) else value}"
                        for key, value in row.items()
                    ),
                    flush=True,
                )
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
