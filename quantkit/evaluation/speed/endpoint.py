"""Requests to an OpenAI-compatible server, streamed, so that the first token's time is seen.

Prompts are random words, others in every run: a server may keep what it computed of the last one's.
A tokenizer, where one is given, cuts them to the exact length. Token counts come from the server's
`usage`; of a reply without one, pieces are counted, and the row says so. A reply that neither ends
with a reason nor has a usage was cut, and failed. Only a chunk that carries output (text or
reasoning) counts as a token's arrival: role-only first chunks come before any computation.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import httpx

from quantkit.evaluation.openai_server import (
    ABORT_REASONS,
    REQUEST_ERRORS,
    OpenAIServer,
    StreamError,
    describe_error,
)
from quantkit.evaluation.speed.measure import RequestTimes, Workload, now

WORDS = (
    "time",
    "person",
    "year",
    "way",
    "day",
    "thing",
    "man",
    "world",
    "life",
    "hand",
    "part",
    "child",
    "eye",
    "place",
    "work",
    "week",
)
_CHUNKS_PER_TOKEN, _EXTRA_CHUNKS = 4, 64
"""More than any server sends of as many tokens as were asked for; one that does not count would go
on for ever."""
_MOST_TOKENS = 2**31
_OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class EndpointTarget:
    """`url` is the server, `model` its name there; None: the only one that it serves. `cut(words,
    n)` returns a text of n tokens; None: one word a token is assumed. Raises QuantkitError where
    the server does not answer."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        cut: Callable[[str, int], str] | None = None,
    ) -> None:
        self.server = OpenAIServer(url, api_key=api_key)
        self.name, self.cut = url, cut
        self._run = secrets.token_hex(8)
        self.model = str(self.server.find_model(model)["id"])

    def check(self, work: Workload) -> None:
        """Nothing is known of a server's limits before it is asked; what it refuses is reported as
        failed."""

    def run(self, work: Workload) -> Iterator[RequestTimes]:
        yield from asyncio.run(self._all(self._prompts(work), work))

    def _prompts(self, work: Workload) -> list[str]:
        if work.prompts:
            return [work.prompts[number % len(work.prompts)] for number in range(work.requests)]
        generator = work.rng(self._run)
        texts = (" ".join(generator.choices(WORDS, k=work.input_len)) for _ in range(work.requests))
        return [self.cut(text, work.input_len) if self.cut else text for text in texts]

    def close(self) -> None:
        """The server is not ours."""

    async def _all(self, prompts: list[str], work: Workload) -> list[RequestTimes]:
        """At a rate a request is sent when it arrives; the time that it waits for one of
        `concurrency` slots counts."""
        slots = asyncio.Semaphore(work.concurrency)
        async with self.server.client(work.concurrency) as client:
            start = now()

            async def one(prompt: str, arrival: float) -> RequestTimes:
                await asyncio.sleep(max(0.0, start + arrival - now()))
                arrived = now()
                async with slots:
                    return await self._request(
                        client, prompt, work, arrived if work.rate is not None else now()
                    )

            return list(
                await asyncio.gather(*(one(*pair) for pair in zip(prompts, work.arrivals())))
            )

    async def _request(
        self, client: httpx.AsyncClient, prompt: str, work: Workload, sent: float
    ) -> RequestTimes:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": work.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": not work.prompts,
        }
        moments: list[float] = []
        usage: dict[str, Any] = {}
        ended = ""
        most = _CHUNKS_PER_TOKEN * work.output_len + _EXTRA_CHUNKS
        try:
            async with aclosing(self.server.stream(client, "/chat/completions", body)) as events:
                async for event in events:
                    usage = event.get("usage") or usage
                    ended = _finish_reason(event) or ended
                    if _has_output(event):
                        moments.append(now())
                    if len(moments) > most:
                        raise StreamError(
                            f"the reply does not end: it has more than {most} pieces, and "
                            f"{work.output_len} tokens were asked for"
                        )
            if ended in ABORT_REASONS or not (ended or usage):
                raise StreamError(
                    f"the server gave the reply up (finish_reason {ended!r})"
                    if ended
                    else "the stream ended before the reply did"
                )
            prompt_tokens, counted = (
                _token_count(usage, "prompt_tokens") or 0,
                _token_count(usage, "completion_tokens"),
            )
        except (
            *REQUEST_ERRORS,
            AttributeError,
            TypeError,
        ) as error:  # the last two: JSON of another shape than a reply's
            return RequestTimes(sent, 0, 0, 0, 0, describe_error(error))
        if not moments:
            return RequestTimes(sent, 0, 0, 0, 0, "the reply had no text that was streamed")
        gaps = tuple(after - before for before, after in itertools.pairwise(moments))
        output_tokens = counted or len(moments)
        return RequestTimes(
            sent,
            moments[0],
            moments[-1],
            prompt_tokens,
            output_tokens,
            gaps=gaps,
            counted=bool(counted),
        )


def _token_count(usage: dict[str, Any], name: str) -> int | None:
    """None where the server does not know, which some say by a negative one. Raises StreamError for
    what is no number of tokens."""
    value = usage.get(name)
    if value is None:
        return None
    if type(value) in (int, float) and value <= _MOST_TOKENS and value == value // 1:
        return int(value) if value >= 0 else None
    raise StreamError(
        f"the usage of the reply has {name} = {str(value)[:50]}, which is no number of tokens"
    )


def _has_output(event: dict[str, Any]) -> bool:
    return any(
        (choice.get("delta") or {}).get(name)
        for choice in event.get("choices") or []
        for name in _OUTPUT_FIELDS
    )


def _finish_reason(event: dict[str, Any]) -> str:
    """In small letters; empty where the event has none, or the word null."""
    said = next(
        (
            str(reason).lower()
            for choice in event.get("choices") or []
            if (reason := choice.get("finish_reason"))
        ),
        "",
    )
    return "" if said == "null" else said
