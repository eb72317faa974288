"""Whether two tokenizers mean the same by their ids, so that one model can read what another
writes."""

from pathlib import Path

from tokenizers import Tokenizer

from quantkit.common.errors import QuantkitError

_MOST_UNKNOWN = 0.01
"""Share of one's tokens that the other may lack: later releases of a family add some for tools and
reasoning."""


def check_same_ids(own: Tokenizer, other: Tokenizer, path: Path, other_path: Path) -> None:
    """own, other: of the models at `path` and `other_path`. Raises QuantkitError where an id is
    another token in the other, or one of them lacks much of what the other has."""
    ours, theirs = (
        {token_id: token for token, token_id in one.get_vocab(with_added_tokens=True).items()}
        for one in (own, other)
    )
    remedy = "bring a draft model of the same family, with the same tokenizer"
    both = ours.keys() & theirs.keys()
    differing = [token_id for token_id in both if ours[token_id] != theirs[token_id]]
    if differing:
        first = min(differing)
        told = (
            f"{other_path} has other tokens than {path}: {len(differing)} of {len(both)} ids "
            "differ, "
        )
        raise QuantkitError(
            f"{told}{first} is {theirs[first]!r:.60} there and {ours[first]!r:.60} here", remedy
        )
    most = max(len(ours), len(theirs))
    if most - len(both) > _MOST_UNKNOWN * most:
        raise QuantkitError(
            f"{other_path} has {len(theirs)} tokens, {path} has {len(ours)}, and {len(both)} are "
            "in both",
            remedy,
        )
