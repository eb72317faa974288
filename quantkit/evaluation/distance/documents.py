"""Texts to score, as token ids: one document per sequence, so that no context contains two
documents, and sliding windows over long ones."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.data import split_text
from quantkit.calibrate.documents import UnknownRecordFormat, plain_text, read_document
from quantkit.common.errors import QuantkitError
from quantkit.common.records import Row, holds_records, read_rows, read_text
from quantkit.tokenizer.chat import ChatTokenizer


@dataclass(frozen=True)
class Window:
    """ids: int64 [T]. Tokens from `first` on (1 <= first < T) are scored, each predicted from
    all before it; those before `first` are context."""

    ids: Tensor
    first: int = 1

    @property
    def scored(self) -> int:
        return len(self.ids) - self.first


def sliding_windows(document: Tensor, length: int, stride: int) -> Iterator[Window]:
    """Windows of `length` tokens, `stride` apart; each scores what no earlier one did, so every
    token but the first is scored once.

    This is the recipe of transformers' page on perplexity: a token is predicted from at least
    length - stride tokens. With a stride of `length` the first token of each window has no context
    and is not scored.
    """
    if not 0 < stride <= length:
        raise QuantkitError(
            f"a stride of {stride} does not fit windows of {length}",
            f"give --stride {length} or less, from 1 on",
        )
    done = 0
    for start in range(0, len(document), stride):
        end = min(start + length, len(document))
        first = max(1, done - start)
        if end - start > first:
            yield Window(document[start:end], first)
        done = end
        if end == len(document):
            return


def read_documents(
    path: Path, tokenizer: ChatTokenizer, *, seq_len: int, limit: int | None = None
) -> list[Tensor]:
    """int64 [T], 2 <= T <= seq_len each, in file order.

    A file of records (common/records.py) has one document a record, {"text": ...} or
    {"messages": [...]}, each truncated to seq_len; any other file is one text, split into pieces of
    seq_len, each with BOS if the model has it. Without a chat template a conversation becomes its
    text, as in calibration.
    Raises QuantkitError where the file cannot be read or has nothing to predict.
    """
    if holds_records(path) and path.is_file():
        rows = itertools.islice(read_rows(path), limit)
        documents = [_encode(place, row, tokenizer)[:seq_len] for place, row in rows]
    else:
        documents = split_text(tokenizer, read_text(path, "text"), seq_len)[:limit]
    documents = [document for document in documents if len(document) > 1]
    if not documents:
        raise QuantkitError(
            f"text {path} has nothing to predict", "give at least one document of two tokens"
        )
    return documents


def _encode(place: str, row: Row, tokenizer: ChatTokenizer) -> Tensor:
    text, messages = row.get("text"), row.get("messages")
    if not isinstance(text, str):
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise QuantkitError(
                f"{place} has neither text nor messages",
                'each line is {"text": ...} or {"messages": [...]}',
            )
        if tokenizer.templates:
            ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
            return torch.tensor(ids, dtype=torch.int64)
        try:
            text = plain_text(read_document({"messages": messages}))
        except UnknownRecordFormat as error:
            raise QuantkitError(
                f"{place} is not a conversation: {error}", "each message has a role and content"
            ) from error
    return torch.tensor(tokenizer.encode(text), dtype=torch.int64)
