"""Calibration sequences: a .txt, a .jsonl, or a data set of the `datasets` library.

A .jsonl record is {"text": ...} or {"messages": [...]}; messages go through the chat template. A record is one sequence, cut to
seq_len: a model that never saw two documents in one context is not shown two. A .txt is one document, cut into sequences of
seq_len. Which records are taken depends on the seed alone.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.errors import QuantkitError

Record = str | list[dict[str, Any]]
"""A text, or a conversation in OpenAI's form."""


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""

    def encode_chat(self, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation."""


@dataclass(frozen=True)
class Sequences:
    """Token ids, int64 [length] each: `calibration` to fit on, `held_out` to judge on."""

    calibration: list[Tensor]
    held_out: list[Tensor]


def load_sequences(source: str, encoder: Encoder, *, samples: int, held_out: int, seq_len: int, seed: int) -> Sequences:
    """`samples` + `held_out` sequences of at most seq_len tokens, or all there are, split in that proportion.

    Raises QuantkitError where the source does not exist, has no usable record, or is too small to hold any out.
    """
    wanted = samples + held_out
    if Path(source).suffix == ".txt":
        ids = torch.tensor(encoder.encode(_read_text(Path(source))), dtype=torch.int64)
        sequences = [part for part in ids.split(seq_len) if len(part) > 1]
        random.Random(seed).shuffle(sequences)
        sequences = sequences[:wanted]
    else:
        records = list(_records(source))
        random.Random(seed).shuffle(records)
        sequences = []
        for record in records:
            if len(sequences) == wanted:
                break
            ids = torch.tensor(_encode(encoder, record)[:seq_len], dtype=torch.int64)
            if len(ids) > 1:
                sequences.append(ids)
    if len(sequences) < 2:
        raise QuantkitError(f"calibration data {source} gives {len(sequences)} sequences", "give at least two, better some hundred")
    kept = len(sequences) if len(sequences) == wanted else max(2, len(sequences))
    judged = max(1, min(held_out, kept * held_out // wanted if kept < wanted else held_out)) if held_out else 0
    return Sequences(sequences[: kept - judged], sequences[kept - judged :])


def _encode(encoder: Encoder, record: Record) -> list[int]:
    if isinstance(record, str):
        return encoder.encode(record)
    return encoder.encode_chat(record, add_generation_prompt=False)


def _records(source: str) -> Iterator[Record]:
    if Path(source).suffix == ".jsonl":
        yield from _jsonl(Path(source))
    elif Path(source).suffix or Path(source).exists():
        raise QuantkitError(f"calibration data {source} is neither .txt nor .jsonl", "give one of these, or the id of a data set")
    else:
        yield from _dataset(source)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise QuantkitError(f"cannot read calibration data {path}: {error.strerror}", "give an existing .txt or .jsonl file") from error
    except UnicodeDecodeError as error:
        raise QuantkitError(f"calibration data {path} is not UTF-8 text", "save it as UTF-8") from error


def _jsonl(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _record(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise QuantkitError(
                f'{path} line {number} is not {{"text": ...}} or {{"messages": [...]}}', "correct or remove that line"
            ) from error


def _record(value: Any) -> Record:
    record = value.get("text", value.get("messages")) if isinstance(value, dict) else None
    if isinstance(record, str) and record:
        return record
    if isinstance(record, list) and record and all(isinstance(message, dict) for message in record):
        return record
    raise TypeError("neither text nor messages")


def _dataset(name: str) -> Iterator[Record]:
    """`id`, `id:split` or `id:config:split`."""
    try:
        import datasets
    except ImportError as error:
        raise QuantkitError(
            f"calibration data {name} is not a file, and the `datasets` library is not installed",
            "give a .txt or .jsonl file, or pip install quantkit[datasets]",
        ) from error
    identifier, *rest = name.split(":")
    split = rest[-1] if rest else "train"
    try:
        rows = datasets.load_dataset(identifier, rest[0] if len(rest) > 1 else None, split=split, streaming=True)
    except Exception as error:  # the library raises its own errors, and those of several network clients
        raise QuantkitError(f"data set {name} cannot be loaded: {error}", "check the name, or give a .txt or .jsonl file") from error
    for row in rows.take(20_000):
        try:
            yield _record(row)
        except TypeError as error:
            raise QuantkitError(f"data set {name} has neither a text nor a messages column", "choose another data set") from error
