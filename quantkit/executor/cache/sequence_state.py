"""What some layers keep of the last tokens of every running sequence: a short convolution's inputs,
a window's keys, what makes entries.

A token lies in a ring, at its position modulo the ring's length. The ring is longer than what a new
token reads, by as many tokens as may
be guessed: so a step writes the tokens that it checks beside each other, and where a guess was
wrong the next one writes over it. There are
two rings of each: a chunk of a prompt reads one and writes the other, with the number of tokens
that it is of, so that it may be computed again; a step writes its tokens where they already stand
when it is computed again. Place 0 belongs to nobody: padding rows of a captured batch write there.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.executor.options import EngineOptions
from quantkit.models.delta_rule import DeltaNet


class RotatingCache:
    """Of `places` sequences. sizes: tokens that a new one reads, itself included, and values of
    each, by number. ahead: tokens that may be computed and taken back."""

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

    def chunk(self, number: int, place: int, first: int, start: int, x: Tensor) -> Tensor:
        """Keep x [T, W] of the tokens start .. of a sequence -> [n, W] of the tokens first .. , of
        which those before `start` are kept."""
        ring, ends, stop = self._rings[number], self._ends[number][:, place], start + len(x)
        there = ends == start
        which = torch.where(there.any(), there[1], ends[1] > ends[0]).long()
        length = ring.shape[2]
        seen = torch.cat((ring[which, place, self._span(first, start) % length].to(x.dtype), x))
        kept = self._span(max(first, stop - length), stop)
        ring[1 - which, place, kept % length] = seen[kept - first].to(ring.dtype)
        ends[which], ends[1 - which] = start, stop
        return seen

    def rows(self, number: int, places: Tensor, positions: Tensor, x: Tensor, reach: int) -> Tensor:
        """Keep x [B, W] of tokens at positions int64 [B] of the sequences at places [B]; rows of
        one sequence have rising positions -> [B, reach, W]: of the tokens up to each."""
        ring, ends = self._rings[number], self._ends[number]
        which, length = (ends[1, places] > ends[0, places]).long(), ring.shape[2]
        ring[which, places, positions % length] = x.to(ring.dtype)
        ends[which, places] = positions + 1
        ends[1 - which, places] = torch.full_like(
            positions, -1
        )  # not a number of the host's: a capture takes none
        at = positions[:, None] - torch.arange(reach - 1, -1, -1, device=self._device)
        return ring[which[:, None], places[:, None], at % length].to(x.dtype)

    def _span(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._device)


def rotating_cache_bytes(
    sizes: Mapping[int, tuple[int, int]], ahead: int, places: int, itemsize: int
) -> int:
    """What `RotatingCache` will hold."""
    return (
        (places + 1)
        * 2
        * sum(8 + (reach + ahead) * width * itemsize for reach, width in sizes.values())
    )


class RecurrentStates:
    """Of `places` sequences. ranks: that share the heads."""

    def __init__(
        self, net: DeltaNet, places: int, device: torch.device | str, ranks: int = 1
    ) -> None:
        shapes, room = net.state_shapes(ranks), (2, places + 1)
        self._held = {
            number: [torch.zeros(*room, *shape, device=device) for shape in own]
            for number, own in shapes.items()
        }
        self._tokens = {
            number: torch.full(room, -1, dtype=torch.int64, device=device) for number in shapes
        }

    @property
    def nbytes(self) -> int:
        return sum(
            one.nbytes
            for number, tokens in self._tokens.items()
            for one in (tokens, *self._held[number])
        )

    def read(self, number: int, places: Tensor, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
        """What is kept by this number at `places` int64 [B] after `tokens` int64 [B], zeros for 0;
        and which of the two each is, [B]."""
        which = (self._tokens[number][1, places] == tokens).long()
        begun = tokens > 0
        return [
            held[which, places] * begun.view(-1, *(1,) * (held.dim() - 2))
            for held in self._held[number]
        ], which

    def write(
        self, number: int, places: Tensor, tokens: Tensor, state: Sequence[Tensor], which: Tensor
    ) -> None:
        """In place of the others: what is kept after `tokens`."""
        other = 1 - which
        for held, one in zip(self._held[number], state):
            held[other, places] = one
        self._tokens[number][other, places] = tokens


def check_recurrent_options(keeps: bool, can_roll_back: bool, options: EngineOptions) -> None:
    """Raises QuantkitError where options ask of layers with a state of each sequence what they
    cannot do. keeps: whether there are some;
    can_roll_back: whether tokens can be taken back from these."""
    told = f"{options.model_path} has layers whose state is of all the text before a token, which"
    if keeps and options.prefix_cache:
        raise QuantkitError(
            f"{told} requests cannot share block by block", "run it without --prefix-cache"
        )
    guesses = {"--prompt-lookup": options.num_looked_up, "--draft": options.draft}
    if (
        keeps
        and not can_roll_back
        and (asked := " and ".join(name for name, given in guesses.items() if given))
    ):
        raise QuantkitError(
            f"{told} cannot be taken back where a guess is wrong", f"run it without {asked}"
        )


def recurrent_state_bytes(net: DeltaNet, places: int, ranks: int) -> int:
    """What `RecurrentStates` will hold on one rank."""
    return (places + 1) * net.state_bytes(ranks)
