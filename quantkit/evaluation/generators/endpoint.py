"""Any OpenAI-compatible server as a generator: many requests in flight, retried with backoff, read as a stream."""

import asyncio
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from quantkit.errors import QuantkitError
from quantkit.evaluation.generators.generator import Generation, ModelReply, Prompt
from quantkit.evaluation.openai_server import FAULTS, OpenAIServer, StreamError, fault

TRIES = 6
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_FATAL = {401, 403, 404, 405}  # about the address or the key, not about one prompt


class _Fatal(Exception):
    """A problem that every further request would meet too, and its remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass
class _Reading:
    """What a stream has brought so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Endpoint:
    """`url` is the server, with or without /v1 or a method behind it. `model` defaults to the only one that the server lists."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 600.0,
        backoff_s: float = 1.0,
    ) -> None:
        self.server = OpenAIServer(url, api_key=api_key, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s)
        self._concurrency = concurrency
        self._backoff_s = backoff_s
        self.name = model or self.server.only_model()
        self.identity: dict[str, Any] = {"endpoint": self.server.base, "model": self.name}

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
                    arrived.put(replace(await self._ask(client, prompt, parameters), index=index))

            async def until_stopped() -> None:
                while not stop.is_set():
                    await asyncio.sleep(0.05)

            watcher = asyncio.create_task(until_stopped())
            workers = [asyncio.create_task(worker()) for _ in range(min(self._concurrency, len(prompts)))]
            running = set(workers)
            try:
                while running and not watcher.done():
                    done, _ = await asyncio.wait({watcher, *running}, return_when=asyncio.FIRST_COMPLETED)
                    running -= done
                    for task in done:
                        task.result()
            finally:
                for task in (watcher, *workers):
                    task.cancel()
                await asyncio.gather(watcher, *workers, return_exceptions=True)  # one fault is told, though several may have met it

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation) -> ModelReply:
        """One reply, with retries. A refusal of this prompt (4xx) or the last failed try becomes a completion with `error`.

        A server that takes no connection any more ends the run instead: the other prompts would only wait for it in turn.
        """
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1) * (0.5 + random.random()))
            start = time.perf_counter()
            try:
                reading = await self._stream(client, prompt, parameters)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                problem = fault(error)
                if status in _FATAL:
                    raise _Fatal(problem, "check the address, the model name and --api-key") from error
                if status not in _RETRIED:
                    break
                await _wait_as_told(error.response)
            except FAULTS as error:
                problem = fault(error)
                if attempt == TRIES - 1 and isinstance(error, httpx.ConnectError):
                    raise _Fatal("the server is gone", "start it and repeat the command; replies in --out are kept") from error
            else:
                return ModelReply(
                    index=-1,
                    text=_joined(reading.text),
                    finish_reason=reading.finish_reason or "stop",
                    prompt_tokens=reading.prompt_tokens,
                    completion_tokens=reading.completion_tokens,
                    latency_s=time.perf_counter() - start,
                    reasoning=_joined(reading.reasoning) if reading.reasoning else None,
                )
        return ModelReply(index=-1, error=problem)

    async def _stream(self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation) -> _Reading:
        path = "/completions" if prompt.text is not None else "/chat/completions"
        reading = _Reading()
        async for event in self.server.stream(client, path, request_body(self.name, prompt, parameters)):
            _read_event(event, reading)
        if reading.finish_reason is None:
            raise StreamError("the stream ended without a finish reason")
        return reading

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


def _read_event(event: dict[str, Any], reading: _Reading) -> None:
    for choice in event.get("choices") or []:
        part = choice.get("delta") or choice.get("message") or {}
        reading.text.append(part.get("content") or choice.get("text") or "")
        thought = part.get("reasoning_content") or part.get("reasoning")
        if thought:
            reading.reasoning.append(thought)
        if choice.get("finish_reason"):
            reading.finish_reason = "length" if choice["finish_reason"] == "length" else "stop"
    usage = event.get("usage") or {}
    reading.prompt_tokens = usage.get("prompt_tokens") or reading.prompt_tokens
    reading.completion_tokens = usage.get("completion_tokens") or reading.completion_tokens


async def _wait_as_told(response: httpx.Response) -> None:
    told = response.headers.get("retry-after", "")
    if told.isdigit():
        await asyncio.sleep(min(int(told), 60))


def _joined(pieces: list[str]) -> str:
    """One text: a pair of surrogates that two pieces share becomes its character, a lone one, which no file takes, U+FFFD."""
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
