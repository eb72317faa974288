"""Requests to an OpenAI-compatible server, streamed, so that the first token's time is measured.

Prompts are random words, one a token, different in every run, since a server may cache prefixes.
Token counts come from the server's `usage`; without one, chunks are counted, and the row says so. A
reply with neither a finish reason nor a usage failed. Only a chunk with output (text or reasoning) counts as a token's arrival: role-only
first chunks come before any computation.
"""

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from contextlib import aclosing

import httpx

from quantkit.evaluation.generators.endpoint import ReplyReader, request_body
from quantkit.evaluation.generators.generator import Generation, Prompt
from quantkit.evaluation.generators.openai_server import (
    REQUEST_ERRORS,
    OpenAIServer,
    StreamError,
    describe_error,
)
from quantkit.evaluation.speed.measure import RequestTimes, Workload, now

_WORDS = "time person year way day thing man world life hand part child eye place work week"
WORDS = _WORDS.split()
_CHUNKS_PER_TOKEN, _EXTRA_CHUNKS = 4, 64
"""Limit on the chunks of a reply: a server that ignores max_tokens would never end."""


class EndpointTarget:
    """`url` is the server, `model` its name there; None: the only model that it serves. Raises
    QuantkitError where the server does not answer."""

    def __init__(self, url: str, model: str | None = None, *, api_key: str | None = None) -> None:
        self.server = OpenAIServer(url, api_key=api_key)
        self.name = url
        self._run = secrets.token_hex(8)
        self.model = str(self.server.find_model(model)["id"])

    def check(self, work: Workload) -> None:
        """A server's limits are not known in advance; refused requests are reported as failed."""

    def run(self, work: Workload) -> Iterator[RequestTimes]:
        yield from asyncio.run(self._all(self._prompts(work), work))

    def _prompts(self, work: Workload) -> list[str]:
        if work.prompts:
            return [work.prompts[number % len(work.prompts)] for number in range(work.requests)]
        generator = work.rng(self._run)
        return [" ".join(generator.choices(WORDS, k=work.input_len)) for _ in range(work.requests)]

    def close(self) -> None: ...

    async def _all(self, prompts: list[str], work: Workload) -> list[RequestTimes]:
        """With a rate, the time that a request waits for one of `concurrency` slots counts."""
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
        message = {"role": "user", "content": prompt}
        body = request_body(
            self.model, Prompt(messages=(message,)), Generation(max_tokens=work.output_len)
        )
        body["ignore_eos"] = not work.prompts
        reader, moments = ReplyReader(), list[float]()
        most = _CHUNKS_PER_TOKEN * work.output_len + _EXTRA_CHUNKS
        try:
            async with aclosing(self.server.stream(client, "/chat/completions", body)) as events:
                async for event in events:
                    before = reader.size
                    reader.add(event)
                    streamed = any("delta" in choice for choice in event.get("choices") or [])
                    if streamed and reader.size > before:
                        moments.append(now())
                    if len(moments) > most:
                        raise StreamError(
                            f"the reply does not end: more than {most} chunks for "
                            f"{work.output_len} requested tokens"
                        )
            if reader.finish_reason is not None or not reader.completion_tokens:
                reader.reply(0.0)  # raises for what was aborted
        except REQUEST_ERRORS as error:
            return RequestTimes(sent, 0, 0, 0, 0, describe_error(error))
        if not moments:
            return RequestTimes(sent, 0, 0, 0, 0, "the reply had no streamed text")
        gaps = tuple(after - before for before, after in itertools.pairwise(moments))
        return RequestTimes(
            sent,
            moments[0],
            moments[-1],
            reader.prompt_tokens,
            reader.completion_tokens or len(moments),
            gaps=gaps,
            counted=bool(reader.completion_tokens),
        )
