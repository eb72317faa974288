"""The launches of a decode step that the cost model counts on are those of the executor on torch_npu's operators."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend import npu_double
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.costmodel import load_hardware
from quantkit.executor.engine import Engine
from quantkit.executor.sampling import SamplingParams

VIEWS = {"view", "_unsafe_view", "expand", "detach", "alias"}
NOT_LAUNCHED = VIEWS | {"empty", "empty_like", "new_empty", "_local_scalar_dense"}
SPLIT_OF_LATENT_AND_ROPE = 2
"""Copies that mla_decode makes at DeepSeek-V3's sizes and not at the built-in model's."""


class CountLaunches(TorchDispatchMode):
    """Operators that would start something on a device. A rule that reads counts on the CPU only is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.partition("::")[2]
        if not operator.is_view and name not in NOT_LAUNCHED:
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "int8-a8w8c16"])
@torch.no_grad()
def test_launches_of_a_layer(scheme: str, quantized: Callable[[str], Path]) -> None:
    hardware = load_hardware("910b1")
    extra = hardware.extra_launches_int8
    with npu_double.installed():
        engine = Engine.load(quantized(scheme), device="cpu", dtype="bfloat16", max_batch=4, max_model_len=256)
        sequence = engine.submit(engine.tokenizer.encode_chat([{"role": "user", "content": "hi"}]), SamplingParams(max_new_tokens=8))
        engine.step()
        engine.step()
        context = engine.runner.rows([0], [(sequence, sequence.num_cached)]).context(engine.cache)
        hidden = torch.randn(1, engine.loaded.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        counted = []
        for layer in engine.loaded.model.layers[:2]:
            layer(hidden, hidden, context, layer.input_norm)  # tables made once a step are not a layer's
            with CountLaunches() as launches:
                layer(hidden, hidden, context, layer.input_norm)
            counted.append(len(launches.names) + SPLIT_OF_LATENT_AND_ROPE)
    written = hardware.launches["written"]
    expected = [written.dense_layer, written.moe_layer]
    if scheme == "int8-a8w8c16":
        expected = [expected[0] + extra.dense_layer, expected[1] + extra.moe_layer]
    assert counted == expected
