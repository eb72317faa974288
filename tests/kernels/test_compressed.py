"""Attention over windows and compressed entries of every backend against float64."""

import pytest
import torch
from kernel_backends import backends_of, device_of
from kernel_formulas import normed, rotated
from quantkit_kernels import (
    ChosenEntries,
    EntryPages,
    EntryPool,
    HeadNorm,
    RecentTokens,
    Rotation,
    compressed_attend,
    pool_entries,
    rotate_heads,
    rotate_queries,
    store_recent,
)
from quantkit_kernels.samples import TOLERANCE, distance


@pytest.mark.parametrize(("backend", "dtype"), backends_of("rotate_heads"))
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("norm", ["none", "plain", "gain"])
def test_rotated_heads(backend, dtype, norm, interleaved):
    """A view of a linear's output; there and back it is the same."""
    device, (tokens, heads, width, rotary) = device_of(backend), (3, 5, 72, 16)
    x = torch.randn(tokens, heads, width + 8, device=device).to(dtype)[..., 8:]
    angles = torch.randn(tokens, rotary // 2, device=device)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    gain = torch.randn(width, device=device).to(dtype)
    how = {"none": None, "plain": HeadNorm(None, 1e-5), "gain": HeadNorm(gain, 1e-5)}[norm]
    exact = x.double() if norm == "none" else normed(x, gain if norm == "gain" else None, 1e-5)
    rest, last = exact.split([width - rotary, rotary], dim=-1)
    exact = torch.cat([rest, rotated(last, angles, interleaved)], dim=-1)
    found = rotate_heads(x, rotation, how, backend=backend)
    assert distance(found, exact) < TOLERANCE[dtype]
    key = torch.randn(tokens, width + 8, device=device).to(dtype)[:, 8:]
    queries, keys = rotate_queries(x, key, rotation, how, HeadNorm(gain + 1, 1e-4), backend=backend)
    assert torch.equal(queries, found)
    rest, last = normed(key, gain + 1, 1e-4).split([width - rotary, rotary], dim=-1)
    exact = torch.cat([rest, rotated(last[:, None], angles, interleaved)[:, 0]], dim=-1)
    assert distance(keys, exact) < TOLERANCE[dtype]
    if how is None:
        back = rotate_heads(found, rotation, back=True, backend=backend)
        assert distance(back, x) < TOLERANCE[dtype]


WINDOW, PERIOD, BLOCK = 12, 17, 8


@pytest.mark.parametrize(("backend", "dtype"), backends_of("compressed_attend"))
@pytest.mark.parametrize(
    ("heads", "width", "rate", "few"),
    [(4, 40, 0, False), (20, 64, 4, False), (3, 16, 4, True), (2, 32, 24, False), (5, 32, 3, True)],
)
def test_attention(backend, dtype, heads, width, rate, few, poisoned_memory):
    """Tokens near the start and far from it, over rings and tables of their own; with and without a
    choice among the entries. What a token does not see is NaN."""
    device = device_of(backend)
    positions = torch.tensor([0, 3, 11, 40, 95], device=device)
    tokens, most = len(positions), 96

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    whole, sinks = random(tokens, most, width), torch.randn(heads, device=device)
    q = random(tokens, heads, width + 4)[..., :width]
    ring = torch.full((tokens * PERIOD, width), torch.nan, device=device).to(dtype)
    first = torch.arange(tokens, device=device) * PERIOD
    for token, position in enumerate(positions.tolist()):
        for at in range(max(0, position - WINDOW + 1), position + 1):
            ring[token * PERIOD + at % PERIOD] = whole[token, at]
    recent, pages, chosen = RecentTokens(ring, first, PERIOD, WINDOW), None, None
    numbers = [torch.arange(0)] * tokens
    if rate:
        blocks = most // BLOCK
        table = torch.randperm(tokens * blocks, device=device).view(tokens, blocks).int()
        per = -(-BLOCK // rate)
        rows = torch.full((tokens * blocks * per, width), torch.nan, device=device).to(dtype)
        entries = random(tokens, most // rate, width)
        places = torch.zeros(tokens, most // rate, dtype=torch.int32)
        for token, position in enumerate(positions.tolist()):
            for number in range((position + 1) // rate):
                last = (number + 1) * rate - 1
                inside = number - last // BLOCK * BLOCK // rate
                places[token, number] = int(table[token, last // BLOCK]) * per + inside
                rows[places[token, number]] = entries[token, number]
        pages = EntryPages(rows, table, BLOCK, rate)
        numbers = [torch.arange((position + 1) // rate) for position in positions.tolist()]
        if few:
            numbers = [one[torch.randperm(len(one))[:5]] for one in numbers]
            chosen = ChosenEntries(
                torch.zeros(tokens, 5, dtype=torch.int32, device=device),
                torch.tensor([len(one) for one in numbers], dtype=torch.int32, device=device),
            )
            for token, own in enumerate(numbers):
                chosen.rows[token, : len(own)] = places[token, own].to(device)
    exact = []
    for token, position in enumerate(positions.tolist()):
        keys = whole[token, max(0, position - WINDOW + 1) : position + 1]
        if rate:
            keys = torch.cat((keys, entries[token, numbers[token].to(device)]))
        scores = q[token].double() @ keys.double().T * 0.3
        shares = torch.cat((scores, sinks.double()[:, None]), 1).softmax(1)[:, :-1]
        exact.append(shares @ keys.double())
    found = compressed_attend(
        q, positions, recent, pages, chosen, sinks, scale=0.3, backend=backend
    )
    assert distance(found, torch.stack(exact)) < TOLERANCE[dtype]
    # A token alone, whose attention many programs share.
    one = slice(-1, None)
    recent = recent._replace(first=first[one])
    pages = pages and pages._replace(table=pages.table[one])
    chosen = chosen and ChosenEntries(*(side[one] for side in chosen))
    alone = compressed_attend(
        q[one], positions[one], recent, pages, chosen, sinks, scale=0.3, backend=backend
    )
    assert distance(alone, exact[-1][None]) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), backends_of("pool_entries"))
@pytest.mark.parametrize(
    ("rate", "overlap", "widths", "finished"),
    [(4, True, (40, 24), True), (9, False, (32,), True), (4, False, (24,), False)],
)
def test_pooled_entries(backend, dtype, rate, overlap, widths, finished, poisoned_memory):
    """Tokens in rings, of which some end a group, the first one too; normed and rotated, or not."""
    device, rotary, halves = device_of(backend), 8 * finished, 1 + overlap
    ends = [rate - 1, 5 * rate - 1, 7 * rate - 1]
    positions = torch.tensor([*ends, 2 * rate], device=device)
    tokens, reach, period, most = 4, rate * halves, rate * halves + 3, 7 * rate
    whole = torch.randn(tokens, most, sum(2 * halves * one for one in widths), device=device)
    whole, first = whole.to(dtype), torch.arange(tokens, device=device) * period
    rings = torch.full((tokens * period, whole.shape[2]), torch.nan, device=device).to(dtype)
    for token, position in enumerate(positions.tolist()):
        for at in range(max(0, position - reach + 1), position + 1):
            rings[token * period + at % period] = whole[token, at]
    angles = torch.randn(tokens, rotary // 2, device=device)
    rotation = Rotation(angles.cos(), angles.sin(), True)
    blocks, per = -(-most // BLOCK), -(-BLOCK // rate)
    table = 1 + torch.randperm(tokens * blocks, device=device).view(tokens, blocks).int()
    pools = []
    for width in widths:
        bias, gain = torch.randn(rate, halves * width, device=device), torch.rand(width)
        rows = torch.zeros((1 + tokens * blocks) * per, width, device=device, dtype=dtype)
        pages = EntryPages(rows, table, BLOCK, rate)
        pools.append(EntryPool(bias, gain.to(device, dtype) if finished else None, 1e-5, pages))
    pool_entries(RecentTokens(rings, first, period, 0), positions, pools, rotation, backend=backend)
    begin = 0
    for pool, width in zip(pools, widths):
        wide, written = halves * width, 0
        for token, end in enumerate(ends):
            values, weights = [], []
            for at in range(max(0, end - reach + 1), end + 1):
                half = slice(width, None) if overlap and at > end - rate else slice(width)
                own = whole[token, at, begin : begin + 2 * wide].double()
                values.append(own[:wide][half])
                weights.append((own[wide:] + pool.bias[at % rate].double())[half])
            exact = (torch.stack(weights).softmax(0) * torch.stack(values)).sum(0)
            if finished:
                exact = normed(exact, pool.gain, 1e-5)
                last = exact[-rotary:].clone().view(1, 1, -1)
                exact[-rotary:] = rotated(last, angles[token : token + 1], True).flatten()
            row = pool.pages.rows(torch.tensor([[end // rate]] * tokens, device=device))[token, 0]
            assert distance(pool.pages.kv[row], exact) < TOLERANCE[dtype]
            written += 1
        assert (pool.pages.kv[per:] != 0).any(1).sum() == written
        begin += 2 * wide


@pytest.mark.parametrize(("backend", "dtype"), backends_of("store_recent"))
def test_recent_tokens(backend, dtype):
    """Sequences whose current copy is the first or the second one, two rows of one, and what was
    rejected overwritten."""
    device, spaces, length, width = device_of(backend), 5, 7, 12
    rings = torch.zeros(2, spaces, length, width, device=device, dtype=dtype)
    ends = torch.tensor([[-1, 9, 4, -1, 0], [-1, 3, 20, 6, -1]], device=device)
    places = torch.tensor([1, 1, 2, 3], device=device)
    for positions, newest in (([9, 10, 20, 6], 11), ([8, 9, 21, 7], 10)):
        at = torch.tensor(positions, device=device)
        x = torch.randn(4, width + 4, device=device).to(dtype)[:, :width]
        first = store_recent(x, rings, ends, places, at, backend=backend)
        copies = torch.tensor([0, 0, 1, 1], device=device)
        assert first.equal((copies * spaces + places) * length)
        assert rings.flatten(0, 2)[first + at % length].equal(x)
        assert ends[1 - copies, places].eq(-1).all()
        assert ends[0, 1] in (newest, newest - 1)
        assert ends[1, 2:4].tolist() == [positions[2] + 1, positions[3] + 1]
