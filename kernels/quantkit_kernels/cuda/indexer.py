"""The highest index scores of few tokens, and of long texts, in one launch. The scores are the
Triton backend's."""

from torch import Tensor

from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import checked, stream_of
from quantkit_kernels.indexer import IndexPages, TopTokens
from quantkit_kernels.triton import indexer

_FEW, _LONG = 128, 32768
"""Tokens, and scores of a token: of more tokens with fewer scores the Triton backend's programs,
one for each segment of a token's scores, keep the card as busy."""
_LONGEST = 1 << 18
"""Scores of a token that the shared memory of a cluster holds."""


def index_topk(
    q: Tensor, weights: Tensor, pages: IndexPages, positions: Tensor, topk: int
) -> TopTokens:
    """As `quantkit_kernels.index_topk`."""
    return indexer.index_topk(q, weights, pages, positions, topk, select_highest)


def select_highest(
    scores: Tensor, table: Tensor, positions: Tensor, page: int, found: TopTokens
) -> None:
    tokens, width = scores.shape
    if (tokens > _FEW and width <= _LONG) or width > _LONGEST:
        return indexer.select_highest(scores, table, positions, page, found)
    row = 0 if len(table) == 1 else table.shape[1]
    sizes = (tokens, width, table.element_size() // 4, row, page, found.slots.shape[1])
    pointers = [one.data_ptr() for one in (scores, table, positions.contiguous(), *found)]
    checked(library().qk_select_highest(*pointers, *sizes, stream_of(scores.device)))
