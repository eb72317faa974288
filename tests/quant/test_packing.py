"""Packing: the orders of the real libraries, and exact inverses for every size."""

import golden
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.quant import packing


def _nibbles(seed, *shape):
    return torch.randint(
        0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_awq_order():
    """Outputs 0..31 holding their number modulo 16."""
    outputs = torch.arange(32, dtype=torch.uint8).remainder(16).reshape(32, 1)
    assert packing.pack_awq(outputs)[0].tolist() == golden.words(
        golden.load("autoawq_pack_order")["qweight_row0_hex"]
    )


def test_compressed_tensors_order():
    vectors = golden.load("ct_pack_order")
    row = torch.tensor([vectors["row_values"]], dtype=torch.int8)
    assert packing.pack_words(packing.to_offset(row))[0].tolist() == golden.words(
        vectors["packed_hex"]
    )


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (packing.to_offset, packing.from_offset),
        (packing.to_twos_complement, packing.from_twos_complement),
    ],
)
def test_signed_codes_become_nibbles_and_back(pack, unpack):
    codes = torch.arange(-8, 8, dtype=torch.int8)
    nibbles = pack(codes)
    assert sorted(nibbles.tolist()) == list(range(16))
    assert torch.equal(unpack(nibbles), codes)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    eights=st.integers(1, 5),
    transposed=st.booleans(),
)
def test_unpack_inverts_pack(seed, rows, eights, transposed):
    nibbles = _nibbles(seed, 8 * eights, rows).T if transposed else _nibbles(seed, rows, 8 * eights)
    before = nibbles.clone()
    assert torch.equal(packing.unpack_pairs(packing.pack_pairs(nibbles)), nibbles)
    assert torch.equal(packing.unpack_words(packing.pack_words(nibbles)), nibbles)
    assert torch.equal(packing.unpack_awq(packing.pack_awq(nibbles.T)), nibbles.T)
    assert torch.equal(nibbles, before)
