"""Other people's graders, each verdict with a bound: one that does not come in time, or ends its
process, is no verdict."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

Item = TypeVar("Item")


def bounded(
    verdict: Callable[[Item], bool], items: Sequence[Item], seconds: float
) -> list[bool | None]:
    """The verdict of each item, None where none came within `seconds`."""
    found: list[bool | None] = []
    while len(found) < len(items):
        found += _until_one_is_missing(verdict, items[len(found) :], seconds)
    return found


def _until_one_is_missing(
    verdict: Callable[[Item], bool], items: Sequence[Item], seconds: float
) -> list[bool | None]:
    """Verdicts in order, by one process; only the last can be None."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(verdict, items, sending))
    process.start()
    sending.close()
    found: list[bool | None] = []
    while len(found) < len(items) and None not in found:
        try:
            found.append(receiving.recv() if receiving.poll(seconds) else None)
        except EOFError:
            found.append(None)
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    receiving.close()
    return found


def _answer(verdict: Callable[[Item], bool], items: Sequence[Item], sending: Connection) -> None:
    os.setsid()  # what a grader starts ends with it
    for item in items:
        sending.send(verdict(item))
