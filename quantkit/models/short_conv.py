"""Short causal convolutions beside linears, channel by channel, whose output is added to their input (openPangu-2.0 calls them MoME).

y[t] = x[t] + sum over i < K of w[K - 1 - i] x[t - i]; the first K - 1 tokens of a sequence pass as they are. A token needs the K - 1 inputs
before it, so these are kept of each running sequence. Symbols: T tokens, C channels, K tokens that each sees, itself included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.delta_rule import StateShapes, held_bytes


@dataclass(frozen=True)
class ShortConvolutions:
    """Two in each layer: over `whole` channels, that every rank has, and over `shared` ones, that ranks share out with the heads."""

    kernel: int
    whole: int
    shared: int
    key_heads: int
    num_layers: int

    def state_shapes(self, ranks: int = 1) -> StateShapes:
        """Of each convolution, by `number_of`."""
        sizes = (self.whole, self.shared // ranks)
        return {number: ((self.kernel - 1, sizes[number % 2]),) for number in range(2 * self.num_layers)}

    def places_of_others(self, num_layers: int) -> None:
        """All layers keep latents beside."""
        return None

    def held_bytes(self, ranks: int = 1) -> int:
        """Of one sequence over all layers on one rank: each state twice, with the number of tokens that it is of."""
        return held_bytes(self.state_shapes(ranks))


def number_of(layer: int, part: int) -> int:
    """Of a layer's convolution: part 0 is over what every rank has, part 1 over what ranks share out."""
    return 2 * layer + part


def convolved(x: Tensor, positions: Tensor, recent: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one sequence, x [T, C] at positions [T] behind recent float32 [K - 1, C], by kernel float32 [C, K]: -> [T, C],
    and the last K - 1 inputs."""
    padded = torch.cat((recent, x.float()))
    made = F.conv1d(padded.t()[None], kernel[:, None], groups=padded.shape[1])[0].t()
    return _added(x, positions, made, kernel), padded[len(x) :]


def convolved_step(x: Tensor, positions: Tensor, recent: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences, x [B, C] behind recent [B, K - 1, C]: as `convolved`."""
    padded = torch.cat((recent, x.float()[:, None]), dim=1)
    return _added(x, positions, (padded * kernel.t()).sum(1), kernel), padded[:, 1:]


def _added(x: Tensor, positions: Tensor, made: Tensor, kernel: Tensor) -> Tensor:
    whole = (positions >= kernel.shape[1] - 1)[:, None]
    return (x.float() + made.where(whole, 0.0)).to(x.dtype)
