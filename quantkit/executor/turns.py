"""Two computations in turns: while the sums of one travel between ranks, the other one has the device.

Under tensor parallelism a layer waits twice for a sum over ranks: a tenth of a long prompt's time on four H200. So a long pass is computed
as two halves, each by a thread of its own: a half that has begun a sum lets the other one go on, and waits for its sum when it has the turn
again. One of the two runs at a time, and they change places at sums alone, so that the order of launches is the same on every rank, and the
second half is never ahead of the first: in every layer it finds in the cache what the first has written.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch
from quantkit_kernels import accelerator
from torch import Tensor


class _OtherFailed(Exception):
    """Ends one of two whose other one has failed."""


class Turns:
    """Idle until `both` is called; `pass_on` does nothing then."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Of the two threads, by their idents: 0 and 1."""
        self._go = (threading.Semaphore(1), threading.Semaphore(0))
        self._ended = [False, False]
        self._faults: list[BaseException] = []

    @property
    def taken(self) -> bool:
        """Whether the caller is one of two."""
        return threading.get_ident() in self._places

    def pass_on(self) -> None:
        """Let the other one run until it passes on or ends; nothing for whoever is alone."""
        me = self._places.get(threading.get_ident())
        if me is None:
            return
        if not self._ended[1 - me]:
            self._go[1 - me].release()
            self._go[me].acquire()
        if self._faults:
            raise _OtherFailed

    def both(self, first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """What the two return; `first` begins. Raises what one of them raises, after the other has stopped at its next turn."""
        found: dict[int, Tensor] = {}
        inference, driver = torch.is_inference_mode_enabled(), accelerator.module(device)
        stream = None if driver is None else driver.current_stream(device)

        def run_second() -> None:
            with ExitStack() as same:
                if driver is not None:  # both launch on one stream: what one leaves in memory the other may take
                    same.enter_context(driver.device(device))
                    same.enter_context(driver.stream(stream))
                same.enter_context(torch.inference_mode(inference))
                self._run(1, second, found)

        self._go, self._ended, self._faults = (threading.Semaphore(1), threading.Semaphore(0)), [False, False], []
        other = threading.Thread(target=run_second, name="second half", daemon=True)
        other.start()
        self._run(0, first, found)
        other.join()
        if self._faults:
            raise self._faults[0]
        return found[0], found[1]

    def _run(self, place: int, compute: Callable[[], Tensor], found: dict[int, Tensor]) -> None:
        self._go[place].acquire()
        self._places[threading.get_ident()] = place
        try:
            if not self._faults:
                found[place] = compute()
        except _OtherFailed:
            pass
        except BaseException as fault:
            self._faults.append(fault)
        finally:
            del self._places[threading.get_ident()]
            self._ended[place] = True
            self._go[1 - place].release()
