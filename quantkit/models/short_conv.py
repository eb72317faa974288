"""Short causal convolutions beside linears, channel by channel, whose output is added to their
input (openPangu-2.0 calls them MoME).

y[t] = x[t] + sum over i < K of w[K - 1 - i] x[t - i]; the first K - 1 tokens of a sequence pass as
they are. A token needs the K - 1 inputs before it, so these are kept of each running sequence.
Symbols: T tokens, C channels, K tokens that each sees, itself included.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

_FLOAT, _COUNT = 4, 8
"""Bytes of a value, and of a number of tokens."""


@dataclass(frozen=True)
class ShortConvolutions:
    """Two in each layer: over `whole` channels, that every rank has, and over `shared` ones, that
    ranks share out with the heads."""

    kernel: int
    whole: int
    shared: int
    num_layers: int

    def with_mtp_layers(self, drafts: int) -> "ShortConvolutions":
        """With MTP layers."""
        return replace(self, num_layers=self.num_layers + drafts)

    def window_shapes(self, ranks: int = 1) -> dict[int, tuple[int, int]]:
        """Of the last tokens of a running sequence on one rank, by `buffer_index`: how many, and the
        values of each, float32."""
        sizes = (self.whole, self.shared // ranks)
        return {number: (self.kernel, sizes[number % 2]) for number in range(2 * self.num_layers)}

    def attention_layer_places(self, num_layers: int) -> None:
        """All layers keep latents beside."""
        return None

    def state_bytes(self, ranks: int = 1) -> int:
        """Of one sequence over all layers on one rank: each token's twice, with the number of
        tokens that they are of."""
        return 2 * sum(
            _COUNT + _FLOAT * count * width for count, width in self.window_shapes(ranks).values()
        )


def buffer_index(layer: int, part: int) -> int:
    """Of a layer's convolution: part 0 is over what every rank has, part 1 over what ranks share
    out."""
    return 2 * layer + part


def short_convolve(x: Tensor, positions: Tensor, seen: Tensor, kernel: Tensor) -> Tensor:
    """Consecutive tokens of one sequence, x [T, C] at positions [T], by kernel float32 [C, K] ->
    [T, C]. seen float32 [n, C]: x, behind the K - 1 tokens before it as far as there are any."""
    padded = F.pad(seen, (0, 0, len(x) + kernel.shape[1] - 1 - len(seen), 0))
    made = F.conv1d(padded.t()[None], kernel[:, None], groups=padded.shape[1])[0].t()
    return _added(x, positions, made, kernel)


def short_convolve_step(x: Tensor, positions: Tensor, seen: Tensor, kernel: Tensor) -> Tensor:
    """Tokens of any sequences, x [B, C], each with those before it, seen float32 [B, K, C]: as
    `short_convolve`."""
    return _added(x, positions, (seen * kernel.t()).sum(1), kernel)


def _added(x: Tensor, positions: Tensor, made: Tensor, kernel: Tensor) -> Tensor:
    whole = (positions >= kernel.shape[1] - 1)[:, None]
    return (x.float() + made.where(whole, 0.0)).to(x.dtype)
