"""Short causal depthwise convolutions whose output is added to their input (openPangu-2.0 calls
them MoME).

y[t] = x[t] + sum over i < K of w[K - 1 - i] x[t - i]; the first K - 1 tokens of a sequence are
unchanged. A token needs the K - 1 inputs before it, which are kept for each running sequence.
Symbols: T tokens, C channels, K kernel width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

Shifted = Callable[[int], Tensor]
"""Number of tokens -> what each token's sequence has so many before it, [T, C]; zeros where it has
no such token."""

_FLOAT, _COUNT = 4, 8
"""Bytes of a value, and of a token count."""


@dataclass(frozen=True)
class ShortConvolutions:
    """Two per layer: over `whole` channels, replicated on every rank, and over `shared` channels,
    split over the ranks with the heads."""

    kernel: int
    whole: int
    shared: int
    num_layers: int

    def with_mtp_layers(self, drafts: int) -> "ShortConvolutions":
        """Including MTP layers."""
        return replace(self, num_layers=self.num_layers + drafts)

    def window_shapes(self, ranks: int = 1) -> dict[int, tuple[int, int]]:
        """Buffers of the last tokens of a running sequence on one rank, by `buffer_index`: number
        of tokens and float32 values per token."""
        sizes = (self.whole, self.shared // ranks)
        return {number: (self.kernel, sizes[number % 2]) for number in range(2 * self.num_layers)}

    def attention_layer_places(self, num_layers: int) -> None:
        """None: all layers cache latents, too."""
        return None

    def state_bytes(self, ranks: int = 1) -> int:
        """Bytes of one sequence over all layers on one rank: each token twice, with the number of
        tokens that it covers."""
        return 2 * sum(
            _COUNT + _FLOAT * count * width for count, width in self.window_shapes(ranks).values()
        )


def buffer_index(layer: int, part: int) -> int:
    """Index of a layer's convolution: part 0 is replicated, part 1 split over the ranks."""
    return 2 * layer + part


def short_convolve(x: Tensor, positions: Tensor, seen: Tensor, kernel: Tensor) -> Tensor:
    """Consecutive tokens of one sequence, x [T, C] at positions [T], by kernel float32 [C, K] ->
    [T, C]. seen float32 [n, C]: up to K - 1 tokens before them, then x."""
    padded = F.pad(seen, (0, 0, len(x) + kernel.shape[1] - 1 - len(seen), 0))
    convolution = F.conv1d(padded.t()[None], kernel[:, None], groups=padded.shape[1])[0].t()
    return _add(x, positions, convolution, kernel)


def short_convolve_step(x: Tensor, positions: Tensor, seen: Tensor, kernel: Tensor) -> Tensor:
    """One token of each sequence, x [B, C], with the tokens before it, seen float32 [B, K, C]: as
    `short_convolve`."""
    return _add(x, positions, (seen * kernel.t()).sum(1), kernel)


def _add(x: Tensor, positions: Tensor, convolution: Tensor, kernel: Tensor) -> Tensor:
    whole = (positions >= kernel.shape[1] - 1)[:, None]
    return (x.float() + convolution.where(whole, 0.0)).to(x.dtype)


def shifted_sequences(padded: Sequence[Tensor], reach: int) -> Shifted:
    """Of the tokens of sequences, [reach - 1 + t, C] each: t tokens after the `reach - 1` before
    them, zeros before the first token."""

    def before(steps: int) -> Tensor:
        own = [one[reach - 1 - steps : len(one) - steps] for one in padded]
        return own[0] if len(own) == 1 else torch.cat(own)

    return before


def shifted_rows(seen: Tensor, positions: Tensor) -> Shifted:
    """Of one token of each sequence at positions int64 [B], with the tokens up to it, [B, reach,
    C]."""

    def before(steps: int) -> Tensor:
        return seen[:, -1 - steps].where((positions >= steps)[:, None], 0.0)

    return before
