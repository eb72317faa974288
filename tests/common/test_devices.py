"""Names of dtypes and devices: one table, whoever asks; and the device that kernels are launched
on."""

import guessed_models
import pytest
import torch
from packed_model import write_random
from refused import refused

from quantkit import SamplingParams
from quantkit.common.devices import (
    find_device,
    find_dtype,
    parse_dtype,
    select_device,
    set_current_device,
)
from quantkit.executor import engine


@pytest.mark.parametrize(
    ("short", "long"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_a_dtype_has_a_short_name_and_torchs(short, long):
    assert parse_dtype(short) == parse_dtype(long) == getattr(torch, long)
    assert find_dtype(short, torch.device("cpu")) == getattr(torch, long)


@pytest.mark.parametrize("name", ["", "half", "int8", "BF16"])
def test_another_name_is_refused(name):
    with refused(r"is not known; use float32, bfloat16, float16, or fp32, bf16, fp16"):
        parse_dtype(name)


@pytest.fixture
def four_gpus(monkeypatch):
    """As PyTorch tells of them; the devices that were made current."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("name", "rank", "number"),
    [("cuda", None, 0), ("auto", "3", 3), ("cuda", "2", 2), ("cuda:1", "2", 1)],
)
def test_who_computes_on_a_gpu_makes_it_the_current_one(name, rank, number, four_gpus, monkeypatch):
    """Triton launches on the current device: ranks other than the first were refused their own
    tensors."""
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert find_device(name) == torch.device("cuda", number)
    assert not four_gpus, "who only asks changes nothing"
    assert select_device(name) == torch.device("cuda", number)
    assert four_gpus == [torch.device("cuda", number)]
    set_current_device(select_device("cpu:0"))
    assert select_device("cpu:0") == torch.device("cpu")
    assert len(four_gpus) == 1


@pytest.mark.parametrize(
    "name", ["cuda:4", "cuda:x", "cuda:", "cuda:-1", "cpu:1", "cuda:1:2", "cuda:²"]
)
def test_a_device_that_is_not_there_is_refused(name, four_gpus):
    with refused(f"there is no device {name} here; this machine has (cuda:0 to cuda:3|cpu:0)$"):
        select_device(name)
    assert not four_gpus


def test_an_engine_computes_on_its_own_device_in_any_thread(tmp_path, monkeypatch):
    """Threads begin with the first device, so it is made current where a step begins."""
    loaded, current = (
        guessed_models.load(write_random(tmp_path / "model", guessed_models.LLAMA)),
        [],
    )
    monkeypatch.setattr(engine, "set_current_device", current.append)
    guessed_models.tokens(loaded, SamplingParams(max_new_tokens=2, ignore_eos=True), [[7, 8, 9]])
    assert current
    assert set(current) == {loaded.loaded.device}
