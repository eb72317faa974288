"""What stands in front of every server's application: who may ask at all, and the log of faults.

A server on loopback without a key answers any page that a browser on this machine shows, unless it
looks at the names that the browser sends: a page may resolve its own name to 127.0.0.1, and is then
of the same origin.
"""

import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.common.bind import is_loopback
from quantkit.common.result import one_line

_LOG = logging.getLogger("uvicorn.error")  # the server's own
_LONGEST = 300
"""Characters of a fault's message in the log."""


class LoopbackOnly:
    """The application for requests that are addressed to this machine by name, from no page of
    another. refusal: the answer to others."""

    def __init__(self, app: ASGIApp, refusal: Callable[[], Response]) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_local(Headers(scope=scope)):
            return await self._refusal()(scope, receive, send)
        await self._app(scope, receive, send)


def is_local(headers: Headers) -> bool:
    """Whether Host is a loopback name and Origin, if any, a page of such a name."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    return (
        len(hosts) == 1
        and _is_local(_HOST, hosts[0])
        and all(_is_local(_ORIGIN, one) for one in origins)
    )


_HOST = re.compile(r"(\[[\da-f:.]+\]|[^\[\]:/@]+)(:\d*)?", re.ASCII | re.IGNORECASE)
_ORIGIN = re.compile(f"https?://{_HOST.pattern}", _HOST.flags)


def _is_local(form: re.Pattern[str], text: str) -> bool:
    found = form.fullmatch(text)
    return found is not None and is_loopback(found[1])


def log_fault(what: str, fault: BaseException) -> None:
    """One line for a fault that nothing foresaw: what failed, why and where."""
    where = "".join(
        f" ({Path(last.filename).name}:{last.lineno})"
        for last in traceback.extract_tb(fault.__traceback__)[-1:]  # none if it was not raised
    )
    _LOG.error(one_line(f"{what}: {type(fault).__name__}: {str(fault)[:_LONGEST]}{where}"))


class Faults:
    """The application, whose unforeseen faults are one line of the log instead of a traceback. They
    are answered by `answer`, if no answer began."""

    def __init__(self, app: ASGIApp, answer: Callable[[Exception], Response]) -> None:
        self._app, self._answer = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as fault:
            if scope["type"] != "http":
                raise
            log_fault(f"{scope['method']} {scope['path'][:_LONGEST]}", fault)
            if not began:
                await self._answer(fault)(scope, receive, send)
