"""Replies that `quantkit eval` stored, as texts to score: what a model wrote by itself, on any
machine and by any server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.distance.documents import Window
from quantkit.evaluation.distance.replies import MAX_LOST
from quantkit.evaluation.generators.generator import Prompt
from quantkit.evaluation.generators.local import encode_prompt
from quantkit.evaluation.results.stored import read_prompts, read_samples
from quantkit.evaluation.tasks.prompts import RAW
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.reasoning_tags import REASONING_TAGS


def read_replies(folder: Path, tokenizer: ChatTokenizer, limit: int | None) -> list[Window]:
    """Of every problem the first reply that is not empty, in the order of the run: its prompt is
    context, its own tokens are scored, those of a cut reply as far as they go. Further repeats are
    left out, so that intervals over documents are over problems.

    Reasoning that a server kept apart is put back between the model's tags; the token that ends a
    reply was not stored and is not scored. Raises QuantkitError where the folder has no replies, or
    more than MAX_LOST of their prompts have other numbers of tokens here than in the run.
    """
    prompts = {(row["task"], row["problem"]): row["prompt"] for row in _stored(folder, "prompts")}
    windows, replies, lost = list[Window](), 0, ""
    for key, row in _first_replies(_stored(folder, "samples")):
        if replies == limit:
            break
        if key not in prompts:
            raise QuantkitError(
                f"{folder} has a reply to {key[1]} of {key[0]} and no prompt of it",
                "give the --out folder of an evaluation, as quantkit wrote it",
            )
        replies += 1
        prompt = _prompt(prompts[key], bool(row.get("think_open")))
        ids, is_open = encode_prompt(tokenizer, prompt)
        counted = row.get("prompt_tokens") or len(ids)
        if counted != len(ids):
            lost = f"the prompt of {key[1]} had {counted} tokens and has {len(ids)} here"
            continue
        written = tokenizer.encode_rendered(_written(row, is_open, tokenizer))
        if written:
            windows.append(Window(torch.tensor(ids + written, dtype=torch.int64), len(ids)))
        else:
            lost = f"the reply to {key[1]} has no token here"
    if not replies:
        raise QuantkitError(f"{folder} has no reply with a text", "give the folder of another run")
    if len(windows) < (1 - MAX_LOST) * replies:
        raise QuantkitError(
            f"{replies - len(windows)} of {replies} replies in {folder} cannot be scored: {lost}",
            "give the replies of a model with the same tokenizer and chat template",
        )
    return windows


def _stored(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise QuantkitError(
            f"{folder} has no {path.name}",
            "give the --out folder of a finished evaluation, or a file with texts",
        )
    return read_prompts(path) if name == "prompts" else read_samples(path)


def _first_replies(
    rows: list[dict[str, Any]],
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """By task and problem."""
    seen = set[tuple[str, str]]()
    for row in rows:
        key = row["task"], row["problem"]
        if key not in seen and (row["text"] or row.get("reasoning")):
            seen.add(key)
            yield key, row


def _prompt(parts: list[dict[str, str]], think: bool) -> Prompt:
    """As `prompt_parts` stored it."""
    if parts[0]["role"] == RAW:
        return Prompt(text=parts[0]["content"])
    return Prompt(messages=tuple(parts), think=think)


def _written(row: dict[str, Any], is_open: bool, tokenizer: ChatTokenizer) -> str:
    """The reply as the model wrote it. is_open: the prompt ends inside the reasoning."""
    text, reasoning = str(row["text"]), row.get("reasoning")
    if reasoning is None:
        return text
    known = tokenizer.tokenizer.token_to_id
    tags = [pair for pair in REASONING_TAGS if None not in map(known, pair)]
    if not tags:
        raise QuantkitError(
            f"the server kept reasoning apart, and {tokenizer.path} has no tokens around it",
            "run eval again on a server without a reasoning parser",
        )
    opened, closed = tags[0]
    begun = reasoning if is_open else f"{opened}\n{reasoning}"
    is_cut = row.get("finish_reason") == "length" and not text
    return begun if is_cut else f"{begun.rstrip()}\n{closed}\n\n{text.lstrip()}"
