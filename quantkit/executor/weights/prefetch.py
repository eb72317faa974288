"""Weights brought into an NPU's L2 while the ranks add up: the next operator then finds them there.

No forward says which operator comes next. The first pass shows it: what is called after a
collective is remembered under the operator that was called before it, and from the second pass on
its weights are asked for when that collective starts, on a stream of their own. A graph captures
the passes after its warm-up, requests included; where it cannot, `stop_prefetching` and it is tried
again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from quantkit_kernels import Experts, Linear, MlaProlog, accelerator
from torch import Tensor

from quantkit.executor.ranks.parallel import Parallel

BUDGET = 32 << 20
"""Bytes asked for at a time: what 1.6 TB/s bring during a collective of 20 us, and a sixth of a
910B's L2. Experts hold more, and which of them a token needs is not known yet: nothing is asked
for."""

Fetch = Callable[[list[Tensor], Tensor], None]
"""Asks for weights; the second tensor is there when the asking may begin."""


_WORKING: "WeakSet[Prefetcher]" = WeakSet()


def stop_prefetching() -> bool:
    """Ask for nothing from now on; returns whether prefetching was on."""
    working = bool(_WORKING)
    for prefetcher in list(_WORKING):
        prefetcher.stop()
    return working


class Prefetcher:
    """One for all weights of a rank. driver: what streams come from."""

    def __init__(self, fetch: Fetch, driver: ModuleType) -> None:
        self._fetch, self._driver = fetch, driver
        self._stream = driver.Stream()
        self._followed = 0
        self._last: int | None = None
        """The operator called last, and whether a collective came after it."""
        self._summed = False
        self._next: dict[int | None, list[Tensor]] = {}
        _WORKING.add(self)

    def stop(self) -> None:
        """Collectives go alone from now on."""
        _WORKING.discard(self)

    def follow(self, operator: Linear | Experts) -> "Followed":
        return Followed(self, operator, *self._numbered(operator.held()))

    def follow_prolog(self, prolog: MlaProlog) -> "FollowedProlog":
        return FollowedProlog(self, prolog, *self._numbered(prolog.held()))

    def _numbered(self, held: list[Tensor]) -> tuple[int, list[Tensor]]:
        """A new operator's number, and what to ask for before it."""
        self._followed += 1
        small = sum(tensor.numel() * tensor.element_size() for tensor in held) <= BUDGET
        return self._followed, held if small else []

    def called(self, number: int, held: list[Tensor]) -> None:
        if self._summed:
            self._next.setdefault(self._last, held)
        self._last, self._summed = number, False

    def during(self, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """collective(x), and meanwhile the weights that were needed after it the last time."""
        self._summed = True
        weights = self._next.get(self._last, [])
        if not weights or self not in _WORKING:
            return collective(x)
        current = self._driver.current_stream()
        self._stream.wait_stream(current)
        with self._driver.stream(self._stream):
            self._fetch(weights, x)
        summed = collective(x)
        current.wait_stream(self._stream)
        return summed


@dataclass(eq=False)
class Followed:
    """An operator whose calls a prefetcher sees."""

    prefetcher: Prefetcher
    operator: Callable[..., Tensor]
    number: int
    held: list[Tensor]

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        self.prefetcher.called(self.number, self.held)
        return self.operator(*arguments, **options)


class FollowedProlog(Followed):
    """Whole, or begun with its first linear."""

    def __init__(
        self, prefetcher: Prefetcher, prolog: MlaProlog, number: int, held: list[Tensor]
    ) -> None:
        super().__init__(prefetcher, prolog, number, held)
        self.q_b = prolog.q_b
        self._first = Followed(prefetcher, prolog.qkv_a, number, held)

    def qkv_a(self, x: Tensor) -> Tensor:
        return self._first(x)


def find_prefetcher(device: torch.device, parallel: Parallel) -> Prefetcher | None:
    """On several NPUs; elsewhere there is no collective to use, or no such request."""
    if device.type != "npu" or parallel.size == 1:
        return None
    from quantkit_kernels.torch_npu import prefetch

    driver = accelerator.module(device)
    assert driver is not None, device
    return Prefetcher(prefetch, driver)
