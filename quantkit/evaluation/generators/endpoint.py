"""An OpenAI-compatible server as a generator: concurrent streamed requests with retries and
backoff.

An error of one request is the error of its sample. The run stops only where continuing cannot help:
the server accepts no connection any more, it refused all first requests as for a wrong key or
address, or none of the first requests got a reply after all retries.
"""

import asyncio
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.generators.generator import (
    Drafts,
    Generation,
    ModelReply,
    Prompt,
    estimated_tokens,
)
from quantkit.evaluation.generators.openai_server import (
    ABORT_REASONS,
    REQUEST_ERRORS,
    TIMEOUT_S,
    OpenAIServer,
    StreamError,
    describe_error,
)

T = TypeVar("T")
LARGEST_REPLY = 64 * 2**20  # characters
_MOST_TOKENS = 2**53
_LONGEST_REASON = 100  # characters
_FINISH_REASONS = dict.fromkeys(
    ("eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "function_call"), "stop"
) | dict.fromkeys(("max_tokens", "model_length"), "length")


@dataclass(eq=False)
class ReplyReader:
    """Collects the events of one streamed reply. Malformed events raise StreamError, so they
    fail one sample only."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    size: int = 0

    def add(self, event: JsonObject) -> None:
        """Add one event. Raises StreamError where it is malformed."""
        for choice in _field(event, "choices", list):
            if str(choice.get("index") or 0) == "0":
                self._add_choice(choice)
        usage = _field(event, "usage", dict)
        self.prompt_tokens = _count(usage, "prompt_tokens") or self.prompt_tokens
        self.completion_tokens = _count(usage, "completion_tokens") or self.completion_tokens

    def _add_choice(self, choice: JsonObject) -> None:
        part = _field(choice, "delta", dict) or _field(choice, "message", dict)
        said, thought = _content(part)
        text = said or _field(choice, "text", str)
        thought += (
            _field(part, "reasoning_content", str)
            or _field(part, "reasoning", str)
            or _field(part, "thinking", str)
        )
        if (text or thought) and self.finish_reason is not None:
            raise StreamError("the server sent text after the end of the reply")
        self.logprobs += _field(_field(choice, "logprobs", dict), "content", list)
        self.text.append(text)
        self.reasoning.append(thought)
        self.size += len(text) + len(thought)
        if self.size > LARGEST_REPLY:
            raise StreamError(f"a reply of more than {LARGEST_REPLY >> 20} million characters")
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise StreamError(f"finish_reason is {reason!r}")
        reason = reason.lower()[:_LONGEST_REASON] if reason else None
        if reason != "null":  # some servers send the string "null"
            self.finish_reason = reason or self.finish_reason

    def reply(self, latency_s: float) -> ModelReply:
        """The finished reply. Raises StreamError where the server sent no finish reason, or
        aborted."""
        return ModelReply(
            index=-1,
            text="".join(self.text),
            finish_reason=self._finish_reason(),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            latency_s=latency_s,
            reasoning="".join(self.reasoning) or None,
            logprobs=tuple(self.logprobs),
        )

    def _finish_reason(self) -> str:
        """stop, length, or the server's own finish reason."""
        if self.finish_reason is None:
            raise StreamError("the stream ended without a finish reason")
        if self.finish_reason in ABORT_REASONS:
            raise StreamError(
                f"the server aborted the reply (finish_reason {self.finish_reason!r})"
            )
        return _FINISH_REASONS.get(self.finish_reason, self.finish_reason)


_KINDS: dict[Any, str] = {dict: "an object", list: "a list of objects", str: "a string"}


def _field(holder: JsonObject, name: str, kind: type[T]) -> T:
    """A field of an event, empty where it is missing."""
    value = holder.get(name) or kind()
    items = value if isinstance(value, list) else []
    if not isinstance(value, kind) or not all(isinstance(one, dict) for one in items):
        raise StreamError(f"{name} is not {_KINDS[kind]}: {str(value)[:100]!r}")
    return value


def _content(part: JsonObject) -> tuple[str, str]:
    """The text and the reasoning of a content field, which some servers send as a list of typed
    parts."""
    if not isinstance(part.get("content"), list):
        return _field(part, "content", str), ""
    text, thought = "", ""
    for one in _field(part, "content", list):
        kind = one.get("type")
        if kind not in ("text", "output_text", "thinking", "reasoning"):
            raise StreamError(f"a part of the content is of type {kind!r}")
        if kind in ("text", "output_text"):
            text += _field(one, "text", str)
        elif isinstance(one.get("thinking"), list):
            thought += "".join(
                _field(inner, "text", str) for inner in _field(one, "thinking", list)
            )
        else:
            thought += _field(one, "thinking", str) or _field(one, "text", str)
    return text, thought


def _count(holder: JsonObject, name: str) -> int:
    """A number of tokens; 0 where unknown, which some servers write as a negative number."""
    value = holder.get(name) or 0
    if type(value) not in (int, float) or value != value // 1 or value > _MOST_TOKENS:
        raise StreamError(f"{name} is not a token count: {str(value)[:100]!r}")
    return max(int(value), 0)


RETRIES = 5
_RETRY_STATUS = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_REFUSAL_STATUS = {
    401,
    403,
    404,
    405,
}  # wrong address or key if every request gets it, else one bad prompt
# refusals, or failed samples, before the first reply; at least the number of concurrent requests
_MIN_FAILURES = 4
_LENGTH_STATUS = {400, 413, 422}  # of a prompt, or of prompt and reply, beyond the context
_CONTEXT_ERRORS = (
    "context length",
    "context window",
    "context limit",
    "context_length_exceeded",
    "too long",
    "max_model_len",
    "max_seq_len",
    "max_new_tokens` must be",  # TGI
)


class Endpoint:
    """`url` is the server, with or without /v1 or a method. `model` defaults to the only model
    listed.

    `identity` describes the model, not the address: its name, and `revision` if given, else what
    the server reports. retries: further attempts after a transient failure. timeout_s: longest wait
    for the next event. top_logprobs: alternatives returned at every position of a chat reply.
    fields: of every request, in place of quantkit's own; None leaves one out. `context`: what the
    server says its longest prompt and reply are together, in tokens, or None.
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
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        backoff_s: float = 1.0,
        top_logprobs: int = 0,
        fields: JsonObject | None = None,
    ) -> None:
        self.server = OpenAIServer(url, api_key=api_key, timeout_s=timeout_s)
        self._concurrency = concurrency
        self._retries = retries
        self._backoff_s = backoff_s
        self._fields: JsonObject = (
            {"logprobs": True, "top_logprobs": top_logprobs} if top_logprobs else {}
        ) | (fields or {})
        self._limit_name = "max_tokens"
        entry = self.server.find_model(model)
        self.name: str = entry["id"]
        context = entry.get("max_model_len")
        self.context = context if isinstance(context, int) and context > 0 else None
        facts = (
            {"revision": revision}
            if revision
            else {name: value for name, value in entry.items() if name != "id"}
        )
        self.identity: JsonObject = {"model": self.name} | facts
        self._answered, self._failed = 0, 0
        self._open: set[ReplyReader] = set()

    def generate(self, prompts: Sequence[Prompt], parameters: Generation) -> Iterator[ModelReply]:
        """Replies as they finish. Stopping the iteration cancels running requests."""
        arrived: queue.Queue[ModelReply | BaseException | None] = queue.Queue()
        stop = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._all(prompts, parameters, arrived, stop))
                arrived.put(None)
            except BaseExceptionGroup as found:  # of the workers; one is reported
                arrived.put(found.exceptions[0])
            except BaseException as error:
                arrived.put(error)

        thread = threading.Thread(target=work, daemon=True, name="quantkit-endpoint")
        thread.start()
        try:
            while (item := arrived.get()) is not None:
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
        async with self.server.client(self._concurrency) as client, asyncio.TaskGroup() as group:

            async def worker() -> None:
                for index, prompt in waiting:
                    arrived.put(replace(await self._reply(client, prompt, parameters), index=index))

            count = min(self._concurrency, len(prompts))
            running = {group.create_task(worker()) for _ in range(count)}
            while running:
                _, running = await asyncio.wait(running, timeout=0.05)
                if stop.is_set():
                    for task in running:
                        task.cancel()

    async def _reply(
        self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation
    ) -> ModelReply:
        """One reply, or its error."""
        try:
            reply = await self._ask(client, prompt, parameters)
        except QuantkitError:
            raise  # every further request would meet it too
        except Exception as error:  # any error caused by the server fails this sample only
            reply = ModelReply(index=-1, error=describe_error(error))
        self._answered += reply.error is None
        return reply

    async def _ask(
        self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation
    ) -> ModelReply:
        """One reply, with retries. A refused prompt (4xx) or the last failed attempt gives a
        reply with `error`."""
        problem, unreachable = "", 0
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1) * (0.5 + random.random()))
            start, limit_name = time.perf_counter(), self._limit_name
            try:
                return (await self._stream(client, prompt, parameters)).reply(
                    time.perf_counter() - start
                )
            except REQUEST_ERRORS as error:
                problem = describe_error(error)
                answer = error.response if isinstance(error, httpx.HTTPStatusError) else None
                status = answer.status_code if answer is not None else None
                refused = isinstance(error, StreamError) or status in _LENGTH_STATUS
                if refused and any(words in problem.lower() for words in _CONTEXT_ERRORS):
                    return ModelReply(index=-1, finish_reason="context", refusal=problem)
                if answer is not None:
                    if limit_name == "max_tokens" and _OTHER_LIMIT in problem:
                        self._limit_name = _OTHER_LIMIT  # what newer servers take instead
                        return await self._ask(client, prompt, parameters)
                    if status not in _RETRY_STATUS:
                        if status in _REFUSAL_STATUS:
                            self._count_failure(problem)
                        break
                    await _wait_retry_after(answer)
                unreachable += isinstance(error, httpx.ConnectError)
        else:
            self._count_failure(problem)
        if unreachable == self._retries + 1:
            raise QuantkitError(
                f"{self.server.base}: the server is not reachable any more",
                "start it and repeat the command; replies in --out are stored",
            )
        return ModelReply(index=-1, error=problem)

    def _count_failure(self, problem: str) -> None:
        """Raise QuantkitError where every request so far was refused, or failed after all
        retries."""
        self._failed += 1
        if not self._answered and self._failed >= max(_MIN_FAILURES, self._concurrency):
            raise QuantkitError(
                f"{self.server.base}: none of the first {self._failed} requests got a reply; last "
                f"error: {problem}",
                "check the address, the model name, --api-key and the server, and repeat the command",
            )

    async def _stream(
        self, client: httpx.AsyncClient, prompt: Prompt, parameters: Generation
    ) -> ReplyReader:
        path = "/completions" if prompt.text is not None else "/chat/completions"
        reader = ReplyReader()
        self._open.add(reader)
        try:
            body = self._body(prompt, parameters)
            async with aclosing(self.server.stream(client, path, body)) as events:
                async for event in events:
                    reader.add(event)
        except (httpx.TransportError, TimeoutError):
            if reader.finish_reason is None:  # with a finish reason the reply is complete
                raise
        finally:
            self._open.discard(reader)
        return reader

    def _body(self, prompt: Prompt, parameters: Generation) -> JsonObject:
        """The request, whose reply is no longer than the server's context leaves room for."""
        if self.context is not None and parameters.max_tokens is not None:
            room = max(1, self.context - most_tokens(prompt))
            parameters = replace(parameters, max_tokens=min(parameters.max_tokens, room))
        body = request_body(self.name, prompt, parameters)
        if "max_tokens" in body:
            body[self._limit_name] = body.pop("max_tokens")
        return {name: value for name, value in (body | self._fields).items() if value is not None}

    def open_tokens(self) -> list[int]:
        """A chunk counts as a token, or, where it holds more than one, by its length."""
        return [
            max(len(reader.text), estimated_tokens(*reader.text, *reader.reasoning))
            for reader in list(self._open)
        ]

    def drafts(self) -> Drafts | None:
        """The counters of quantkit's and vLLM's /metrics, of all requests to the server."""
        found = self.server.metrics()
        names = [[name for name in found if name.endswith(end)] for end in _DRAFT_COUNTERS]
        drafted, accepted = (sum(found[name] for name in ours) for ours in names)
        return Drafts(int(drafted), int(accepted)) if names[0] else None

    def close(self) -> None: ...


_DRAFT_COUNTERS = (
    ("quantkit_drafted_tokens_total", "spec_decode_num_draft_tokens_total"),
    ("quantkit_accepted_tokens_total", "spec_decode_num_accepted_tokens_total"),
)
_OTHER_LIMIT = "max_completion_tokens"


def most_tokens(prompt: Prompt) -> int:
    """An upper bound of a prompt's tokens: a digit can be one, other texts have two bytes a token
    or more, a chat template adds some."""
    text = "".join([prompt.text or "", *(message["content"] for message in prompt.messages)])
    return (len(text.encode()) + sum(map(str.isdigit, text))) // 2 + 64


def request_body(model: str, prompt: Prompt, parameters: Generation) -> JsonObject:
    body: JsonObject = {
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


async def _wait_retry_after(response: httpx.Response) -> None:
    """Wait for Retry-After, given in seconds or as a date; at most a minute."""
    after = response.headers.get("retry-after", "")
    seconds = 0.0
    if after.isdecimal():
        seconds = float(after)
    elif after:
        with suppress(ValueError, TypeError):
            seconds = parsedate_to_datetime(after).timestamp() - time.time()
    await asyncio.sleep(min(max(seconds, 0.0), 60.0))
