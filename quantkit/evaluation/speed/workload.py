"""What is asked of a target while it is measured: prompts, lengths, and when requests are sent.

Either `concurrency` users each send a request the moment their last one is answered (closed loop),
or requests arrive by themselves at a rate, with exponential times between them (Poisson, as `vllm
bench serve --request-rate`), at most `concurrency` at a time being open.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError


@dataclass(frozen=True)
class Workload:
    """`requests` random prompts of `input_len` tokens, or `prompts` in turn, with `output_len`
    tokens each; rate in requests/s or None."""

    input_len: int
    output_len: int
    requests: int
    concurrency: int
    seed: int = 0
    rate: float | None = None
    prompts: tuple[str, ...] = ()

    def warming(self, requests: int, seed: int) -> "Workload":
        """A few short requests of the same kind, as fast as they are answered."""
        return replace(
            self, output_len=min(self.output_len, 8), requests=requests, seed=seed, rate=None
        )

    def generator(self, run: str = "") -> random.Random:
        """Of its prompts and arrivals. By text: of a number Python's generator looks at the size
        alone, and -1 would be 1."""
        return random.Random(f"{run} {self.seed}")

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which requests arrive; all at once without a rate."""
        generator = self.generator()
        at = 0.0
        for _ in range(self.requests):
            yield at
            at += generator.expovariate(self.rate) if self.rate is not None else 0.0


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a .jsonl of {"prompt"}, {"text"} or {"messages"}, a .json like ShareGPT's,
    or a .txt with a prompt a line.

    Of a conversation it is the first message of the user. Raises QuantkitError where the file
    cannot be read or holds none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            records = json.loads(text)
        elif path.suffix == ".jsonl":
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            records = [line for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise QuantkitError(
            f"prompts {path} cannot be read ({error})",
            "give a .jsonl, a .json like ShareGPT's, or a .txt",
        ) from error
    found = [
        prompt
        for record in (records if isinstance(records, list) else [])
        if (prompt := _prompt(record))
    ]
    if not found:
        raise QuantkitError(
            f"prompts {path} holds none",
            'a line is {"prompt": ...}, {"text": ...}, {"messages": [...]} or {"conversations": '
            "[...]}",
        )
    return found


def _prompt(record: Any) -> str:
    if isinstance(record, str):
        return record.strip()
    if not isinstance(record, dict):
        return ""
    for name in ("prompt", "text", "question"):
        if isinstance(record.get(name), str):
            return str(record[name]).strip()
    for turns, role, said in (("messages", "role", "content"), ("conversations", "from", "value")):
        for turn in record.get(turns) or []:
            if (
                isinstance(turn, dict)
                and turn.get(role) in ("user", "human")
                and isinstance(turn.get(said), str)
            ):
                return str(turn[said]).strip()
    return ""
