"""What linear attention keeps: for every running sequence a state of fixed size, beside the paged
cache.

Each state is held twice, with the number of tokens it is of. A pass reads the one of the tokens
before it and writes the other, so it may be computed again, as captures and retries do. Place 0
belongs to nobody: padding rows of a captured batch write there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.executor.options import EngineOptions
from quantkit.models.delta_rule import DeltaNet


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


def check_states(keeps: bool, takes_back: bool, options: EngineOptions) -> None:
    """Raises QuantkitError where options ask of layers with a state of each sequence what they
    cannot do. keeps: whether there are some;
    takes_back: whether tokens can be taken back from these."""
    told = f"{options.model_path} has layers whose state is of all the text before a token, which"
    if keeps and options.prefix_cache:
        raise QuantkitError(
            f"{told} requests cannot share block by block", "run it without --prefix-cache"
        )
    guesses = {"--prompt-lookup": options.num_looked_up, "--draft": options.draft}
    if (
        keeps
        and not takes_back
        and (asked := " and ".join(name for name, given in guesses.items() if given))
    ):
        raise QuantkitError(
            f"{told} cannot be taken back where a guess is wrong", f"run it without {asked}"
        )


def state_bytes(net: DeltaNet, places: int, ranks: int) -> int:
    """What `RecurrentStates` will hold on one rank."""
    return (places + 1) * net.held_bytes(ranks)
