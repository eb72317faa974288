"""Other people's graders, each verdict with a bound: one that does not come in time, or ends its
process, is no verdict."""

import multiprocessing
import os
import signal


def bounded(verdict, items, seconds):
    """The verdict of each item, None where none came within `seconds`."""
    found = []
    while len(found) < len(items):
        found += _until_one_is_missing(verdict, items[len(found) :], seconds)
    return found


def _until_one_is_missing(verdict, items, seconds):
    """Verdicts in order, by one process; only the last can be None."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(verdict, items, sending))
    process.start()
    sending.close()
    found = []
    while len(found) < len(items) and None not in found:
        try:
            found.append(receiving.recv() if receiving.poll(seconds) else None)
        except EOFError:
            found.append(None)
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    receiving.close()
    return found


def _answer(verdict, items, sending):
    os.setsid()  # what a grader starts ends with it
    for item in items:
        sending.send(verdict(item))
