"""Per-sequence state next to the paged cache: the last tokens of every running sequence (inputs of
short convolutions, keys of sliding windows, inputs of compressed KV), and the recurrent states of
linear attention.

Everything is kept twice, so that a pass can be computed again, as captures and retries do: it reads
one copy and writes the other, each with the number of tokens it is of. Place 0 is never allocated:
padding rows of a captured batch write there.

A prefix cache keeps copies of such states next to shared blocks (`StateCheckpoints`): whoever reads
the blocks needs the state after them.
"""

from collections.abc import Iterable, Mapping

import torch
from quantkit_kernels import DeltaStates, store_recent
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.executor.options import EngineOptions
from quantkit.models.delta_rule import DeltaNet

KeptTwice = tuple[Tensor, tuple[Tensor, ...]]
"""Number of tokens int64 [2, P] of each copy at each place, and tensors [2, P, ...]."""


class RotatingCache:
    """The last tokens of `places` sequences, each in a ring at its position modulo the ring's
    length. sizes: by buffer number, tokens that a new one reads, itself included, and values per
    token. ahead: tokens that can be rolled back; the ring is longer by as many, so a step writes
    drafts next to each other, and later tokens overwrite rejected ones. A decode step writes its
    tokens to the same places when it is computed again.
    """

    def __init__(
        self,
        sizes: Mapping[int, tuple[int, int]],
        ahead: int,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._rings = {
            number: torch.zeros(2, places + 1, reach + ahead, width, dtype=dtype, device=device)
            for number, (reach, width) in sizes.items()
        }
        self._ends = {
            number: torch.full((2, places + 1), -1, dtype=torch.int64, device=device)
            for number in sizes
        }
        self._device = device

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for held in (self._rings, self._ends) for one in held.values())

    @property
    def kept(self) -> list[KeptTwice]:
        return [(self._ends[number], (ring,)) for number, ring in self._rings.items()]

    def chunk(self, number: int, place: int, first: int, start: int, x: Tensor) -> Tensor:
        """Store x [T, W] of the tokens from `start` on of a sequence -> [n, W] of the tokens from
        `first` on, the earlier ones from the ring."""
        ring, ends, stop = self._rings[number], self._ends[number][:, place], start + len(x)
        current = ends == start
        which = torch.where(current.any(), current[1], ends[1] > ends[0]).long()
        length = ring.shape[2]
        tokens = torch.cat((ring[which, place, self._span(first, start) % length].to(x.dtype), x))
        last = self._span(max(first, stop - length), stop)
        ring[1 - which, place, last % length] = tokens[last - first].to(ring.dtype)
        ends[which], ends[1 - which] = start, stop
        return tokens

    def step(
        self, number: int, places: Tensor, positions: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Store x [B, W] of tokens at positions int64 [B] of the sequences at places [B]; rows of
        one sequence have rising positions -> all rings [S, W]; where each row's begins, int64 [B];
        and their length."""
        ring = self._rings[number]
        first = store_recent(x, ring, self._ends[number], places, positions)
        return ring.flatten(0, 2), first, ring.shape[2]

    def rows(self, number: int, places: Tensor, positions: Tensor, x: Tensor, reach: int) -> Tensor:
        """As `step` -> [B, reach, W]: of the tokens up to each."""
        ring, first, length = self.step(number, places, positions, x)
        at = positions[:, None] - torch.arange(reach - 1, -1, -1, device=self._device)
        return ring[first[:, None] + at % length].to(x.dtype)

    def _span(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._device)


def rotating_cache_bytes(
    sizes: Mapping[int, tuple[int, int]], ahead: int, places: int, itemsize: int
) -> int:
    """Size of a `RotatingCache`."""
    return (
        (places + 1)
        * 2
        * sum(8 + (reach + ahead) * width * itemsize for reach, width in sizes.values())
    )


class RecurrentStates:
    """Linear-attention states of `places` sequences. ranks: tensor-parallel ranks of the heads."""

    def __init__(
        self, net: DeltaNet, places: int, device: torch.device | str, ranks: int = 1
    ) -> None:
        room = (2, places + 1)
        self.layers = {
            number: DeltaStates(
                torch.zeros(*room, *recent, device=device),
                torch.zeros(*room, *memory, device=device),
                torch.full(room, -1, dtype=torch.int64, device=device),
            )
            for number, (recent, memory) in net.state_shapes(ranks).items()
        }

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for layer in self.layers.values() for one in layer)

    @property
    def kept(self) -> list[KeptTwice]:
        return [(one.tokens, (one.recent, one.memory)) for one in self.layers.values()]


class StateCheckpoints:
    """Copies of `count` states, each of a number of tokens that whoever asks for one knows. kept:
    of all layers. What an MTP layer has not read yet of them may cost a draft."""

    def __init__(self, kept: Iterable[KeptTwice], count: int) -> None:
        self._kept = [*kept]
        self._copies = [
            [one.new_zeros(count, *one.shape[2:]) for one in tensors] for _, tensors in self._kept
        ]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for copies in self._copies for one in copies)

    def save(self, slot: int, place: int, tokens: int) -> None:
        """Copy the state of the sequence at `place` after so many tokens, without waiting for the
        device."""
        for (counts, tensors), copies in zip(self._kept, self._copies):
            which = (counts[1, place] == tokens).long()[None]
            for one, copy in zip(tensors, copies):
                copy[slot] = one[:, place].index_select(0, which)[0]

    def restore(self, slot: int, place: int, tokens: int) -> None:
        """Begin a sequence at `place` with a state of so many tokens."""
        for (counts, tensors), copies in zip(self._kept, self._copies):
            counts[0, place], counts[1, place] = tokens, -1
            for one, copy in zip(tensors, copies):
                one[0, place] = copy[slot]


def check_recurrent_options(keeps: bool, can_roll_back: bool, options: EngineOptions) -> None:
    """Raises QuantkitError for options that layers with per-sequence state do not support. keeps:
    whether the model has some; can_roll_back: whether these can roll back rejected drafts."""
    drafters = {
        "--prompt-lookup": options.prompt_lookup,
        "--draft": options.draft,
        "--draft-length": options.draft is None and options.draft_length,
    }
    if (
        keeps
        and not can_roll_back
        and (given := " and ".join(name for name, value in drafters.items() if value))
    ):
        raise QuantkitError(
            f"{options.model_path} has recurrent layers, whose state cannot be rolled back after a "
            "rejected draft",
            f"run it without {given}",
        )


def recurrent_state_bytes(net: DeltaNet, places: int, ranks: int) -> int:
    """Size of `RecurrentStates` on one rank."""
    return (places + 1) * net.state_bytes(ranks)
