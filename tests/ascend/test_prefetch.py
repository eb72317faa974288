"""What is asked for during a collective is what the operator after it holds."""

from types import SimpleNamespace

import torch
from ascend import device_double, npu_double
from ascend.test_executor import forced
from quantkit_kernels import torch_npu

from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.weights import prefetch, weights


class Noted(prefetch.Prefetcher):
    """Notes, one after the other, collectives with what is asked for meanwhile, and calls with what
    the operator holds."""

    def __init__(self):
        self.noted = []
        super().__init__(self.ask, device_double.driver())

    def ask(self, tensors, after):
        assert [self._stream] == device_double.BEGUN, "beside the collective, not before it"
        self.noted[-1] = ("collective", tensors)
        torch_npu.prefetch(tensors, after)

    def during(self, collective, x):
        self.noted.append(("collective", []))
        return super().during(collective, x)

    def called(self, number, held):
        self.noted.append(("call", held))
        super().called(number, held)


def same(some, others):
    return [one.data_ptr() for one in some] == [other.data_ptr() for other in others]


@torch.inference_mode()
def test_the_next_weights_are_asked_for(quantized, monkeypatch):
    noted = Noted()
    monkeypatch.setattr(weights, "find_prefetcher", lambda device, parallel: noted)
    text = list(range(1, 20))
    with npu_double.installed() as called:
        followed = forced(quantized("rtn-w4a16"), "bfloat16", "torch_npu", [(text, 16)])
    asked = [
        (place, tensors)
        for place, (what, tensors) in enumerate(noted.noted)
        if what == "collective"
    ]
    passes = 1 + len(text) - 16
    assert len(asked) % passes == 0
    first = len(asked) // passes
    assert not any(tensors for _, tensors in asked[:first])  # the first pass learns
    for place, tensors in asked[first:]:
        what, held = noted.noted[place + 1]
        assert what == "call"
        assert tensors
        assert same(tensors, held)
    assert called.count("npu_prefetch") == sum(len(tensors) for _, tensors in asked)
    monkeypatch.undo()
    with npu_double.installed():
        assert torch.equal(
            forced(quantized("rtn-w4a16"), "bfloat16", "torch_npu", [(text, 16)]), followed
        )


def test_what_holds_too_much_is_not_asked_for():
    noted = Noted()
    assert prefetch.BUDGET == 32 << 20
    tensors = {
        "just": [torch.zeros(8), torch.zeros(prefetch.BUDGET // 4 - 8)],
        "large": [torch.zeros(prefetch.BUDGET // 4 + 1)],
    }
    operators = [
        SimpleNamespace(held=lambda held=held: held, q_b=None, qkv_a=None)
        for held in tensors.values()
    ]
    for follow in (noted.follow, lambda one: noted.follow_prolog(one)._first):
        just, large = (follow(operator) for operator in operators)
        assert same(just.held, tensors["just"])
        assert large.held == []


def test_what_follows_a_collective_is_learnt_of_collectives_alone():
    """Another operator came next where nobody added up; a capture ends with nothing that nobody
    waits for; who was stopped asks no more."""
    noted, x = Noted(), torch.zeros(1)
    held = {number: [torch.full((8,), number)] for number in (1, 2, 3)}

    def add_up():
        noted.during(lambda one: one, x)
        return noted.noted[-1][1]

    with npu_double.installed():
        for number in (1, 2, 1):
            noted.called(number, held[number])
        assert add_up() == []
        noted.called(3, held[3])
        noted.called(1, held[1])
        assert same(add_up(), held[3])
        graph = device_double.NPUGraph()
        with device_double.graph(graph, None, None, "thread_local", auto_dispatch_capture=True):
            assert same(add_up(), held[3])
        noted.stop()
        assert add_up() == []


def test_who_sums_alone_or_on_no_npu_has_none():
    for device, size in (("npu", 1), ("cpu", 2), ("cuda", 2)):
        card = SimpleNamespace(type=device)
        assert prefetch.find_prefetcher(card, Parallel(0, size)) is None
