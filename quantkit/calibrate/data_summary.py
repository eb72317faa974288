"""What was taken of the calibration data, for people to look at before hours of work: form,
samples, tokens, what was left out."""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

_SHOWN = 100
"""Characters of a sample."""


@dataclass(frozen=True)
class Taken:
    """source: a name for people. forms: forms of the documents, most frequent first. samples: the
    beginning of three documents.

    documents, held_out: sequences that are fitted, and that results are judged on; tokens,
    held_out_tokens: theirs. records: what the source holds, as far as it was read. empty: left out,
    since they hold no two tokens; cut: longer than seq_len. warnings: what is odd.
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

    def lines(self, *, samples: bool = True) -> list[str]:
        """One line in all, one for each sample, one for each warning."""
        of = f" of {self.records:,} read" if self.records > self.documents + self.held_out else ""
        told = (
            f"calibration: {self.source} ({', '.join(self.forms)}): {self.documents} "
            f"documents{of}, {self.tokens:,} tokens"
        )
        told += (
            f", and {self.held_out} held out, {self.held_out_tokens:,} tokens"
            if self.held_out
            else ", none held out"
        )
        told += f"; {self.empty} empty, {self.cut} cut to {self.seq_len} tokens"
        shown = [f"  sample: {text}" for text in self.samples] if samples else []
        return [told, *shown, *(f"warning: {warning}" for warning in self.warnings)]


def shortened(text: str, tokens: int) -> str:
    """The beginning of a document on one line."""
    line = " ".join(text[: 4 * _SHOWN].split())
    return f"{line if len(line) <= _SHOWN else line[: _SHOWN - 4] + ' ...'} ({tokens} tokens)"


def oddities(
    sequences: list[Tensor], *, wanted: int, seq_len: int, unknown: int | None, left: int = 0
) -> list[str]:
    """What an engineer would ask about. wanted: sequences that were asked for. unknown: id of the
    token for unknown text. left: records that were not needed."""
    found, lengths = [], [len(sequence) for sequence in sequences]
    different = Counter(tuple(sequence.tolist()) for sequence in sequences)
    if len(sequences) < wanted:
        found.append(
            f"{wanted} documents were asked for and {len(sequences)} are there: all are used"
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
