"""One line for every request, when its last byte is sent."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.executor.server.service import AnswerStream

_NOTE = "quantkit.note"
_LONGEST = 200
"""Characters of a path that are shown."""


@dataclass
class RequestNote:
    """What is known of a request besides its status: the id of its answer, and who makes it."""

    id: str = "-"
    stream: AnswerStream | None = None

    def tokens(self) -> str:
        sequences = self.stream.sequences if self.stream is not None else []
        return (
            f"{sum(one.prompt_len for one in sequences)} in "
            f"{sum(len(one.generated) for one in sequences)} out"
        )


def note_of(scope: Scope) -> RequestNote:
    """Where a handler notes what the line says; unused where nothing is logged."""
    found: Any = scope.setdefault(_NOTE, RequestNote())
    assert isinstance(found, RequestNote)
    return found


class RequestLog:
    """The application, with a line a request: id, method, path, status, tokens, seconds. log:
    takes a line."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None]) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status, note = time.perf_counter(), ["-"], note_of(scope)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status[0] = "500"  # what is outside of us answers so
            raise
        finally:
            seconds = time.perf_counter() - started
            path = str(scope["path"])[:_LONGEST]
            self._log(
                f"{note.id} {scope['method']} {path} {status[0]} {note.tokens()} {seconds:.3f} s"
            )
