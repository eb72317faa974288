"""Calibration sequences from quantkit's own text, a file, or a data set of the `datasets` library.

A document is one sequence, cut to seq_len, so that a model never sees two documents in one context.
A .txt file is one document, cut into sequences of seq_len, each with BOS if the model has it. Which documents are used depends on the
seed alone. Documents of fewer than two tokens are skipped and replaced by others.
"""

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.documents import (
    ACCEPTED_FORMATS,
    TEXTS,
    Document,
    Templating,
    UnknownRecordFormat,
    plain_text,
    read_document,
    read_records,
)
from quantkit.common.assets import calibration_text
from quantkit.common.errors import QuantkitError
from quantkit.common.records import read_text
from quantkit.tokenizer.chat import ChatTokenizer

_SHOWN = 100
"""Characters of a sample."""


@dataclass(frozen=True)
class CalibrationSummary:
    """What is used of the calibration data. source: display name. forms: record formats, most
    frequent first. samples: the beginning of three documents.

    documents, held_out: sequences used for calibration and for evaluation; tokens, held_out_tokens:
    their tokens. records: records read from the source. empty: skipped, with fewer than two tokens;
    cut: longer than seq_len. warnings: anything unusual.
    """

    source: str
    forms: tuple[str, ...]
    records: int
    documents: int
    tokens: int
    held_out: int
    held_out_tokens: int
    empty: int
    cut: int
    seq_len: int
    samples: tuple[str, ...]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """A summary line, one line for each sample, one for each warning."""
        of = f" of {self.records:,} read" if self.records > self.documents + self.held_out else ""
        line = (
            f"calibration: {self.source} ({', '.join(self.forms)}): {self.documents} "
            f"documents{of}, {self.tokens:,} tokens"
        )
        line += (
            f", and {self.held_out} held out, {self.held_out_tokens:,} tokens"
            if self.held_out
            else ", none held out"
        )
        line += f"; {self.empty} empty, {self.cut} cut to {self.seq_len} tokens"
        shown = [f"  sample: {text}" for text in self.samples]
        return [line, *shown, *(f"warning: {warning}" for warning in self.warnings)]


def preview(text: str, tokens: int) -> str:
    """The beginning of a document on one line."""
    line = " ".join(text[: 4 * _SHOWN].split())
    return f"{line if len(line) <= _SHOWN else line[: _SHOWN - 4] + ' ...'} ({tokens} tokens)"


def data_warnings(
    sequences: list[Tensor],
    *,
    wanted: int,
    seq_len: int,
    unknown: int | None,
    left: int = 0,
    positions: int = 0,
) -> list[str]:
    """Warnings about the sequences. wanted: sequences requested. unknown: id of the unknown token.
    left: records not needed. positions: of the model, 0 if unknown."""
    found, lengths = [], [len(sequence) for sequence in sequences]
    if 0 < positions < max(lengths):
        found.append(
            f"the longest document has {max(lengths):,} tokens, and the model's "
            f"max_position_embeddings is {positions:,}: what it computes beyond is no sample of "
            f"its inputs; give --seq-len {positions}"
        )
    different = Counter(tuple(sequence.tolist()) for sequence in sequences)
    if len(sequences) < wanted:
        found.append(
            f"{wanted} documents were asked for and {len(sequences)} are there, "
            "those held out included: all are used"
        )
    if sum(lengths) < wanted * seq_len / 2:
        remedy = (
            f"raise --samples, {left:,} documents more are there"
            if left
            else "give more or longer documents"
        )
        found.append(
            f"{sum(lengths):,} tokens are fewer than half of the {wanted * seq_len:,} asked for: "
            f"{remedy}"
        )
    if len(different) <= len(sequences) / 2:
        share = different.most_common(1)[0][1]
        found.append(
            f"only {len(different)} of {len(sequences)} documents are different; one of them comes "
            f"{share} times"
        )
    if len(sequences) >= 8 and len(set(lengths)) == 1 and lengths[0] < seq_len:
        found.append(
            f"all documents have {lengths[0]} tokens: they may have been cut or filled up before"
        )
    if unknown is not None:
        share_unknown = sum(int((sequence == unknown).sum()) for sequence in sequences) / sum(
            lengths
        )
        if share_unknown > 0.1:
            found.append(
                f"{share_unknown:.0%} of the tokens are the one for unknown text: is it the "
                "model's language?"
            )
    return found


OWN_TEXT = "quantkit's own text"
BUILTIN = "builtin"
"""The value of --calibration for it, where a model ships a text or would write one."""
SHIPPED_TEXT = "calibration.jsonl"
"""Calibration data that a model may have in its folder."""
_SHORTEST = 8
"""The least --seq-len."""
WRITTEN = "written by the model"
"""The kind of such documents."""
_OWN_FORMS = (
    "English, Chinese, code, mathematics, tables, tools, reasoning; --calibration takes yours, or "
    "self: half of it is written by the model",
)
_LOOKED_AT = 1000
"""Characters of a document by which its tokens per byte are estimated."""
_FOREIGN = 1.7
"""Tokens per byte, relative to the median of all documents, above which a script is foreign to the
tokenizer. Large vocabularies have about 0.8 for Chinese; without Chinese, 1.8 to 2.2."""


@dataclass(frozen=True)
class Sequences:
    """Token ids, int64 [length] each: `calibration`, and `held_out` for evaluation. further: those
    that would be drawn next. written: numbers of those held out that the model wrote."""

    calibration: list[Tensor]
    held_out: list[Tensor]
    summary: CalibrationSummary | None = None
    further: Sequence[Tensor] = ()
    written: frozenset[int] = frozenset()


@dataclass
class _Drawn:
    """Sequences drawn so far, the text of the first few, counters, and the numbers of sequences
    that the model wrote."""

    sequences: list[Tensor]
    samples: list[str]
    records: int = 0
    empty: int = 0
    cut: int = 0
    written: set[int] = field(default_factory=set)

    def add(self, ids: list[int], text: str, seq_len: int, *, written: bool) -> None:
        if len(ids) < 2:
            self.empty += 1
            return
        self.cut += len(ids) > seq_len
        if written:
            self.written.add(len(self.sequences))
        self.sequences.append(torch.tensor(ids[:seq_len], dtype=torch.int64))
        if len(self.samples) < 3:
            self.samples.append(preview(text, min(len(ids), seq_len)))


def load_sequences(
    source: str | None,
    encoder: ChatTokenizer,
    *,
    samples: int,
    held_out: int,
    seq_len: int,
    seed: int,
    records: Sequence[Any] | None = None,
    further: int = 0,
    positions: int = 0,
) -> Sequences:
    """`samples` + `held_out` sequences of at most seq_len tokens, or all there are, split in that
    proportion, and up to `further` more.

    source: a file or the id of a data set; None for quantkit's own text. records: read elsewhere,
    which `source` then only names. positions: of the model, 0 if unknown. Raises QuantkitError if
    the source does not exist, has a record in no known format, or is too small to hold any out.
    """
    wanted = samples + held_out
    templating = Templating(encoder)
    own = source is None
    place = str(calibration_text()) if source is None else source
    forms: tuple[str, ...]
    is_one_text = records is None and Path(place).suffix.casefold() in TEXTS
    if is_one_text:
        drawn, forms = _split_text(Path(place), encoder, seq_len, seed), ("plain text",)
    else:
        numbered = ((f"record {number}", value) for number, value in enumerate(records or ()))
        documents = _documents(read_records(place) if records is None else numbered)
        random.Random(seed).shuffle(documents)
        if own:
            documents = _in_order(documents, encoder)
        drawn = _draw(documents, templating, wanted + further, seq_len)
        counted = {
            form: sum(one.form == form for _, one in documents)
            for form in {one.form for _, one in documents}
        }
        forms = tuple(sorted(counted, key=lambda form: (-counted[form], form)))
    found, others = drawn.sequences[:wanted], drawn.sequences[wanted:][:further]
    if len(found) < 2:
        empty = (
            f": {drawn.empty} of its {drawn.records} records hold no two tokens"
            if drawn.empty
            else ""
        )
        half = sum(map(len, found)) // 2
        raise QuantkitError(
            f"calibration data {place} gives {len(found) or 'no'} sequence{empty}",
            f"give a longer text, or --seq-len {half}"
            if is_one_text and half >= _SHORTEST
            else "give at least two, better some hundred",
        )
    kept = len(found)
    judged = (
        max(1, min(held_out, kept * held_out // wanted if kept < wanted else held_out))
        if held_out
        else 0
    )
    # The first documents of our own text are one of each kind; the last are all made by programs
    # from parts that other documents share, on which a quantized model looks better than it is.
    start = 0 if own else kept - judged
    judges, fitted = found[start : start + judged], found[:start] + found[start + judged :]
    left = drawn.records - drawn.empty - kept
    warnings = data_warnings(
        found,
        wanted=wanted,
        seq_len=seq_len,
        unknown=getattr(encoder, "unknown_id", None),
        left=left,
        positions=positions,
    )
    if is_shipped(Path(place)):
        warnings = []  # the model's author chose the amount of text
    if templating.simplified and not own:
        warnings.append(
            f"{templating.simplified} documents were simplified, since {templating.refusal}"
        )
    summary = CalibrationSummary(
        source=OWN_TEXT if own else place,
        forms=_OWN_FORMS if own else forms,
        records=drawn.records,
        documents=len(fitted),
        tokens=sum(map(len, fitted)),
        held_out=judged,
        held_out_tokens=sum(map(len, judges)),
        empty=drawn.empty,
        cut=drawn.cut,
        seq_len=seq_len,
        samples=() if own else tuple(drawn.samples),
        warnings=tuple(warnings),
    )
    written = frozenset(one for one in range(judged) if start + one in drawn.written)
    return Sequences(fitted, judges, summary, others, written)


def own_documents(encoder: ChatTokenizer, seed: int) -> list[Document]:
    """quantkit's own text, in the order in which documents are drawn from it."""
    documents = _documents(read_records(str(calibration_text())))
    random.Random(seed).shuffle(documents)
    return [document for _, document in _in_order(documents, encoder)]


def _in_order(
    documents: list[tuple[str, Document]], encoder: ChatTokenizer
) -> list[tuple[str, Document]]:
    return _foreign_scripts_last(_interleave_kinds(documents), encoder)


def is_shipped(text: Path) -> bool:
    """Whether the text is the one shipped in a model's folder (`SHIPPED_TEXT`)."""
    return text.name == SHIPPED_TEXT and (text.parent / "config.json").exists()


def _split_text(path: Path, encoder: ChatTokenizer, seq_len: int, seed: int) -> _Drawn:
    """Sequences of one long text."""
    text = read_text(path, "calibration data")
    sequences = split_text(encoder, text, seq_len)
    tokens = sum(map(len, sequences))
    random.Random(seed).shuffle(sequences)
    return _Drawn(sequences, [preview(text, tokens)], records=len(sequences))


def split_text(encoder: ChatTokenizer, text: str, length: int) -> list[Tensor]:
    """Token ids of a text in pieces of 2 to `length` tokens, int64. Each begins with the tokens that
    the model expects before a text, such as BOS: attention sinks on them."""
    ids, empty = encoder.encode(text), encoder.encode("")
    first = [one for one, other in takewhile(lambda pair: pair[0] == pair[1], zip(ids, empty))]
    if len(first) >= length - 1:
        raise QuantkitError(
            f"pieces of {length} tokens have no room after the {len(first)} that begin a text",
            "give a longer --seq-len",
        )
    begin, rest = (torch.tensor(part, dtype=torch.int64) for part in (first, ids[len(first) :]))
    pieces = (torch.cat((begin, part)) for part in rest.split(length - len(first)) if len(part))
    return [piece for piece in pieces if len(piece) > 1]


def _documents(records: Iterable[tuple[str, Any]]) -> list[tuple[str, Document]]:
    """Every document with its place. Raises QuantkitError for the first record in no known
    format."""
    found = []
    for place, value in records:
        try:
            found.append((place, read_document(value)))
        except (UnknownRecordFormat, RecursionError) as error:
            raise QuantkitError(
                f"{place} is not a document: {error}", f"give {ACCEPTED_FORMATS}, or remove it"
            ) from error
    return found


def _interleave_kinds(documents: list[tuple[str, Document]]) -> list[tuple[str, Document]]:
    """One of each kind, then the next of each, so that a few documents cover every kind whatever
    there is most of."""
    met: Counter[str] = Counter()
    rounds = []
    for _, document in documents:
        rounds.append(met[document.kind])
        met[document.kind] += 1
    return [one for _, one in sorted(zip(rounds, documents), key=lambda pair: pair[0])]


def _foreign_scripts_last(
    documents: list[tuple[str, Document]], encoder: ChatTokenizer
) -> list[tuple[str, Document]]:
    """Documents last whose script the tokenizer encodes nearly byte by byte: the model hardly
    learned it."""
    beginnings = [(document.text or plain_text(document))[:_LOOKED_AT] for _, document in documents]
    dense = [len(encoder.encode(text)) / len(text.encode()) for text in beginnings]
    foreign = [one > _FOREIGN * statistics.median(dense) for one in dense]
    return [
        one for wanted in (False, True) for one, last in zip(documents, foreign) if last == wanted
    ]


def _draw(
    documents: list[tuple[str, Document]], templating: Templating, wanted: int, seq_len: int
) -> _Drawn:
    drawn = _Drawn([], [], records=len(documents))
    for place, document in documents:
        if len(drawn.sequences) == wanted:
            break
        if document.is_empty:
            drawn.empty += 1
            continue
        try:
            text = templating.text(document)
            ids = templating.encode(document, text)
        except QuantkitError as error:
            raise QuantkitError(f"{place}: {error.problem}", error.remedy) from error
        drawn.add(ids, text, seq_len, written=document.kind == WRITTEN)
    return drawn
