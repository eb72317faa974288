"""Linear attention by a gated delta rule (arXiv 2412.06464), as Qwen3-Next has it: a state per
sequence in place of keys and values.

The state S [key_dim, value_dim] of a head forgets and learns with every token: S <- e^g S, then S
<- S + k (beta (v - S^T k))^T, and the token reads S^T q. Queries, keys and values come through a
short causal convolution, so the last inputs of that are kept as well. Symbols: T tokens, C channels
of the convolution, K its width.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 64
"""Tokens whose updates are found together."""
_EPS = 1e-6
"""Of the norms of queries and keys."""

StateShapes = dict[int, tuple[tuple[int, ...], ...]]
"""What one rank keeps of a sequence in float32: by number, the shapes of the tensors that are read
and written together."""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the linear attention. Value heads that stand side by side share a key head. kernel:
    width of the convolution. layers: those
    that have it. joined: whether one linear gives queries, keys, values and gates, key head after
    key head, and another the rest; or there is a linear for queries, keys and values, and one each
    for the others.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layers: frozenset[int]
    joined: bool = True

    @property
    def segments(self) -> tuple[int, int, int]:
        """Channels of the convolution: queries, keys, values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def attention_layer_places(self, num_layers: int) -> dict[int, int]:
        """Layers without it, numbered."""
        return {
            layer: number for number, layer in enumerate(sorted({*range(num_layers)} - self.layers))
        }

    def state_shapes(self, ranks: int = 1) -> StateShapes:
        """Of each layer: the inputs of the convolution, and the state."""
        recent = (self.kernel - 1, sum(self.segments) // ranks)
        return dict.fromkeys(
            sorted(self.layers), (recent, (self.value_heads // ranks, self.key_dim, self.value_dim))
        )

    def state_bytes(self, ranks: int = 1) -> int:
        """Of one sequence over all layers on one rank: each state twice, with the number of tokens
        that it is of."""
        return state_bytes(self.state_shapes(ranks))


def state_bytes(shapes: StateShapes) -> int:
    """Of tensors of these shapes, held twice, and the number of tokens that each is of."""
    return 2 * sum(8 + 4 * sum(map(math.prod, own)) for own in shapes.values())


class DeltaInputs(NamedTuple):
    """What a layer's tokens bring. mixed [T, C]: queries, keys and values before the convolution;
    decay, rate float32 [T, value heads]: g, not above 0, and beta."""

    mixed: Tensor
    decay: Tensor
    rate: Tensor


class DeltaState(NamedTuple):
    """What is kept of sequences. recent float32 [..., K - 1, C]: the last inputs of the
    convolution; memory float32 [..., value heads, key_dim, value_dim]."""

    recent: Tensor
    memory: Tensor


class DeltaWeights(NamedTuple):
    """convolution float32 [C, K]; net: the sizes, of all ranks together."""

    convolution: Tensor
    net: DeltaNet

    def empty(self, device: torch.device) -> DeltaState:
        """Of a sequence that has no token yet."""
        channels, net = len(self.convolution), self.net
        heads = channels * net.value_heads // sum(net.segments)
        recent = torch.zeros(net.kernel - 1, channels, device=device)
        return DeltaState(recent, torch.zeros(heads, net.key_dim, net.value_dim, device=device))


def attend_sequence(
    inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState
) -> tuple[Tensor, DeltaState]:
    """Consecutive tokens of one sequence -> [T, value heads, value_dim] float32, and the state
    after them."""
    padded = torch.cat((state.recent, inputs.mixed.float()))
    mixed = F.silu(
        F.conv1d(padded.t()[None], weights.convolution[:, None], groups=padded.shape[1])[0].t()
    )
    q, k, v = _heads(mixed, weights.net)
    out, memory = torch.empty_like(v), state.memory
    for start in range(0, len(v), _CHUNK):
        part = slice(start, start + _CHUNK)
        queries, keys, values = (side[part].transpose(0, 1) for side in (q, k, v))
        attended, memory = _attend_chunk(
            queries, keys, values, inputs.decay[part].t(), inputs.rate[part].t(), memory
        )
        out[part] = attended.transpose(0, 1)
    return out, DeltaState(padded[len(padded) - state.recent.shape[0] :], memory)


def attend_step(
    inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState
) -> tuple[Tensor, DeltaState]:
    """One token of each of B sequences -> [B, value heads, value_dim] float32, and their states."""
    window = torch.cat((state.recent, inputs.mixed.float()[:, None]), dim=1)  # [B, K, C]
    q, k, v = _heads(F.silu((window * weights.convolution.t()).sum(1)), weights.net)
    memory = state.memory * inputs.decay.exp()[..., None, None]
    learned = (v - (k[:, :, None] @ memory)[:, :, 0]) * inputs.rate[..., None]
    memory = memory + k[..., None] * learned[:, :, None]
    return (q[:, :, None] @ memory)[:, :, 0], DeltaState(window[:, 1:], memory)


def _heads(mixed: Tensor, net: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [T, C] -> queries and keys [T, value heads, key_dim], normed, queries scaled; values
    [T, value heads, value_dim]."""
    ranks = sum(net.segments) // mixed.shape[1]
    q, k, v = mixed.split([channels // ranks for channels in net.segments], dim=-1)
    v = v.unflatten(-1, (-1, net.value_dim))
    sides = []
    for side in (q, k):
        heads = side.unflatten(-1, (-1, net.key_dim))
        normed = heads * (heads.square().sum(-1, keepdim=True) + _EPS).rsqrt()
        sides.append(normed.repeat_interleave(net.value_heads // net.key_heads, dim=1))
    return sides[0] * net.key_dim**-0.5, sides[1], v


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Some tokens at once: q, k [heads, t, key_dim], v [heads, t, value_dim], decay and rate
    [heads, t], memory as in `DeltaState`.

    What the tokens of a chunk learn of each other is a triangular system, whose solution stands for
    their updates one by one.
    """
    past = decay.cumsum(-1)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    between = (past[:, :, None] - past[:, None]).masked_fill(later, -torch.inf).exp()
    weighted = k * rate[..., None]
    system = (weighted @ k.mT) * between
    right = torch.cat((v * rate[..., None], weighted * past.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    learned = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ memory
    attended = (q * past.exp()[..., None]) @ memory + ((q @ k.mT) * between) @ learned
    last = past[:, -1:, None]
    return attended, memory * last.exp() + (k * (last - past[..., None]).exp()).mT @ learned
