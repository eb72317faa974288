"""What ranks on NPUs ask for before they meet: their own card, HCCL by its name, collectives on the
vector cores. HCCL is not here."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from refused import refused

from quantkit.common import devices
from quantkit.executor.ranks import parallel


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the driver and of torch.distributed, in order, with the mode of collectives
    at that time."""
    found = []
    driver = SimpleNamespace(set_device=lambda device: found.append(("card", str(device))))
    monkeypatch.setattr(torch, "get_device_module", lambda device: driver)

    def meet(backend, rank, world_size, timeout):
        found.append((backend, rank, world_size, os.environ.get("HCCL_OP_EXPANSION_MODE")))

    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setattr(
        dist, "new_group", lambda backend, timeout: found.append(("messages", backend))
    )
    monkeypatch.setattr(
        parallel.Parallel,
        "_open_channel",
        lambda self, device: found.append(("channel", device.type)),
    )
    monkeypatch.delenv("HCCL_OP_EXPANSION_MODE", raising=False)
    return found


class Card(SimpleNamespace):
    """A device as torch_npu names it: its type cannot be made without torch_npu."""

    def __str__(self):
        return f"npu:{self.index}"


def test_a_rank_takes_its_card_and_meets_over_hccl(asked):
    parallel.Parallel(3, 8).connect(Card(type="npu", index=3))
    assert asked == [
        ("card", "npu:3"),
        ("hccl", 3, 8, "AIV"),
        ("messages", "gloo"),
        ("channel", "npu"),
    ]


def test_a_mode_that_was_set_stays(asked, monkeypatch):
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AI_CPU")
    parallel.Parallel(0, 2).connect(Card(type="npu", index=0))
    assert asked[1] == ("hccl", 0, 2, "AI_CPU")


def test_each_process_takes_the_card_of_its_number(monkeypatch):
    monkeypatch.setattr(devices, "npu_lack", lambda: None)
    monkeypatch.setattr(torch, "device", str)
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(device_count=lambda: 8)
    )
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert devices.find_device("npu") == "npu:5"
    assert devices.find_device("npu:2") == "npu:2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.find_device("auto") == "npu:5"
    with refused("no device npu:8"):
        devices.find_device("npu:8")
