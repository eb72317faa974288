"""Linear attention by a gated delta rule (quantkit_kernels/delta.py) in plain torch, in float32."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.delta import DeltaInputs, DeltaSpans, DeltaStates, DeltaWeights
from quantkit_kernels.gating import sigmoid, softplus

_CHUNK, _CHUNK_BY_CHANNEL = 64, 16
"""Tokens whose updates are computed together; fewer where decays differ by channel, as their
products are no matmul."""
EPS = 1e-6
"""Of the norms of queries and keys."""


class DeltaState(NamedTuple):
    """State of sequences. recent float32 [..., K - 1, C]; memory float32 [..., G R, D, V]."""

    recent: Tensor
    memory: Tensor


def attend_sequence(
    inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState | None = None
) -> tuple[Tensor, DeltaState]:
    """Consecutive tokens of one sequence, from its start without a state -> [T, G R V], normed and
    gated, and the state after them."""
    mixed, heads = _mixed(inputs), len(weights.speed)
    if state is None:
        state = DeltaState(
            mixed.new_zeros(weights.convolution.shape[1] - 1, mixed.shape[1]),
            mixed.new_zeros(heads, inputs.q.shape[2], inputs.v.shape[3]),
        )
    padded = torch.cat((state.recent, mixed))
    convolved = F.conv1d(padded.t()[None], weights.convolution[:, None], groups=padded.shape[1])
    q, k, v = _heads(_silu(convolved[0].t()), inputs)
    decay, rate = _gates(inputs, weights)
    size = _CHUNK if decay.shape[2] == 1 else _CHUNK_BY_CHANNEL
    q, k, v, decay, rate = (side.transpose(0, 1) for side in (q, k, v, decay, rate))
    out, memory = torch.empty_like(v), state.memory
    for start in range(0, v.shape[1], size):
        own = (slice(None), slice(start, start + size))
        out[own], memory = _attend_chunk(q[own], k[own], v[own], decay[own], rate[own], memory)
    recent = padded[len(padded) - state.recent.shape[0] :]
    return _gated_norm(out.transpose(0, 1), inputs, weights), DeltaState(recent, memory)


def delta_prefill(
    inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, spans: DeltaSpans
) -> Tensor:
    device, out = inputs.q.device, []
    lengths = [span.length for span in spans.spans]
    for span, one in zip(spans.spans, zip(*(side.split(lengths) for side in inputs))):
        if not span.length:
            continue
        place, before = (torch.tensor([n], device=device) for n in (span.place, span.start))
        state, which = _read(states, place, before)
        attended, after = attend_sequence(
            DeltaInputs(*one), weights, DeltaState(*(side[0] for side in state))
        )
        after = DeltaState(*(side[None] for side in after))
        _write(states, place, before + span.length, after, which)
        out.append(attended)
    return torch.cat(out)


def delta_step(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    states: DeltaStates,
    places: Tensor,
    positions: Tensor,
) -> Tensor:
    state, which = _read(states, places, positions)
    window = torch.cat((state.recent, _mixed(inputs)[:, None]), dim=1)  # [T, K, C]
    q, k, v = _heads(_silu((window * weights.convolution.t()).sum(1)), inputs)
    decay, rate = _gates(inputs, weights)
    memory = state.memory * decay.exp()[..., None]
    learned = (v - (k[:, :, None] @ memory)[:, :, 0]) * rate
    memory = memory + k[..., None] * learned[:, :, None]
    _write(states, places, positions + 1, DeltaState(window[:, 1:], memory), which)
    return _gated_norm((q[:, :, None] @ memory)[:, :, 0], inputs, weights)


def _read(states: DeltaStates, places: Tensor, tokens: Tensor) -> tuple[DeltaState, Tensor]:
    """States at `places` after `tokens`, zeros for 0 tokens; and which copy each is."""
    which, started = (states.tokens[1, places] == tokens).long(), (tokens > 0)[:, None, None]
    recent = states.recent[which, places] * started
    return DeltaState(recent, states.memory[which, places] * started[..., None]), which


def _write(
    states: DeltaStates, places: Tensor, tokens: Tensor, state: DeltaState, which: Tensor
) -> None:
    for stored, one in zip(states, (*state, tokens)):
        stored[1 - which, places] = one


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _mixed(inputs: DeltaInputs) -> Tensor:
    """Inputs of the convolution, float32 [T, C]."""
    return torch.cat([side.flatten(1) for side in inputs[:3]], dim=1).float()


def _heads(mixed: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [T, C] -> queries and keys [T, G R, D], normed, queries scaled; values [T, G R, V]."""
    shapes = [side.shape[1:] for side in inputs[:3]]
    parts = mixed.split([shape.numel() for shape in shapes], dim=1)
    q, k, v = (part.unflatten(1, shape) for part, shape in zip(parts, shapes))
    q, k = (side * (side.square().sum(-1, keepdim=True) + EPS).rsqrt() for side in (q, k))
    q, k = (side.repeat_interleave(v.shape[2], dim=1) for side in (q, k))
    return q * q.shape[2] ** -0.5, k, v.flatten(1, 2)


def _gates(inputs: DeltaInputs, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """g [T, G R, D], or [T, G R, 1] where it is one number per head; beta [T, G R, 1]."""
    shifted, speed = inputs.decay.flatten(1, 2) + weights.bias, weights.speed[:, None]
    shifted = shifted.unflatten(1, (len(speed), -1)).flatten(2)
    decay = (
        weights.lower * sigmoid(shifted * speed) if weights.lower else softplus(shifted) * -speed
    )
    return decay, sigmoid(inputs.rate.flatten(1))[..., None]


def _gated_norm(attended: Tensor, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
    """attended float32 [T, G R, V] -> [T, G R V] of the inputs' dtype."""
    gate = inputs.gate.flatten(1, 2).float()
    normed = attended * (attended.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
    gate = sigmoid(gate) if weights.sigmoid else _silu(gate)
    return (normed * weights.norm.float() * gate).to(inputs.q.dtype).flatten(1)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Several tokens at once: q, k [heads, t, D], v [heads, t, V], decay [heads, t, D or 1], rate
    [heads, t, 1], memory [heads, D, V].

    The sequential updates inside a chunk are the solution of a triangular system.
    """
    past = decay.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    between = (past[:, :, None] - past[:, None]).masked_fill(later[..., None], -torch.inf).exp()

    def products(a: Tensor, b: Tensor) -> Tensor:
        """Of tokens, each decayed from b's time to a's: [heads, t, t]."""
        if decay.shape[2] == 1:
            return (a @ b.mT) * between[..., 0]
        return torch.einsum("htd,hsd,htsd->hts", a, b, between)

    weighted = k * rate
    right = torch.cat((v * rate, weighted * past.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(
        products(weighted, k), right, upper=False, unitriangular=True
    )
    learned = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ memory
    attended = (q * past.exp()) @ memory + products(q, k) @ learned
    last = past[:, -1:]
    return attended, memory * last.exp().mT + (k * (last - past).exp()).mT @ learned
