"""A layer's experts on devices: every rule of a placement holds, and no device waits for long."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.planning.expert_balance import balance, copy_experts, device_loads, place_layer


@st.composite
def layers(draw):
    """Counts of a layer, devices, and slots of each that can hold its experts."""
    experts, devices = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    slots = draw(st.integers(-(-experts // devices), experts))
    counts = draw(st.lists(st.integers(0, 10_000), min_size=experts, max_size=experts))
    return np.array(counts, dtype=np.float64), devices, slots


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layers())
def test_every_expert_is_somewhere_and_none_twice_on_a_device(layer):
    counts, devices, slots = layer
    placed = place_layer(counts, devices, slots)
    assert placed.shape == (devices, slots)
    assert set(placed.ravel().tolist()) == set(range(len(counts)))
    assert all(len(set(row)) == slots for row in placed.tolist())
    assert np.isclose(device_loads(placed, counts).sum(), counts.sum())


def test_copies_make_the_busiest_copy_as_idle_as_can_be():
    loads = np.array([9.0, 5.0, 2.0, 1.0])
    found = max(loads / copy_experts(loads, 8, 4))
    every = [copies for copies in itertools.product(range(1, 5), repeat=4) if sum(copies) == 8]
    assert found == min(max(loads / np.array(copies)) for copies in every)


def test_an_expert_has_no_more_copies_than_there_are_devices():
    assert copy_experts(np.array([1000.0, 1.0, 1.0]), 8, 3).tolist() == [3, 3, 2]


@pytest.mark.parametrize(("devices", "redundant"), [(8, 8), (32, 32), (144, 176)])
def test_skewed_experts_are_even_on_other_tokens(devices, redundant):
    """R1's shape: 256 experts asked as Zipf's law has it (0.8), placed by one text's counts and
    judged by another's."""
    generator = np.random.default_rng(0)
    shares = 1 / np.arange(1, 257) ** 0.8
    shares = generator.permutation(shares / shares.sum())
    counted, held_out = (
        generator.multinomial(8 * tokens, shares).astype(np.float64)
        for tokens in (200_000, 1_000_000)
    )
    placed = place_layer(counted, devices, (256 + redundant) // devices)
    assert balance(placed, held_out) >= 0.95
    if 256 % devices == 0:
        assert balance(np.arange(256).reshape(devices, -1), held_out) < 0.7


def test_a_layer_without_load_is_even():
    assert balance(place_layer(np.zeros(8), 4, 2), np.zeros(8)) == 1.0
