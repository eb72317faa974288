"""Decode steps captured on the doubles of torch.npu and torch_npu: the tokens of eager steps, and
nothing that a capture would refuse."""

import numpy as np
import pytest
import torch
from ascend import device_double, npu_double
from quantkit_kernels import accelerator, torch_npu
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit import Engine, SamplingParams
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import DecodeBuffers, DeviceCapture
from quantkit.executor.runner.runner import Runner
from quantkit.executor.weights import weights
from quantkit.executor.weights.prefetch import Prefetcher

PROMPTS = [list(range(6 + i, 30 + 9 * i)) for i in range(3)]
PARAMS = [SamplingParams(max_new_tokens=4 + 3 * i, ignore_eos=True) for i in range(3)]


def tokens(engine):
    return [
        done.token_ids
        for done in sorted(engine.generate(PROMPTS, PARAMS), key=lambda done: done.index)
    ]


def load(path):
    return Engine.load(
        path,
        device="cpu",
        dtype="bfloat16",
        backend="torch_npu",
        max_batch=4,
        max_model_len=256,
    )


@pytest.fixture
def npu(monkeypatch):
    monkeypatch.setattr(accelerator, "module", lambda device: device_double.driver())
    return DeviceCapture(torch.device("cpu"))


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "int8-a8w8c16"])
def test_a_captured_step_gives_the_eager_tokens(scheme, quantized, npu):
    with npu_double.installed():
        engine = load(quantized(scheme))
        eager = tokens(engine)
        engine.runner = Runner(engine.loaded.model, engine.cache, npu)
        assert tokens(engine) == eager
    assert engine.runner.why_eager == ""


def test_what_waits_for_a_value_is_launched_one_by_one(quantized, npu):
    """FP4 experts loop over counts on the host: backend ascend has a kernel, torch_npu has not."""
    with npu_double.installed():
        engine = load(quantized("fp4-w4a16"))
        eager = tokens(engine)
        engine.runner = Runner(engine.loaded.model, engine.cache, npu)
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            assert tokens(engine) == eager


def test_a_capture_that_prefetching_ends_is_tried_without(quantized, npu, monkeypatch):
    """The second try is captured, says so, and gives the tokens; nothing is asked for
    afterwards."""
    asked = []

    def refused(a):
        asked.append(len(device_double.CAPTURING))
        if device_double.CAPTURING:
            raise RuntimeError("npu_prefetch: its stream is not captured")

    monkeypatch.setitem(npu_double.RESULTS, "npu_prefetch", refused)
    monkeypatch.setattr(
        weights,
        "find_prefetcher",
        lambda device, parallel: Prefetcher(torch_npu.prefetch, device_double.driver()),
    )
    with npu_double.installed():
        engine = load(quantized("rtn-w4a16"))
        eager = tokens(engine)
        assert asked.count(0) > 0
        engine.runner = Runner(engine.loaded.model, engine.cache, npu)
        with pytest.warns(
            RuntimeWarning,
            match="its stream is not captured; it could be without prefetching weights",
        ):
            assert tokens(engine) == eager
        assert engine.runner.why_eager == ""
        asked.clear()
        assert tokens(engine) == eager
    assert asked == []


def test_graphs_are_captured_on_one_stream_but_for_a_layers_behind(quantized, npu, monkeypatch):
    """Memory of a pool serves one stream; and what the model returned is read after the layer
    behind it was replayed."""
    streams = []
    kept = accelerator.capture
    monkeypatch.setattr(
        accelerator,
        "capture",
        lambda *given, **options: streams.append(options["stream"]) or kept(*given, **options),
    )
    with npu_double.installed():
        engine = load(quantized("rtn-w4a16"))
        monkeypatch.setattr("quantkit.executor.runner.runner.why_eager", lambda device: "")
        engine.runner = Runner(engine.loaded.model, engine.cache)
        tokens(engine)
        behind, model = engine.runner.drafter_steps(engine.loaded.model), engine.runner.steps
    assert len(streams) > 1
    assert len(set(map(id, streams))) == 1, "sizes share a stream"
    assert behind._capture._pool is not model._capture._pool


def test_the_host_waits_until_its_values_are_read():
    """A copy that is not waited for reads the host's memory later on an NPU."""
    unwaited = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is torch.ops.aten.copy_.default:
                unwaited.append(args[2:] == (True,))
            return operator(*args, **(kwargs or {}))

    buffers = DecodeBuffers(2, 16, torch.device("cpu"))
    with Noted():
        buffers.fill(DecodeRows(*np.ones((3, 2), np.int64), np.ones((2, 1), np.int32)))
    assert unwaited == [False]


def test_ranks_that_part_let_go_of_graphs_first(npu, monkeypatch):
    """NCCL's communicator waits for graphs that hold its sums."""
    accelerator.let_go_of_graphs()  # those of other tests
    order = []
    monkeypatch.setattr(device_double.NPUGraph, "reset", lambda graph: order.append("graph"))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: order.append("group"))
    x = torch.zeros(3)
    replays = [npu(lambda: x + 1, []), npu(lambda: x + 2, [])]
    Parallel(1, 2).close()
    assert order == ["graph", "graph", "group"]
    assert len(replays) == 2
