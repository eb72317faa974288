"""What ranks on NPUs ask for before they meet: their own card, HCCL by its name, collectives on the
vector cores. HCCL is not here."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ascend import npu_double
from forked_ranks import run_ranks

from quantkit.common import devices
from quantkit.common.errors import QuantkitError
from quantkit.executor.ranks import parallel
from quantkit.executor.ranks.quantized_all_reduce import CodedSums
from quantkit.executor.runner.attention_context import Chunk, PrefillContext
from quantkit.executor.weights.load import load_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of the driver and of torch.distributed, in order, with the mode of collectives
    at that time."""
    found: list[tuple[Any, ...]] = []
    driver = SimpleNamespace(set_device=lambda device: found.append(("card", str(device))))
    monkeypatch.setattr(torch, "get_device_module", lambda device: driver)

    def meet(backend: str, rank: int, world_size: int, timeout: object) -> None:
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

    def __str__(self) -> str:
        return f"npu:{self.index}"


def test_a_rank_takes_its_card_and_meets_over_hccl(asked: list[tuple[Any, ...]]) -> None:
    parallel.Parallel(3, 8).connect(Card(type="npu", index=3))  # type: ignore[arg-type]
    assert asked == [
        ("card", "npu:3"),
        ("hccl", 3, 8, "AIV"),
        ("messages", "gloo"),
        ("channel", "npu"),
    ]


def test_a_mode_that_was_set_stays(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AI_CPU")
    parallel.Parallel(0, 2).connect(Card(type="npu", index=0))  # type: ignore[arg-type]
    assert asked[1] == ("hccl", 0, 2, "AI_CPU")


def test_each_process_takes_the_card_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(QuantkitError, match="no device npu:8"):
        devices.find_device("npu:8")


def test_prompts_are_added_in_8_bits(r1_attention: Callable[[str], Path], tmp_path: Path) -> None:
    """Two ranks on the double: prompts go as bytes, two exchanges for a sum, and the distribution
    moves by little."""
    path, token_ids = r1_attention("bf16"), torch.arange(10, 74)

    def compute(ranks: parallel.Parallel) -> list[torch.Tensor]:
        sent: list[torch.Tensor] = []
        scatter, gather = dist.all_to_all_single, dist.all_gather
        dist.all_to_all_single = lambda received, x: (sent.append(x), scatter(received, x))
        dist.all_gather = lambda parts, x: (sent.append(x), gather(parts, x))
        found = []
        with npu_double.installed():
            loaded = load_model(
                path, device="cpu", dtype="bfloat16", backend="torch_npu", parallel=ranks
            )
            for codes in (None, torch.int8):
                ranks.coded_sums = None if codes is None else CodedSums(codes, 2, 0)
                table = torch.arange(1, 64 // loaded.cache_layout.block_size + 2)
                context = PrefillContext(loaded.new_cache(len(table) + 1), [Chunk(0, 64, table)])
                found.append(
                    loaded.model.logits(loaded.model(token_ids, context)).log_softmax(dim=-1)
                )
        coded = [x for x in sent if x.dtype == torch.uint8]
        return [*found, torch.tensor([len(coded), *(x.nbytes for x in coded[:2])])]

    (exact, coded, told), (_, other, _) = run_ranks(2, tmp_path, compute)
    width = 1024 // 128 * 130
    assert told.tolist() == [2 * 2 * 2, 64 * width, 32 * width], "two layers, two sums each"
    assert torch.equal(coded, other)
    assert 0 < (exact.exp() * (exact - coded)).sum(dim=-1).median() < 1e-3
