"""Calibration sequences: from quantkit's own text, a file, or a data set of the `datasets` library.

A document is one sequence, cut to seq_len: a model that never saw two documents in one context is
not shown two. A .txt is one document, cut into sequences of seq_len. Which documents are taken
depends on the seed alone. Documents that hold no two tokens are left out and others taken for them.
"""

import random
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.data_summary import Taken, oddities, shortened
from quantkit.calibrate.documents import ACCEPTED, Document, UnknownForm, read_document
from quantkit.calibrate.records import TEXTS, read_records, read_text
from quantkit.calibrate.templating import Encoder, Templating, plain
from quantkit.common.assets import calibration_text
from quantkit.common.errors import QuantkitError

OWN_TEXT = "quantkit's own text"
SHIPPED_TEXT = "calibration.jsonl"
"""What a model may have in its folder to be calibrated on."""
_OWN_FORMS = (
    "English, Chinese, code, mathematics, tables, tools, reasoning; --calibration takes yours",
)
_LOOKED_AT = 1000
"""Characters of a document that tell how well the tokenizer knows its script."""
_FOREIGN = 1.7
"""Tokens a byte, by the median of all documents. With vocabularies of large models Chinese has
about 0.8; one without it has 1.8 to 2.2."""


@dataclass(frozen=True)
class Sequences:
    """Token ids, int64 [length] each: `calibration` to fit on, `held_out` to judge on. taken: what
    they are."""

    calibration: list[Tensor]
    held_out: list[Tensor]
    taken: Taken | None = None


@dataclass
class _Drawn:
    """Sequences drawn so far, with the text of the first few, and what was met on the way."""

    sequences: list[Tensor]
    samples: list[str]
    records: int = 0
    empty: int = 0
    cut: int = 0

    def add(self, ids: list[int], text: str, seq_len: int) -> None:
        if len(ids) < 2:
            self.empty += 1
            return
        self.cut += len(ids) > seq_len
        self.sequences.append(torch.tensor(ids[:seq_len], dtype=torch.int64))
        if len(self.samples) < 3:
            self.samples.append(shortened(text, min(len(ids), seq_len)))


def load_sequences(
    source: str | None, encoder: Encoder, *, samples: int, held_out: int, seq_len: int, seed: int
) -> Sequences:
    """`samples` + `held_out` sequences of at most seq_len tokens, or all there are, split in that
    proportion.

    source: a file or the id of a data set; None is quantkit's own text. Raises QuantkitError where
    the source does not exist, has a record in no known form, or is too small to hold any out.
    """
    wanted = samples + held_out
    templating = Templating(encoder)
    own = source is None
    place = str(calibration_text()) if source is None else source
    forms: tuple[str, ...]
    if Path(place).suffix.casefold() in TEXTS:
        drawn, forms = _pieces(Path(place), encoder, wanted, seq_len, seed), ("plain text",)
    else:
        documents = _documents(place)
        random.Random(seed).shuffle(documents)
        if own:
            documents = _foreign_last(_kinds_in_turn(documents), encoder)
        drawn = _draw(documents, templating, wanted, seq_len)
        counted = {
            form: sum(one.form == form for _, one in documents)
            for form in {one.form for _, one in documents}
        }
        forms = tuple(sorted(counted, key=lambda form: (-counted[form], form)))
    found = drawn.sequences
    if len(found) < 2:
        empty = (
            f": {drawn.empty} of its {drawn.records} records hold no two tokens"
            if drawn.empty
            else ""
        )
        raise QuantkitError(
            f"calibration data {place} gives {len(found) or 'no'} sequence{empty}",
            "give at least two, better some hundred",
        )
    kept = len(found)
    judged = (
        max(1, min(held_out, kept * held_out // wanted if kept < wanted else held_out))
        if held_out
        else 0
    )
    fitted, judges = found[: kept - judged], found[kept - judged :]
    left = drawn.records - drawn.empty - kept
    warnings = oddities(
        found,
        wanted=wanted,
        seq_len=seq_len,
        unknown=getattr(encoder, "unknown_id", None),
        left=left,
    )
    if is_shipped(Path(place)):
        warnings = []  # who made the model chose how much of which text it takes
    if templating.simplified and not own:
        warnings.append(
            f"{templating.simplified} documents were simplified, since {templating.refusal}"
        )
    taken = Taken(
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
    return Sequences(fitted, judges, taken)


def is_shipped(text: Path) -> bool:
    """Whether the text lies in a model's folder as its own (`SHIPPED_TEXT`)."""
    return text.name == SHIPPED_TEXT and (text.parent / "config.json").exists()


def _pieces(path: Path, encoder: Encoder, wanted: int, seq_len: int, seed: int) -> _Drawn:
    """Sequences of one long text."""
    text = read_text(path)
    ids = torch.tensor(encoder.encode(text), dtype=torch.int64)
    sequences = [part for part in ids.split(seq_len) if len(part) > 1]
    random.Random(seed).shuffle(sequences)
    drawn = _Drawn(sequences[:wanted], [], records=len(sequences))
    drawn.samples.append(shortened(text, len(ids)))
    return drawn


def _documents(source: str) -> list[tuple[str, Document]]:
    """Every document with its place. Raises QuantkitError for the first record that is in no known
    form."""
    found = []
    for place, value in read_records(source):
        try:
            found.append((place, read_document(value)))
        except (UnknownForm, RecursionError) as error:
            raise QuantkitError(
                f"{place} is no document: {error}", f"give {ACCEPTED}, or remove it"
            ) from error
    return found


def _kinds_in_turn(documents: list[tuple[str, Document]]) -> list[tuple[str, Document]]:
    """One of each kind, then the next of each: a few documents hold something of everything,
    whatever there is most of."""
    met: Counter[str] = Counter()
    rounds = []
    for _, document in documents:
        rounds.append(met[document.kind])
        met[document.kind] += 1
    return [one for _, one in sorted(zip(rounds, documents), key=lambda pair: pair[0])]


def _foreign_last(
    documents: list[tuple[str, Document]], encoder: Encoder
) -> list[tuple[str, Document]]:
    """Those last whose script the tokenizer writes nearly byte by byte: the model hardly learned
    it, and nobody will use it there."""
    beginnings = [(document.text or plain(document))[:_LOOKED_AT] for _, document in documents]
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
        drawn.add(ids, text, seq_len)
    return drawn
