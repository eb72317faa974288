"""Linear attention by a gated delta rule (arXiv 2412.06464): a state per sequence in place of keys
and values.

A head's memory S [D, V] is updated with every token: S <- e^g S, then S <- S + k (beta (v - S^T
k))^T, and the token reads S^T q. The decay g is one number per head (gated delta net), or one per
key channel (Kimi Delta Attention, arXiv 2510.26692): then e^g multiplies the rows of S. Queries,
keys and values pass a short causal convolution, whose last inputs are part of the state, and SiLU;
queries and keys are normed. What is read is normed and gated. Symbols: T tokens, G key heads, R
value heads of each key head, D key_dim, V value_dim, C = G (2 D + R V) channels of the convolution,
K its width, P places of states.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, check_tensor, require


class DeltaInputs(NamedTuple):
    """What the linears of a layer output for its tokens; views of their outputs are taken as they
    are, with a contiguous last dimension. q, k float [T, G, D] and v [T, G, R, V] before the
    convolution; gate [T, G, R, V] of the output; decay float32 [T, G, R], or [T, G, R, D] per key
    channel, of which the weights make g; rate float32 [T, G, R]: beta = sigmoid(rate)."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    decay: Tensor
    rate: Tensor


class DeltaWeights(NamedTuple):
    """convolution float32 [C, K]: of all queries, then keys, then values. speed float32 [G R]; bias
    float32 [G R], or [G R, D] with a decay per key channel. norm float [V]: gain of the output's
    norm over each head; eps: of this norm. sigmoid: the output is gated by a sigmoid, not by SiLU.
    lower: below 0 the least g, which is lower sigmoid(speed (decay + bias)); 0 for none, and
    g = -speed softplus(decay + bias)."""

    convolution: Tensor
    speed: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    sigmoid: bool = False
    lower: float = 0.0


class DeltaStates(NamedTuple):
    """States of a layer's sequences, each held twice, so that a pass can be computed again: it
    reads the copy after the tokens before it and writes the other one. recent float32 [2, P, K - 1,
    C]: the last inputs of the convolution; memory float32 [2, P, G R, D, V]; tokens int64 [2, P]:
    how many each copy is of."""

    recent: Tensor
    memory: Tensor
    tokens: Tensor


class DeltaSpan(NamedTuple):
    """New tokens of the sequence at `place`, from position `start` on; all before them were
    computed."""

    place: int
    start: int
    length: int


class DeltaSpans(NamedTuple):
    """Spans of the sequences of a pass, whose tokens follow one another, on the host; and for
    kernels what `span_tables` says of them, int32 [sequences, 5] and [chunks, 2], on the device. A
    span may be empty, and a chunk beyond the end of its sequence."""

    spans: Sequence[DeltaSpan]
    sequences: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, spans: Sequence[DeltaSpan], device: torch.device) -> "DeltaSpans":
        sequences, chunks = span_tables(spans)
        # Both begin at a multiple of 16 bytes, or Triton compiles its kernels for every alignment.
        gap = [0] * (-len(sequences) % 4)
        both = torch.tensor([*sequences, *gap, *chunks], dtype=torch.int32).to(device)
        first, _, second = both.split([len(sequences), len(gap), len(chunks)])
        return cls(spans, first.view(-1, 5), second.view(-1, 2))


def span_tables(spans: Sequence[DeltaSpan]) -> tuple[list[int], list[int]]:
    """Of each sequence its place, start, first row, length and first chunk; of each chunk of CHUNK
    tokens its sequence, and its number there."""
    sequences: list[int] = []
    chunks: list[int] = []
    first = 0
    for number, (place, start, length) in enumerate(spans):
        sequences += (place, start, first, length, len(chunks) // 2)
        for chunk in range(-(-length // CHUNK)):
            chunks += (number, chunk)
        first += length
    return sequences, chunks


CHUNK = 32
"""Tokens of a sequence whose updates a kernel computes together."""


def delta_step(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    states: DeltaStates,
    places: Tensor,
    positions: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """One token of each of T sequences with states at `places` int64 [T], distinct but for place 0,
    which padding rows share; positions int64 [T]: of the tokens, which is the number of tokens that
    their states are of. Returns [T, G R V] of q's dtype, normed and gated, and updates the
    states."""
    _check(inputs, weights, states)
    check_tensor("places", places, (len(inputs.q),), (torch.int64,))
    check_tensor("positions", positions, (len(inputs.q),), (torch.int64,))
    found = backends.find("delta_step", backend, inputs.q.device)
    result: Tensor = found.delta_step(inputs, weights, states, places, positions)
    return result


def delta_prefill(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    states: DeltaStates,
    spans: DeltaSpans,
    *,
    backend: str = "auto",
) -> Tensor:
    """As `delta_step`, of many tokens of each sequence."""
    _check(inputs, weights, states)
    tokens = sum(span.length for span in spans.spans)
    require(tokens == len(inputs.q), f"spans: {tokens} tokens, expected {len(inputs.q)}")
    found = backends.find("delta_prefill", backend, inputs.q.device)
    result: Tensor = found.delta_prefill(inputs, weights, states, spans)
    return result


def _check(inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates) -> None:
    (tokens, groups, key), (_, _, shared, value) = inputs.q.shape, inputs.v.shape
    heads, by_channel = groups * shared, (key,) * (inputs.decay.dim() - 3)
    channels, kernel = groups * (2 * key + shared * value), weights.convolution.shape[1]
    dtypes, single = (inputs.q.dtype,), (torch.float32,)
    check_tensor("q", inputs.q, (tokens, groups, key), FLOAT_DTYPES)
    check_tensor("k", inputs.k, (tokens, groups, key), dtypes)
    check_tensor("v", inputs.v, (tokens, groups, shared, value), dtypes)
    check_tensor("gate", inputs.gate, (tokens, groups, shared, value), dtypes)
    check_tensor("decay", inputs.decay, (tokens, groups, shared, *by_channel), single)
    require(all(side.stride(-1) == 1 for side in inputs[:4]), "q, k, v, gate: channels lie apart")
    check_tensor("rate", inputs.rate, (tokens, groups, shared), single)
    check_tensor("convolution", weights.convolution, (channels, kernel), single)
    check_tensor("speed", weights.speed, (heads,), single)
    check_tensor("bias", weights.bias, (heads, *by_channel), single)
    check_tensor("norm", weights.norm, (value,), FLOAT_DTYPES)
    require(weights.lower <= 0, f"lower: {weights.lower}, expected at most 0")
    places = states.tokens.shape[1]
    check_tensor("recent", states.recent, (2, places, kernel - 1, channels), single)
    check_tensor("memory", states.memory, (2, places, heads, key, value), single)
    check_tensor("tokens", states.tokens, (2, places), (torch.int64,))
