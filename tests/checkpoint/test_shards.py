"""Blocks of stored tensors are slices of them, and no more is read than they need."""

import os
import threading

import pytest
import torch
from refused import refused
from safetensors.torch import save_file

from quantkit.checkpoint import shards
from quantkit.checkpoint.header import read_header
from quantkit.checkpoint.shards import CPU, Shards

TENSORS = {
    "wide": torch.arange(12 * 3000, dtype=torch.int32).view(12, 3000),
    "narrow": torch.arange(50 * 40, dtype=torch.int16).view(50, 40),
    "fp8": torch.linspace(-3, 3, 16 * 64).view(16, 64).to(torch.float8_e4m3fn),
    "vector": torch.arange(7.0),
    "scalar": torch.tensor(5.0),
}
DEVICE = torch.device("cpu", 0)
"""Not equal to `CPU`, so tensors take the way of a device's."""


@pytest.fixture
def stored(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("device", [CPU, DEVICE])
@pytest.mark.parametrize("buffer", [shards.BUFFER, 100])
@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("wide", ((2, 9), (0, 3000))),
        ("wide", ((0, 12), (1000, 1600))),  # 2400 bytes of each row: read piece by piece
        ("narrow", ((0, 50), (10, 20))),
        ("narrow", ((5, 5), (0, 40))),
        ("fp8", ((4, 8), (16, 48))),
        ("vector", ((2, 5),)),
        ("scalar", None),
    ],
)
def test_a_block_is_a_slice(stored, name, block, device, buffer, monkeypatch):
    monkeypatch.setattr(shards, "BUFFER", buffer)
    info = {tensor.name: tensor for tensor in read_header(stored, "model.safetensors")}[name]
    found = Shards(stored).read(info, block, device)
    expected = (
        TENSORS[name] if block is None else TENSORS[name][tuple(slice(*span) for span in block)]
    )
    assert found.dtype == expected.dtype
    assert found.device.type == "cpu"
    assert torch.equal(found.float(), expected.float())


def test_bytes_are_counted_as_read(stored):
    infos = {tensor.name: tensor for tensor in read_header(stored, "model.safetensors")}
    for name, block, count in (
        ("wide", ((2, 9), (0, 3000)), 7 * 12000),
        ("wide", ((0, 12), (1000, 1600)), 12 * 2400),
        ("narrow", ((0, 50), (10, 20)), 50 * 80),  # pieces of 20 bytes: the rows whole
        ("scalar", None, 4),
    ):
        files = Shards(stored)
        files.read(infos[name], block)
        assert files.bytes_read == count


def test_what_a_device_will_be_given_is_read_once_and_before(stored, monkeypatch):
    found, read = (
        {info.name: info for info in read_header(stored, "model.safetensors")},
        Shards(stored),
    )
    filled = []
    fill = Shards.fill

    def told(self, info, content, skip):
        filled.append((info.name, threading.current_thread() is threading.main_thread()))
        fill(self, info, content, skip)

    monkeypatch.setattr(Shards, "fill", told)
    for name in ("wide", "fp8", "scalar"):
        read.prefetch(found[name], DEVICE)
        read.prefetch(found[name], DEVICE)
    for name, tensor in TENSORS.items():
        for _ in range(2):
            assert torch.equal(read.read(found[name], device=DEVICE).float(), tensor.float())
    assert [name for name, here in filled if not here] == ["wide", "fp8", "scalar"]
    assert sum(here for _, here in filled) == 2 * len(TENSORS) - 3
    assert read.bytes_read == 2 * sum(info.nbytes for info in found.values())


def test_no_more_is_read_ahead_than_there_is_room_for(stored, monkeypatch):
    found = {info.name: info for info in read_header(stored, "model.safetensors")}
    monkeypatch.setattr(shards, "READ_AHEAD_BYTES", found["narrow"].nbytes + found["fp8"].nbytes)
    ahead, empty = shards.ReadAhead(), torch.empty(0, dtype=torch.uint8)
    for name in ("narrow", "wide", "fp8", "scalar"):
        ahead.start(found[name], lambda: empty)
    taken = {name for name, info in found.items() if ahead.take(info) is not None}
    assert taken == {"narrow", "fp8"}
    ahead.start(found["scalar"], lambda: empty)
    assert ahead.take(found["scalar"]) is empty


def test_a_fault_of_what_was_read_ahead_is_raised_by_take(stored):
    (info,) = (one for one in read_header(stored, "model.safetensors") if one.name == "wide")
    read = Shards(stored)
    os.truncate(stored / "model.safetensors", info.offset + 10)
    read.prefetch(info, DEVICE)
    with refused("became shorter"):
        read.read(info, device=DEVICE)
