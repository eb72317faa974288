"""Any OpenAI-compatible server as a generator: many requests in flight, retried with backoff, read
as a stream.

Whatever one request meets is its own sample's error. The run ends only where going on cannot help:
the server takes no connection any more, it has refused the first requests as one refuses a wrong
key or address, or none of the first has got a reply, with all its tries.
"""

import asyncio
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generators.generator import Generation, ModelReply, Prompt
from quantkit.evaluation.generators.replies import ReplyReader
from quantkit.evaluation.openai_server import (
    CONNECT_TIMEOUT_S,
    FAULTS,
    TIMEOUT_S,
    OpenAIServer,
    StreamError,
    fault,
)

RETRIES = 5
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_REFUSED = {
    401,
    403,
    404,
    405,
}  # about the address or the key, if every request gets it; else about one prompt
# such refusals, or samples without a reply, before there is a single one; or as many as are in
# flight
_HOPELESS = 4
_TOO_LONG = (
    "context length",
    "context window",
    "context limit",
    "context_length_exceeded",
    "too long",
    "max_model_len",
    "max_seq_len",
    "max_new_tokens` must be",  # TGI
)


class _Fatal(Exception):
    """A problem that every further request would meet too, and its remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class Endpoint:
    """`url` is the server, with or without /v1 or a method after it. `model` defaults to the only
    one that the server lists.

    `identity` says who answers, not where: the model's name, and `revision` where it is given, else
    what the server reports of it.
    retries: further tries of a request that failed in passing. timeout_s: longest wait for the next
    event of a reply. top_logprobs: the number of alternatives returned at every position of a reply
    to messages.
    """

    identity_is_certain = False

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        revision: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        backoff_s: float = 1.0,
        top_logprobs: int = 0,
    ) -> None:
        self.server = OpenAIServer(
            url, api_key=api_key, connect_timeout_s=connect_timeout_s, timeout_s=timeout_s
        )
        self._concurrency = concurrency
        self._retries = retries
        self._backoff_s = backoff_s
        self._more: dict[str, Any] = (
            {"logprobs": True, "top_logprobs": top_logprobs} if top_logprobs else {}
        )
        entry = self.server.find_model(model)
        self.name: str = entry["id"]
        facts = (
            {"revision": revision}
            if revision
            else {name: value for name, value in entry.items() if name != "id"}
        )
        self.identity: dict[str, Any] = {"model": self.name} | facts
        self._answered, self._refused, self._failed = 0, 0, 0

    def generate(self, prompts: Sequence[Prompt], parameters: Generation) -> Iterator[ModelReply]:
        """Completions as they finish. Stopping the iteration cancels what is in flight."""
        arrived: queue.Queue[ModelReply | BaseException | None] = queue.Queue()
        stop = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._all(prompts, parameters, arrived, stop))
                arrived.put(None)
            except BaseException as error:
                arrived.put(error)

        thread = threading.Thread(target=work, daemon=True, name="quantkit-endpoint")
        thread.start()
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, _Fatal):
                    raise QuantkitError(f"{self.server.base}: {item}", item.remedy)
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join()

    async def _all(
        self,
        prompts: Sequence[Prompt],
        parameters: Generation,
        arrived: "queue.Queue[ModelReply | BaseException | None]",
        stop: threading.Event,
    ) -> None:
        waiting = iter(enumerate(prompts))
        async with self.server.client(self._concurrency) as client:

            async def worker() -> None:
                for index, prompt in waiting:
                    arrived.put(replace(await self._reply(client, prompt, parameters), index=index))

            async def until_stopped() -> None:
                while not stop.is_set():
                    await asyncio.sleep(0.05)

            watcher = asyncio.create_task(until_stopped())
            workers = [
                asyncio.create_task(worker()) for _ in range(min(self._concurrency, len(prompts)))
            ]
            running = set(workers)
            try:
                while running and not watcher.done():
                    done, _ = await asyncio.wait(
                        {watcher, *running}, return_when=asyncio.FIRST_COMPLETED
                    )
                    running -= done
                    for task in done:
                        task.result()
            finally:
                for task in (watcher, *workers):
                    task.cancel()
                await asyncio.gather(
                    watcher, *workers, return_exceptions=True
                )  # one fault is reported, though several may have met it

    async def _reply(
        self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation
    ) -> ModelReply:
        """One reply, or what went wrong with it."""
        try:
            reply = await self._ask(client, prompt, parameters)
        except _Fatal:
            raise
        except (
            Exception
        ) as error:  # whatever a server may make a client do wrong is the matter of this sample
            reply = ModelReply(index=-1, error=fault(error))
        self._answered += reply.error is None
        return reply

    async def _ask(
        self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation
    ) -> ModelReply:
        """One reply, with retries. A refusal of this prompt (4xx) or the last failed try becomes a
        reply with `error`."""
        problem, unreachable = "", 0
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1) * (0.5 + random.random()))
            start = time.perf_counter()
            try:
                return (await self._stream(client, prompt, parameters)).reply(
                    time.perf_counter() - start
                )
            except httpx.HTTPStatusError as error:
                problem = fault(error)
                if _says_too_long(error.response.status_code, problem):
                    return ModelReply(index=-1, finish_reason="context", refusal=problem)
                self._count_refusal(error.response.status_code, problem)
                if error.response.status_code not in _RETRIED:
                    break
                await _wait_retry_after(error.response)
            except FAULTS as error:
                problem = fault(error)
                if isinstance(error, StreamError) and _says_too_long(400, problem):
                    return ModelReply(index=-1, finish_reason="context", refusal=problem)
                unreachable += isinstance(error, httpx.ConnectError)
        else:
            self._count_failure(problem)
        if unreachable == self._retries + 1:
            raise _Fatal(
                "the server is gone", "start it and repeat the command; replies in --out are kept"
            )
        return ModelReply(index=-1, error=problem)

    def _count_failure(self, problem: str) -> None:
        """Raise _Fatal where all that it is asked fails, with every try: hours of tries would be no
        different."""
        self._failed += 1
        if not self._answered and self._failed > max(_HOPELESS, self._concurrency):
            message = (
                f"none of the first {self._failed} requests got a reply, the last for: {problem}"
            )
            raise _Fatal(
                message,
                "mend the server and repeat the command; `quantkit regrade` grades what an earlier "
                "run kept",
            )

    def _count_refusal(self, status: int, problem: str) -> None:
        """Raise _Fatal where it refuses all that it is asked."""
        self._refused += status in _REFUSED
        if not self._answered and self._refused >= max(_HOPELESS, self._concurrency):
            raise _Fatal(problem, "check the address, the model name and --api-key")

    async def _stream(
        self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation
    ) -> ReplyReader:
        path = "/completions" if prompt.text is not None else "/chat/completions"
        reader = ReplyReader()
        async with aclosing(
            self.server.stream(
                client, path, request_body(self.name, prompt, parameters) | self._more
            )
        ) as events:
            try:
                async for event in events:
                    reader.add(event)
            except (httpx.TransportError, TimeoutError):
                if (
                    reader.finish_reason is None
                ):  # with one the reply is whole, however the connection ends
                    raise
        return reader

    def close(self) -> None:
        """Nothing is held between calls."""


def request_body(model: str, prompt: Prompt, parameters: Generation) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "temperature": parameters.temperature,
        "top_p": parameters.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if parameters.temperature > 0:
        body["seed"] = prompt.seed
    if parameters.max_tokens is not None:
        body["max_tokens"] = parameters.max_tokens
    if parameters.stop:
        body["stop"] = list(parameters.stop)
    if prompt.text is not None:
        return body | {"prompt": prompt.text}
    return body | {"messages": list(prompt.messages)}


def _says_too_long(status: int, problem: str) -> bool:
    """Whether a refusal is for the length of the prompt, or of prompt and reply: the model's limit,
    and no fault of the server."""
    return status in (400, 413, 422) and any(words in problem.lower() for words in _TOO_LONG)


async def _wait_retry_after(response: httpx.Response) -> None:
    """Retry-After in seconds or as a date, a minute at most."""
    after = response.headers.get("retry-after", "")
    seconds = 0.0
    if after.isdecimal():
        seconds = float(after)
    elif after:
        with suppress(ValueError, TypeError):
            seconds = parsedate_to_datetime(after).timestamp() - time.time()
    await asyncio.sleep(min(max(seconds, 0.0), 60.0))
