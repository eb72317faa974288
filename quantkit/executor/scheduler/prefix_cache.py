"""Prefix cache: full blocks are shared by sequences that begin with the same tokens.

A block is identified by a digest of its tokens and of all tokens before them. Blocks stay findable
after their sequence ends, until they are needed for something else, the least recently used first.
Shared blocks are never written: a sequence continues in blocks of its own, and a block is published
only when all its tokens are computed.

Off by default, as published benchmarks are measured without. Output tokens are the same up to
rounding: what a decode step wrote is read where a prefill would recompute it. With an MTP layer,
the last entry of its own cache in a shared block was computed for another sequence's next token,
which may cost a draft and changes no output.
"""

import hashlib
from collections import OrderedDict

import numpy as np

from quantkit.executor.cache.cache import BlockAllocator
from quantkit.executor.scheduler.sequence import Sequence


class PrefixCachingAllocator(BlockAllocator):
    """An allocator of blocks that may be shared. Free blocks have no users, findable or not."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self._users: dict[int, int] = {}
        """Reference counts."""
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Findable blocks without users, the least recently used first."""

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._evictable)

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, (count, self.num_free)
        while super().num_free < count:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            super().give_back([block])
        taken = super().take(count)
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Release one use of each; the last blocks are evicted first, as a prefix is found from its
        beginning."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._digest_of:
                self._evictable[block] = None
            else:
                super().give_back([block])

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens, one use more of each; at least one token
        remains to be computed."""
        hits: list[int] = []
        for digest in self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size):
            block = self._block_of.get(digest)
            if block is None:
                break
            hits.append(block)
        for block in hits:
            self._evictable.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        return hits

    def publish(self, sequence: Sequence) -> None:
        """Make the sequence's full computed blocks findable. Of two blocks with the same tokens the
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
        digests = sequence.block_digests
        for index in range(len(digests), count):
            tokens = np.array(
                sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
            )
            digests.append(
                hashlib.sha256((digests[-1] if digests else b"") + tokens.tobytes()).digest()
            )
        return digests[:count]
