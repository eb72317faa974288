"""The prefix cache: full blocks that several sequences share because they hold the same tokens
after the same tokens.

A block is known by a digest of its tokens and of everything before them. What a sequence computed
stays findable after it ends, until its blocks are needed for something else, the longest unused
first. Shared blocks are never written: a sequence goes on in blocks of its own, and a block is
published only when all its tokens are computed.

Off by default, for published benchmarks are measured without. Tokens are those computed without it,
up to rounding: what a decode step wrote is read where a prefill would compute it anew. With an MTP
layer the last entry of its own cache in a shared block was computed for another's next token, which
may cost a guess and changes no answer.
"""

import hashlib
from collections import OrderedDict

import numpy as np

from quantkit.executor.cache.cache import BlockAllocator
from quantkit.executor.scheduler.sequence import Sequence


class PrefixCachingAllocator(BlockAllocator):
    """An allocator whose blocks may be shared. Free are those that nobody uses, findable or not."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self._users: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Findable blocks without users, the longest unused first."""

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._unused)

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, (count, self.num_free)
        while super().num_free < count:
            block, _ = self._unused.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            super().give_back([block])
        taken = super().take(count)
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """One user less of each; of those without any the last are forgotten first, for a prefix is
        found from its beginning."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._digest_of:
                self._unused[block] = None
            else:
                super().give_back([block])

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens, with one user more; at least one token is
        left to compute."""
        found: list[int] = []
        for digest in self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size):
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._unused.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        return found

    def publish(self, sequence: Sequence) -> None:
        """Make the sequence's computed full blocks findable. Of two blocks with the same tokens the
        first stays."""
        full = sequence.num_cached // self.block_size
        for digest, block in zip(
            self._digests(sequence, full)[sequence.num_published_blocks :],
            sequence.blocks[sequence.num_published_blocks :],
        ):
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest
        sequence.num_published_blocks = full

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Of the sequence's first `count` blocks; computed once."""
        known = sequence.block_digests
        for index in range(len(known), count):
            tokens = np.array(
                sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
            )
            known.append(hashlib.sha256((known[-1] if known else b"") + tokens.tobytes()).digest())
        return known[:count]
