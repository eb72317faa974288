"""Linear attention by a gated delta rule (arXiv 2412.06464), as in Qwen3-Next: a state per sequence
instead of keys and values.

The state S [key_dim, value_dim] of a head is updated with every token: S <- e^g S, then S <- S + k
(beta (v - S^T k))^T, and the token reads S^T q. Queries, keys and values pass through a short
causal convolution, whose last inputs are kept as well. Symbols: T tokens, C channels of the
convolution, K its width.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 64
"""Tokens whose updates are computed together."""
_EPS = 1e-6
"""Of the norms of queries and keys."""

StateShapes = dict[int, tuple[tuple[int, ...], ...]]
"""The float32 state of a sequence on one rank: shapes of the tensors that are read and written
together, by number."""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the linear attention. Adjacent value heads share a key head. kernel: width of the
    convolution. layers: those with linear attention. joined: one linear computes queries, keys,
    values and gates, key head after key head, and another one the rest; otherwise there is one
    linear for queries, keys and values, and one for each of the others."""

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

    def state_bytes(self, ranks: int = 1) -> int:
        """Bytes of one sequence over all layers on one rank: each state twice, with the number of
        tokens that it covers."""
        return state_bytes(self.state_shapes(ranks))


def state_bytes(shapes: StateShapes) -> int:
    """Bytes of tensors of these shapes, held twice, with the number of tokens that each covers."""
    return 2 * sum(8 + 4 * sum(map(math.prod, own)) for own in shapes.values())


class DeltaInputs(NamedTuple):
    """Inputs of a layer's tokens. mixed [T, C]: queries, keys and values before the convolution;
    decay, rate float32 [T, value heads]: g <= 0, and beta."""

    mixed: Tensor
    decay: Tensor
    rate: Tensor


class DeltaState(NamedTuple):
    """State of sequences. recent float32 [..., K - 1, C]: the last inputs of the convolution;
    memory float32 [..., value heads, key_dim, value_dim]."""

    recent: Tensor
    memory: Tensor


class DeltaWeights(NamedTuple):
    """convolution float32 [C, K]; net: the sizes, over all ranks."""

    convolution: Tensor
    net: DeltaNet

    def empty(self, device: torch.device) -> DeltaState:
        """State of a sequence without tokens."""
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
    """One token for each of B sequences -> [B, value heads, value_dim] float32, and their
    states."""
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
    """Several tokens at once: q, k [heads, t, key_dim], v [heads, t, value_dim], decay and rate
    [heads, t], memory as in `DeltaState`.

    The sequential updates inside a chunk are the solution of a triangular system.
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
