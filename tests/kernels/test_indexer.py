"""The indexer of sparse attention of every backend against float64: keys and queries, and which
tokens are selected, over the pages of several sequences."""

import pytest
import torch
from kernel_backends import backends_of, device_of
from kernel_formulas import normed, rotated
from quantkit_kernels import IndexNorm, IndexPages, Rotation, TopTokens, index_prepare, index_topk
from quantkit_kernels.codes import decode, empty_index_keys, encode_index, store_index_keys
from quantkit_kernels.hadamard import block_hadamard
from quantkit_kernels.samples import TOLERANCE, distance

PAGE = 16


def coded(keys):
    """As FP8 codes."""
    room = empty_index_keys(keys.shape[:2], keys.shape[2], keys.device)
    flat = keys.flatten(0, 1)
    store_index_keys(room, torch.arange(len(flat), device=keys.device), flat)
    return room


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("heads", "width", "rotary"), [(32, 128, 64), (4, 24, 16), (16, 32, 32)])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("backend", "dtype"), backends_of("index_prepare"))
def test_keys_are_normed_and_both_sides_rotated(
    backend, dtype, heads, width, rotary, centred, interleaved
):
    torch.manual_seed(1)
    device, tokens = device_of(backend), 5
    both = torch.randn(tokens, (heads + 1) * width, device=device).to(dtype)
    q, k = both[:, width:].unflatten(1, (heads, width)), both[:, :width]  # as one linear outputs
    gain, shift = torch.randn(2, width, device=device)
    angles = torch.rand(tokens, rotary // 2, device=device) * 6
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    cache, slots = torch.full((3, PAGE, width), 7.0, device=device).to(dtype), [40, 3, 17, 0, 31]
    norm = IndexNorm(gain, shift if centred else None, 1e-6)
    found = index_prepare(
        q, k, norm, rotation, cache, torch.tensor(slots, device=device), backend=backend
    )

    exact = normed(k, gain)
    if centred:
        exact = normed(k.double() - k.double().mean(-1, keepdim=True), gain) + shift.double()
    assert distance(found, rotated(q, angles, interleaved)) < TOLERANCE[dtype]
    stored, key = cache.flatten(0, 1), rotated(exact[:, None], angles, interleaved)[:, 0]
    assert distance(stored[slots], key) < 2 * TOLERANCE[dtype]
    others = [one for one in range(3 * PAGE) if one not in slots]
    assert (stored[others] == 7).all()

    if width & (width - 1):
        return
    room, places = coded(torch.full_like(cache, 7.0)), torch.tensor(slots, device=device)
    again = index_prepare(q, k, norm, rotation, room, places, backend=backend)
    assert distance(again, block_hadamard(found.double(), width)) < TOLERANCE[dtype]
    codes, scales = (part.flatten(0, 1) for part in room)
    spread, steps = block_hadamard(stored[slots].double(), width), scales[slots, None].double()
    largest, slack = spread.abs().amax(-1, keepdim=True), 1 + TOLERANCE[dtype]
    assert (steps.frexp().mantissa == 0.5).all(), "no powers of two"
    assert (largest <= 448 * steps * slack).all()
    assert (largest * slack > 224 * steps).all()
    half = spread.abs() / 16 + 2**-10 * steps  # of a step
    rounding = (decode(codes, scales)[slots].double() - spread).abs()
    assert (rounding <= half + (slack - 1) * largest).all()
    assert (decode(codes, scales)[others] == 7).all()


@pytest.mark.parametrize("in_codes", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 5])
@pytest.mark.parametrize("one_sequence", [True, False])
@pytest.mark.parametrize(("backend", "dtype"), backends_of("index_topk"))
def test_the_highest_scores_are_selected(
    backend, dtype, one_sequence, heads, in_codes, monkeypatch
):
    """In segments, too; over unwritten tokens, with scores of 0 and fewer tokens than topk."""
    from quantkit_kernels.triton import indexer

    monkeypatch.setattr(indexer, "_SEGMENT", 64)
    monkeypatch.setattr(indexer, "_AT_ONCE", 16)
    torch.manual_seed(2)
    device, width, blocks, topk = device_of(backend), 32, 11, 20
    keys = torch.randn(40, PAGE, width, device=device).to(dtype)
    tables = torch.randperm(40, device=device)[: 3 * blocks].view(3, blocks).int()
    if one_sequence:
        tables = tables[:1]
    keys[tables[0, -1].long(), -1] = torch.nan  # beyond every token
    positions = torch.tensor([3, 100, 174] if one_sequence else [170, 19, 63], device=device)
    q = torch.randn(3, heads, width, device=device).to(dtype)
    weights = torch.randn(3, heads, device=device)
    weights[1] = 0
    cached = coded(keys) if in_codes else keys
    found, slots, counts = index_topk(
        q, weights, IndexPages(cached, tables), positions, topk, backend=backend
    )
    if in_codes:
        keys, q = decode(*cached), decode(*encode_index(q))
    assert slots.shape == (3, topk)
    if backend == "triton":
        bits = indexer.selected_bits(TopTokens(found, slots, counts), blocks * PAGE)
        spread = (bits[..., None] >> torch.arange(32, device=device) & 1).flatten(1)
        assert [one.nonzero().flatten().tolist() for one in spread] == [
            one[:count].tolist() for one, count in zip(found, counts)
        ]
    assert counts.tolist() == [min(topk, one + 1) for one in positions.tolist()]
    for row in range(3):
        table = tables[0 if one_sequence else row].long()
        places = {int(table[at // PAGE]) * PAGE + at % PAGE: at for at in range(blocks * PAGE)}
        chosen = [places[slot] for slot in slots[row, : counts[row]].tolist()]
        assert chosen == sorted({*chosen}) == found[row, : counts[row]].tolist()
        seen = keys[table].flatten(0, 1)[: positions[row] + 1].double()
        scores = (weights[row].double()[:, None] * (q[row].double() @ seen.mT).relu()).sum(0)
        best = scores.sort(descending=True, stable=True).indices[: counts[row]]
        if (scores == 0).all():
            assert chosen == [*range(len(chosen))]
        # Two scores nearer than the products' rounding may change places.
        assert (scores[chosen].sort().values - scores[best].sort().values).abs().max() < 1e-4


@pytest.mark.parametrize("in_codes", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(64, 128), (32, 64)])
@pytest.mark.parametrize(("backend", "dtype"), backends_of("index_topk"))
def test_prompts(backend, dtype, heads, width, in_codes):
    """Many tokens of one sequence after a context: on Hopper a kernel of its own."""
    torch.manual_seed(3)
    device, page, topk = device_of(backend), 64, 100
    tokens, context = (1111, 700) if device.type == "cuda" else (9, 150)
    blocks = -(-(tokens + context) // page)
    keys = torch.randn(blocks, page, width, device=device).to(dtype)
    table = torch.randperm(blocks, device=device)[None].int()
    positions = torch.arange(tokens, device=device) + context
    q = torch.randn(tokens, heads, width, device=device).to(dtype)
    weights = torch.randn(tokens, heads, device=device)
    cached = coded(keys) if in_codes else keys
    found = index_topk(q, weights, IndexPages(cached, table), positions, topk, backend=backend)
    if in_codes:
        keys, q = decode(*cached), decode(*encode_index(q))
    seen = keys[table[0].long()].flatten(0, 1).double()
    products = (q.double() @ seen.mT).relu()
    scores = (weights.double()[..., None] * products).sum(1)
    scores = scores.masked_fill(torch.arange(len(seen), device=device) > positions[:, None], -1e9)
    best, chosen = scores.topk(topk).values, scores.gather(1, found.positions.long())
    assert (found.positions.diff() > 0).all()
    # Hopper adds up products of FP8 in fewer bits than float32 has.
    bound = (1e-3 if in_codes else 1e-5) * best.abs().max()
    assert (chosen.sort(descending=True).values - best).abs().max() < bound


@pytest.mark.parametrize("in_codes", [False, True])
@pytest.mark.parametrize("backend", backends_of("index_topk", dtypes=False))
def test_of_equal_scores_the_first_are_selected(backend, in_codes):
    """However many tokens there are: with one head half of the scores are 0."""
    device, topk = device_of(backend), 70
    torch.manual_seed(3)
    q = torch.randn(200, 16, 16, device=device).bfloat16()
    q[:, 1:] = 0
    weights, keys = torch.randn(200, 16, device=device), torch.randn(256, 16, device=device)
    keys[::7] = keys[3]
    keys = keys.bfloat16().view(-1, PAGE, 16)
    keys = coded(keys) if in_codes else keys
    positions = torch.arange(200, device=device)
    table = torch.arange(16, dtype=torch.int32, device=device)[None]
    whole, _, counts = index_topk(
        q, weights, IndexPages(keys, table), positions, topk, backend=backend
    )
    for position in (0, 69, 70, 131, 199):
        part, count = slice(position, position + 1), int(counts[position])
        pages = IndexPages(keys, table[:, : position // PAGE + 1])
        alone = index_topk(q[part], weights[part], pages, positions[part], topk, backend=backend)
        assert torch.equal(alone.positions[0, :count], whole[position, :count]), position


@pytest.mark.parametrize("weight", [1.0, -1.0, 2.0**100])
@pytest.mark.parametrize("backend", backends_of("index_topk", dtypes=False))
def test_scores_of_few_values_over_many_powers_of_two(backend, weight, monkeypatch):
    """Differences of such scores do not lead to the least that is selected, of which there are
    several; with the last weight the highest are infinite."""
    from quantkit_kernels.triton import indexer

    monkeypatch.setattr(indexer, "_AT_ONCE", 32)
    device, topk = device_of(backend), 70
    tokens = 70_000 if device.type == "cuda" else 256
    torch.manual_seed(6)
    values = 2.0 ** (torch.randint(-9, 6, (tokens,), device=device) // 3 * 30)
    keys = torch.zeros(tokens, 16, device=device).bfloat16()
    keys[:, 0] = values
    q, weights = torch.zeros(2, 3, 16, 16, device=device).bfloat16()
    q[:, 0, 0], weights = 1, weights[..., 0].float()
    weights[:, 0] = weight
    table = torch.arange(tokens // PAGE, device=device)[None]
    positions = torch.tensor([20, 130, tokens - 1], device=device)
    pages = IndexPages(keys.view(-1, PAGE, 16), table)
    found, _, counts = index_topk(q, weights, pages, positions, topk, backend=backend)
    for row, position in enumerate(positions.tolist()):
        best = (weight * values[: position + 1]).sort(descending=True, stable=True).indices[:topk]
        assert found[row, : counts[row]].tolist() == best.sort().values.tolist()
