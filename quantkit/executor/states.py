"""What layers with linear attention keep: for every running sequence a state of fixed size, beside the paged cache.

Each state is held twice, with the number of tokens it is of. A pass reads the one of the tokens before it and writes the other, so it may
be computed again, as captures and retries do. Place 0 belongs to nobody: padding rows of a captured batch write there.
"""

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.executor.options import EngineOptions
from quantkit.models.delta_rule import DeltaNet, DeltaState


class RecurrentStates:
    """Of `places` sequences. ranks: that share the heads."""

    def __init__(self, net: DeltaNet, places: int, device: torch.device | str, ranks: int = 1) -> None:
        channels, heads = sum(net.segments) // ranks, net.value_heads // ranks
        self._order = {layer: number for number, layer in enumerate(sorted(net.layers))}
        shape = (len(self._order), 2, places + 1)
        self._recent = torch.zeros(*shape, net.kernel - 1, channels, device=device)
        self._memory = torch.zeros(*shape, heads, net.key_dim, net.value_dim, device=device)
        self._tokens = torch.full(shape, -1, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return sum(held.numel() * held.element_size() for held in (self._recent, self._memory, self._tokens))

    def read(self, layer: int, places: Tensor, tokens: Tensor) -> tuple[DeltaState, Tensor]:
        """The states at `places` int64 [B] after `tokens` int64 [B], zeros for 0; and which of the two each is, [B]."""
        number = self._order[layer]
        which = (self._tokens[number, 1, places] == tokens).long()
        begun = (tokens > 0).view(-1, 1, 1)
        recent, memory = self._recent[number][which, places], self._memory[number][which, places]
        return DeltaState(recent * begun, memory * begun[..., None]), which

    def write(self, layer: int, places: Tensor, tokens: Tensor, state: DeltaState, which: Tensor) -> None:
        """In place of the others: the states after `tokens`."""
        number, other = self._order[layer], 1 - which
        self._recent[number][other, places] = state.recent
        self._memory[number][other, places] = state.memory
        self._tokens[number][other, places] = tokens


def check_states(net: DeltaNet | None, options: EngineOptions) -> None:
    """Raises QuantkitError where options ask of such layers what they cannot do."""
    told = f"{options.model_path} has layers whose state is of all the text before a token, which"
    if net is not None and options.prefix_cache:
        raise QuantkitError(f"{told} requests cannot share block by block", "run it without --prefix-cache")
    if net is not None and options.num_looked_up:
        raise QuantkitError(f"{told} cannot be taken back where a guess is wrong", "run it without --prompt-lookup")


def state_bytes(net: DeltaNet | None, places: int, ranks: int) -> int:
    """What `RecurrentStates` will hold on one rank; 0 for a model without."""
    return 0 if net is None else (places + 1) * net.held_bytes(ranks)
