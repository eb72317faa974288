"""Sizes of linear attention by a gated delta rule (quantkit_kernels/delta.py), as in Qwen3-Next: a
state per sequence instead of keys and values."""

import math
from dataclasses import dataclass

from quantkit_kernels.delta import CHUNK

StateShapes = dict[int, tuple[tuple[int, ...], ...]]
"""The float32 state of a sequence on one rank: shapes of the tensors that are read and written
together, by number."""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the linear attention. Adjacent value heads share a key head. kernel: width of the
    convolution. layers: those with linear attention. joined: one linear computes queries, keys,
    values and gates, key head after key head, and another one the rest; otherwise there is one
    linear for queries, keys and values, and one for each of the others. lower, sigmoid:
    as of `DeltaWeights`. full_gate: of those, whether the output's gate is one linear, not the product of
    two narrow ones."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layers: frozenset[int]
    joined: bool = True
    lower: float = 0.0
    full_gate: bool = False
    sigmoid: bool = False

    @property
    def segments(self) -> tuple[int, int, int]:
        """Channels of the convolution: queries, keys, values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def attention_layer_places(self, num_layers: int) -> dict[int, int]:
        """Layers with ordinary attention -> their index among these."""
        return {
            layer: number for number, layer in enumerate(sorted({*range(num_layers)} - self.layers))
        }

    def state_shapes(self, ranks: int = 1) -> StateShapes:
        """For each layer: the inputs of the convolution, and the state."""
        recent = (self.kernel - 1, sum(self.segments) // ranks)
        return dict.fromkeys(
            sorted(self.layers), (recent, (self.value_heads // ranks, self.key_dim, self.value_dim))
        )

    def prompt_bytes(self, ranks: int = 1) -> int:
        """Bytes per token that the kernels of prompts need on one rank, in float32: the convolved
        inputs, the outputs, and of each value head two rows of a chunk's matrices and its decay by
        channel at most."""
        heads = self.value_heads * (self.value_dim + 2 * CHUNK + self.key_dim)
        return 4 * (sum(self.segments) + heads) // ranks

    def state_bytes(self, ranks: int = 1) -> int:
        """Bytes of one sequence over all layers on one rank: each state twice, with the number of
        tokens that it covers."""
        shapes = self.state_shapes(ranks).values()
        return 2 * sum(8 + 4 * sum(map(math.prod, own)) for own in shapes)
