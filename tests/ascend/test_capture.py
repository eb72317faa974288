"""Decode steps captured on the doubles of torch.npu and torch_npu: the tokens of eager steps, and nothing that a capture would refuse."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ascend import device_double, npu_double
from quantkit_kernels import accelerator

from quantkit.executor.engine import Engine
from quantkit.executor.graphs import DeviceCapture, why_eager
from quantkit.executor.runner import Runner
from quantkit.executor.sampling import SamplingParams

PROMPTS = [list(range(6 + i, 30 + 9 * i)) for i in range(3)]
PARAMS = [SamplingParams(max_new_tokens=4 + 3 * i, ignore_eos=True) for i in range(3)]


def tokens(engine: Engine) -> list[list[int]]:
    return [done.token_ids for done in sorted(engine.generate(PROMPTS, PARAMS), key=lambda done: done.index)]


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> DeviceCapture:
    monkeypatch.setattr(accelerator, "module", lambda device: device_double.driver())
    return DeviceCapture(torch.device("cpu"))


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "int8-a8w8c16"])
def test_a_captured_step_gives_the_eager_tokens(scheme: str, quantized: Callable[[str], Path], npu: DeviceCapture) -> None:
    with npu_double.installed():
        engine = Engine.load(quantized(scheme), device="cpu", dtype="bfloat16", backend="torch_npu", max_batch=4, max_model_len=256)
        eager = tokens(engine)
        engine.runner = Runner(engine.loaded.model, engine.cache, npu)
        assert tokens(engine) == eager
    assert engine.runner.why_eager == ""


def test_what_waits_for_a_value_is_launched_one_by_one(quantized: Callable[[str], Path], npu: DeviceCapture) -> None:
    """FP4 experts loop over counts on the host: backend ascend has a kernel, torch_npu has not."""
    with npu_double.installed():
        engine = Engine.load(quantized("fp4-w4a16"), device="cpu", dtype="bfloat16", backend="torch_npu", max_batch=4, max_model_len=256)
        eager = tokens(engine)
        engine.runner = Runner(engine.loaded.model, engine.cache, npu)
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            assert tokens(engine) == eager


def test_which_devices_capture() -> None:
    assert why_eager(torch.device("cuda")) == ""
    assert "not on cpu" in why_eager(torch.device("cpu"))
