"""Linear attention by a gated delta rule of every backend against its recurrence in float64, token
by token, with one decay a head and one a key channel."""

from typing import NamedTuple

import pytest
import torch
from kernel_backends import backends_of, device_of
from quantkit_kernels import (
    DeltaInputs,
    DeltaSpan,
    DeltaSpans,
    DeltaStates,
    DeltaWeights,
    delta_prefill,
    delta_step,
)
from quantkit_kernels.samples import TOLERANCE, distance
from torch.nn import functional as F


class Sizes(NamedTuple):
    groups: int
    shared: int
    key: int
    value: int
    kernel: int
    by_channel: bool
    joined: bool
    lower: float = 0.0


SIZES = {
    "by_head": Sizes(2, 2, 32, 16, 4, False, True),
    "by_channel": Sizes(2, 1, 16, 32, 4, True, False),
    "bounded": Sizes(2, 1, 16, 24, 3, True, False, -5.0),
    "odd": Sizes(1, 3, 24, 40, 3, False, False, -2.5),
}
PLACES = 6


def sampled(sizes, tokens, dtype, device):
    """Views of one tensor, as linears output them; joined: those of a key head lie together. Keys
    resemble one another, and some decays are steep."""
    groups, shared, key, value, *_ = sizes
    widths = [key, key, shared * value, shared * value]
    both = torch.randn(tokens, groups * sum(widths), device=device).to(dtype)
    if sizes.joined:
        q, k, v, gate = both.unflatten(1, (groups, -1)).split(widths, dim=2)
    else:
        parts = both.split([groups * width for width in widths], dim=1)
        q, k, v, gate = (part.unflatten(1, (groups, -1)) for part in parts)
    k += 2
    gates = torch.randn(tokens, groups, 2, shared, device=device)
    decay = gates[:, :, 0] * 4
    if sizes.by_channel:
        decay = torch.randn(tokens, groups, shared, key, device=device) * 4
    v, gate = (side.unflatten(2, (shared, value)) for side in (v, gate))
    return DeltaInputs(q, k, v, gate, decay, gates[:, :, 1])


def weights_of(sizes, dtype, device):
    groups, shared, key, value, kernel, by_channel, *_ = sizes
    heads, channels = groups * shared, groups * (2 * key + shared * value)
    return DeltaWeights(
        torch.randn(channels, kernel, device=device),
        torch.rand(heads, device=device),
        torch.randn(heads, *(key,) * by_channel, device=device),
        torch.rand(value, device=device).to(dtype),
        1e-6,
        sigmoid=by_channel,
        lower=sizes.lower,
    )


def states_of(sizes, device):
    """Of sequences that were there before."""
    groups, shared, key, value, kernel, *_ = sizes
    channels = groups * (2 * key + shared * value)
    return DeltaStates(
        torch.full((2, PLACES, kernel - 1, channels), 7.0, device=device),
        torch.full((2, PLACES, groups * shared, key, value), 7.0, device=device),
        torch.randint(0, 9, (2, PLACES), device=device),
    )


def exact(inputs, weights):
    """A whole sequence from its start, [T, G R V]."""
    (tokens, groups, key), (_, _, shared, value) = inputs.q.shape, inputs.v.shape
    heads, kernel = groups * shared, weights.convolution.double()
    mixed = torch.cat([side.flatten(1) for side in inputs[:3]], dim=1).double()
    padded = F.pad(mixed, (0, 0, kernel.shape[1] - 1, 0))
    mixed = F.silu((padded.unfold(0, kernel.shape[1], 1) * kernel).sum(-1))
    q, k, v = mixed.split([groups * key, groups * key, heads * value], dim=1)
    q, k = (side.unflatten(1, (groups, 1, key)).expand(-1, -1, shared, -1) for side in (q, k))
    q, k = (side / (side.square().sum(-1, keepdim=True) + 1e-6).sqrt() for side in (q, k))
    v = v.unflatten(1, (groups, shared, value))
    bias = weights.bias.double().unflatten(0, (groups, shared))
    speed = weights.speed.double().view(groups, shared, *(1,) * (bias.dim() - 2))
    shifted = inputs.decay.double() + bias
    bounded = weights.lower * (speed * shifted).sigmoid()
    decay = (bounded if weights.lower else -speed * F.softplus(shifted)).exp()
    decay = decay if decay.dim() == 4 else decay[..., None]
    memory, out = mixed.new_zeros(groups, shared, key, value), []
    for now in range(tokens):
        memory = memory * decay[now, ..., None]
        learned = v[now] - torch.einsum("grdv,grd->grv", memory, k[now])
        learned = learned * inputs.rate[now].double().sigmoid()[..., None]
        memory = memory + k[now][..., None] * learned[..., None, :]
        out.append(torch.einsum("grdv,grd->grv", memory, q[now]) * key**-0.5)
    attended = torch.stack(out)
    attended /= (attended.square().mean(-1, keepdim=True) + weights.eps).sqrt()
    gate = inputs.gate.double()
    gate = gate.sigmoid() if weights.sigmoid else F.silu(gate)
    return (attended * weights.norm.double() * gate).flatten(1)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("backend", "dtype"), backends_of("delta_step"))
def test_prompts_and_steps(backend, dtype, name, poisoned_memory):
    """Three sequences: in passes of different lengths, some of them computed twice, padded as for
    graphs, then token by token."""
    if dtype == torch.float16 and name != "odd":
        pytest.skip("only the rounding of outputs differs from bfloat16")
    sizes, device, cuts = SIZES[name], device_of(backend), ((34, 1, 5), (2, 33, 3))
    weights, states = weights_of(sizes, dtype, device), states_of(sizes, device)
    lengths = [sum(cut) + 3 for cut in zip(*cuts)]
    whole = [sampled(sizes, length, dtype, device) for length in lengths]
    places, starts = [4, 1, 5], [0, 0, 0]
    found = [[], [], []]
    for again, cut in enumerate(cuts):
        spans = DeltaSpans.of(
            [*(DeltaSpan(*one) for one in zip(places, starts, cut)), DeltaSpan(0, 0, 0)], device
        )
        beyond = torch.tensor([[0, 9]], dtype=torch.int32, device=device)
        spans = spans._replace(chunks=torch.cat((spans.chunks, beyond)))
        parts = [
            [side[start : start + length] for side in one]
            for one, start, length in zip(whole, starts, cut)
        ]
        tokens = DeltaInputs(*map(torch.cat, zip(*parts)))
        for _ in range(1 + again % 2):
            out = delta_prefill(tokens, weights, states, spans, backend=backend)
        for one, part in zip(found, out.split(cut)):
            one.append(part)
        starts = [start + length for start, length in zip(starts, cut)]
    for again in range(3):
        tokens = DeltaInputs(
            *(
                torch.stack([*(side[at] for side, at in zip(sides, starts)), sides[0][0]])
                for sides in zip(*whole)
            )
        )
        where = torch.tensor([*places, 0], device=device), torch.tensor([*starts, 0], device=device)
        for _ in range(1 + again % 2):
            out = delta_step(tokens, weights, states, *where, backend=backend)
        for one, row in zip(found, out.split(1)):
            one.append(row)
        starts = [start + 1 for start in starts]
    for own, one in zip(whole, found):
        assert distance(torch.cat(one), exact(own, weights)) < TOLERANCE[dtype]


def test_tables_begin_where_triton_compiles_once():
    """It asks of every pointer whether 16 divides it."""
    for count in range(1, 6):
        spans = DeltaSpans.of(
            [DeltaSpan(place, 0, 40) for place in range(count)], torch.device("cpu")
        )
        assert (spans.chunks.data_ptr() - spans.sequences.data_ptr()) % 16 == 0
        assert spans.chunks.tolist() == [[one, part] for one in range(count) for part in (0, 1)]
