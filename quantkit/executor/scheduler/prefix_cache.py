"""Prefix cache: full blocks are shared by sequences that begin with the same tokens.

A block is identified by a digest of its tokens and of all tokens before them. Blocks stay findable
after their sequence ends, until they are needed for something else, the least recently used first.
Shared blocks are never written: a sequence continues in blocks of its own, and a block is published
only when all its tokens are computed.

Off by default, as published benchmarks are measured without. Output tokens are the same up to
rounding: what a decode step wrote is read where a prefill would recompute it. With an MTP layer,
the last entry of its own cache in a shared block was computed for another sequence's next token,
which may cost a draft and changes no output.

Where layers keep a state of each sequence, a prefix is found as far as there is a checkpoint of the
state after it (`StateCheckpoints`), which a chunk leaves that ends there. Chunks end at borders of
blocks anyway where prompts take several; they also end where a text parts from one that was seen
before, as a system prompt does (Marconi, arXiv 2411.19379), and at the last border of a prompt, as a
conversation goes on there. Such an end costs a pass, so checkpoints have some blocks between them.
"""

import hashlib
from collections import Counter, OrderedDict

import numpy as np

from quantkit.executor.cache.cache import BlockAllocator
from quantkit.executor.scheduler.sequence import Sequence

MIN_BLOCKS = 2
"""Blocks that a checkpoint saves, compared with the one before it, to be worth a pass."""


class CheckpointSlots:
    """Which prefixes, by their digests, have a checkpoint in which of `count` slots. The least
    recently used makes way."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def use(self, digest: bytes) -> int:
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest]

    def take(self, digest: bytes, *, first_to_go: bool) -> int | None:
        """A slot to be written; None if the prefix has one."""
        if digest in self._slot_of:
            return None
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._slot_of[digest] = slot
        self._slot_of.move_to_end(digest, last=not first_to_go)
        return slot

    def forget(self, digest: bytes) -> None:
        if digest in self._slot_of:
            self._free.append(self._slot_of.pop(digest))


class PrefixCachingAllocator(BlockAllocator):
    """An allocator of blocks that may be shared. Free blocks have no users, findable or not.
    checkpoints: of states, 0 for models without."""

    def __init__(self, num_blocks: int, block_size: int, checkpoints: int = 0) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self._checkpoints = CheckpointSlots(checkpoints) if checkpoints else None
        self._users: dict[int, int] = {}
        """Reference counts."""
        self._block_of: dict[bytes, int] = {}
        self._digests_of: dict[int, tuple[bytes, bytes]] = {}
        """Of a findable block, and of the block before it."""
        self._num_next: Counter[bytes] = Counter()
        """Findable blocks that follow one, where any do."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Findable blocks without users, the least recently used first."""

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._evictable)

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, (count, self.num_free)
        while super().num_free < count:
            block, _ = self._evictable.popitem(last=False)
            digest, before = self._digests_of.pop(block)
            del self._block_of[digest]
            self._num_next[before] -= 1
            if not self._num_next[before]:
                del self._num_next[before]
            if self._checkpoints is not None:
                self._checkpoints.forget(digest)
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
            if block in self._digests_of:
                self._evictable[block] = None
            else:
                super().give_back([block])

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens, one use more of each; at least one token
        remains to be computed. Where layers keep states, as far as there is a checkpoint."""
        hits = self._findable(sequence)
        if self._checkpoints is not None:
            while hits and sequence.block_digests[len(hits) - 1] not in self._checkpoints:
                hits.pop()
        for block in hits:
            self._evictable.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        return hits

    def admit(self, sequence: Sequence) -> int | None:
        """The slot of the state that a sequence begins with, if it found one. Also chooses where
        its chunks end so that states can be kept."""
        if self._checkpoints is None:
            return None
        found = sequence.num_cached // self.block_size
        sequence.num_checkpointed, sequence.borders = sequence.num_cached, []
        last, border = (len(sequence.token_ids) - 1) // self.block_size, found
        digests, parting = self._digests(sequence, last), len(self._findable(sequence))
        parts = parting > 0 and digests[parting - 1] in self._num_next
        for end in (parting, last) if parts else (last,):
            if end - border >= MIN_BLOCKS and digests[end - 1] not in self._checkpoints:
                sequence.borders.append(end * self.block_size)
                border = end
        return self._checkpoints.use(digests[found - 1]) if found else None

    def cut(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` tokens to compute, so that the chunk ends where a state can
        be kept, if possible."""
        if self._checkpoints is None:
            return count
        start = sequence.num_cached
        end = min([start + count, *sequence.borders])
        border = end - end % self.block_size
        return (end if border <= start or end == len(sequence.token_ids) else border) - start

    def keep_state(self, sequence: Sequence) -> int | None:
        """A slot for the state after the sequence's computed and published tokens, if it is to be
        kept. Of ends that were not chosen, a new one replaces the last."""
        tokens, size = sequence.num_cached, self.block_size
        if self._checkpoints is None or (sequence.num_new == 1 and not sequence.borders):
            return None
        chosen = sequence.borders[:1] == [tokens]
        if chosen:
            sequence.borders.pop(0)
        elif tokens % size or tokens - sequence.num_checkpointed < MIN_BLOCKS * size:
            return None
        sequence.num_checkpointed = tokens
        digest = sequence.block_digests[tokens // size - 1]
        return self._checkpoints.take(digest, first_to_go=not chosen)

    def publish(self, sequence: Sequence) -> None:
        """Make the sequence's full computed blocks findable. Of two blocks with the same tokens the
        first stays."""
        full = sequence.num_cached // self.block_size
        digests = self._digests(sequence, full)
        for number in range(sequence.num_published_blocks, full):
            digest, block = digests[number], sequence.blocks[number]
            if digest not in self._block_of:
                before = digests[number - 1] if number else b""
                self._block_of[digest] = block
                self._digests_of[block] = digest, before
                self._num_next[before] += 1
        sequence.num_published_blocks = full

    def _findable(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens, but its last one."""
        blocks: list[int] = []
        for digest in self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size):
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

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
