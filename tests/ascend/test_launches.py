"""Launches of a decode step on torch_npu's operators and Triton kernels (docs/lab/ascend.md)."""

import pytest
import torch
from ascend import ascendc_double, triton_double
from ascend.npu_double import copied
from ascend.test_executor import divergence, forced
from quantkit_kernels import backends
from quantkit_kernels.torch_npu.calls import bind
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit import Engine, SamplingParams
from quantkit.executor.runner.graphs import compute

VIEWS = {"view", "_unsafe_view", "expand", "detach", "alias"}
NOT_LAUNCHED = VIEWS | {"empty", "empty_like", "new_empty", "_local_scalar_dense", "lift_fresh"}


class CountLaunches(TorchDispatchMode):
    """Operators that would start something on a device, and what aclnn copies before torch_npu's. A
    rule that reads counts on the CPU only is none of them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        library, _, name = operator._schema.name.partition("::")
        if library == "npu":
            first = copied(bind(name, args, kwargs or {}))
            self.names += [f"{name}: {one}" for one in first]
        if not operator.is_view and name not in NOT_LAUNCHED:
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


COUNTED = [
    ("rtn-w4a16", "torch_npu", {2: (18, 26)}),
    ("int8-a8w8c16", "torch_npu", {2: (13, 20)}),
    ("int8-attention", "torch_npu", {2: (10, 18)}),
    ("rtn-w4a16", "ascend", {2: (18, 20), 5: (18, 26)}),
    ("int8-a8w8c16", "ascend", {2: (13, 13), 5: (13, 20)}),
    ("int8-attention", "ascend", {2: (10, 12), 5: (10, 18)}),
    ("rtn-w4a16", "ascend, built", {2: (18, 24), 5: (18, 25)}),
    ("int8-attention", "ascend, built", {2: (10, 16), 5: (10, 17)}),
]
STEP = 27
"""By the number of sequences: launches of a dense layer, and of one with experts (npu_mla_prolog_v3
is one, and takes no 4-bit weights); and for embedding, head and sampling once a step."""


@pytest.mark.parametrize(("model", "backend", "counted"), COUNTED)
@torch.no_grad()
def test_launches_of_a_step(model, backend, counted, r1_attention):
    """At R1's sizes of attention, a dense layer, one with experts, and what is launched once, of
    several sequences: slices of several rows must be copied where an operator wants them
    contiguous."""
    backend, built = backend.partition(",")[0], "built" in backend
    with ascendc_double.installed() if built else triton_double.installed():
        engine = Engine.load(
            r1_attention(model),
            device="cpu",
            dtype="bfloat16",
            backend=backend,
            max_batch=8,
            max_model_len=256,
        )
        for batch, layers in counted.items():
            assert launches_of(engine, backend, batch) == (*layers, STEP)


def launches_of(engine, backend, batch):
    sequences = [
        engine.submit(list(range(first, first + 20)), SamplingParams(max_new_tokens=8))
        for first in range(5, 5 + batch)
    ]
    engine.step()
    engine.step()
    loaded, found = engine.loaded.model, []
    hidden = torch.randn(batch, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = engine.runner.rows([5] * batch, [(one, one.num_cached) for one in sequences])
    context = rows.context(engine.cache)
    for layer in loaded.layers:
        with backends.use_backend(backend):
            # Tables made once a step are not a layer's.
            layer(hidden, hidden, context, layer.input_norm)
            with CountLaunches() as launches:
                layer(hidden, hidden, context, layer.input_norm)
        assert not any(name.endswith(": weight") for name in launches.names), "copied at every step"
        found.append(len(launches.names))
    with CountLaunches() as launches:
        compute(loaded, (torch.tensor([5] * batch),), rows.context(engine.cache))
    dense, moe = found
    return dense, moe, len(launches.names) - dense - moe


@torch.no_grad()
def test_decoding_on_the_doubles_of_kernels(r1_attention):
    """Two launches in the place of five round less, and Ascend C takes rows apart into digits: next
    tokens' log-probabilities are those of backend torch_npu but for that."""
    text, found = list(range(3, 23)), []
    for backend, double in (
        ("torch_npu", triton_double),
        ("ascend", triton_double),
        ("ascend", ascendc_double),
    ):
        with double.installed() as called:
            found.append(forced(r1_attention("int8-attention"), "bfloat16", backend, [(text, 16)]))
        assert (called.count("int4_down") > 0) == (len(found) == 2)
    assert divergence(found[0], found[1]) < 2e-3
    assert divergence(found[0], found[2]) < 2e-3
