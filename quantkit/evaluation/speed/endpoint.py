"""Requests to an OpenAI-compatible server, streamed, so that the first token's time is seen.

Prompts are random words; a tokenizer, where one is given, cuts them to the exact length. Token counts come from the server's `usage`.
Only a chunk that carries output (text or reasoning) counts as a token's arrival: role-only first chunks come before any computation.
"""

import asyncio
import random
from collections.abc import Callable, Iterator

import httpx

from quantkit.evaluation.openai_server import FAULTS, OpenAIServer, fault
from quantkit.evaluation.speed.measure import RequestTimes, now

_WORDS = ("time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child", "eye", "place", "work", "week")
_OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class EndpointTarget:
    """`url` is the server, `model` its name there; None: the only one that it serves. `cut(words, n)` returns a text of n tokens; None:
    one word a token is assumed. Raises QuantkitError where the server does not answer."""

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, cut: Callable[[str, int], str] | None = None
    ) -> None:
        self.server = OpenAIServer(url, api_key=api_key)
        self.name, self.cut = url, cut
        self.model = model or self.server.only_model()

    def check(self, input_len: int, output_len: int, concurrency: int) -> None:
        """Nothing is known of a server's limits before it is asked; what it refuses is reported as failed."""

    def run(self, input_len: int, output_len: int, concurrency: int, requests: int, seed: int) -> Iterator[RequestTimes]:
        generator = random.Random(seed)
        prompts = []
        for _ in range(requests):
            words = " ".join(generator.choices(_WORDS, k=input_len))
            prompts.append(self.cut(words, input_len) if self.cut else words)
        yield from asyncio.run(self._all(prompts, output_len, concurrency))

    def close(self) -> None:
        """The server is somebody else's."""

    async def _all(self, prompts: list[str], output_len: int, concurrency: int) -> list[RequestTimes]:
        slots = asyncio.Semaphore(concurrency)
        async with self.server.client(concurrency) as client:

            async def one(prompt: str) -> RequestTimes:
                async with slots:
                    return await self._request(client, prompt, output_len)

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def _request(self, client: httpx.AsyncClient, prompt: str, output_len: int) -> RequestTimes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        sent = now()
        first = last = 0.0
        chunks = 0
        usage: dict[str, int] = {}
        try:
            async for event in self.server.stream(client, "/chat/completions", body):
                usage = event.get("usage") or usage
                if any((choice.get("delta") or {}).get(field) for choice in event.get("choices") or [] for field in _OUTPUT_FIELDS):
                    last = now()
                    first = first or last
                    chunks += 1
        except FAULTS as error:
            return RequestTimes(sent, 0, 0, 0, 0, fault(error))
        if not first:
            return RequestTimes(sent, 0, 0, 0, 0, "the reply had no text")
        return RequestTimes(sent, first, last, usage.get("prompt_tokens", 0), usage.get("completion_tokens", chunks))
