"""Requests to an OpenAI-compatible server, streamed, so that the first token's time is seen.

Prompts are random words; a tokenizer, where one is given, cuts them to the exact length. Token counts come from the server's `usage`.
Only a chunk that carries output (text or reasoning) counts as a token's arrival: role-only first chunks come before any computation.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from quantkit.errors import QuantkitError
from quantkit.evaluation.speed.measure import RequestTimes, now

_WORDS = ("time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child", "eye", "place", "work", "week")
_OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class EndpointTarget:
    """`url` is the server's base, with or without /v1. `cut(words, n)` returns a text of n tokens; None: one word a token is assumed."""

    def __init__(
        self, url: str, model: str, *, api_key: str | None = None, timeout_s: float = 600, cut: Callable[[str, int], str] | None = None
    ) -> None:
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self.name, self.model, self.timeout_s, self.cut = url, model, timeout_s, cut
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @classmethod
    def connect(cls, url: str, model: str | None = None, **options: Any) -> "EndpointTarget":
        """Ask the server for its model where none is named. Raises QuantkitError where it does not answer."""
        target = cls(url, model or "", **options)
        try:
            reply = httpx.get(f"{target.url}/models", headers=target.headers, timeout=10)
            reply.raise_for_status()
            target.model = model or reply.json()["data"][0]["id"]
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise QuantkitError(
                f"no OpenAI-compatible server answers at {url}: {error or type(error).__name__}", "start one, check the address"
            ) from error
        return target

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
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(headers=self.headers, timeout=self.timeout_s, limits=limits) as client:

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
            async with client.stream("POST", f"{self.url}/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")[:200]
                    return RequestTimes(sent, 0, 0, 0, 0, f"HTTP {reply.status_code}: {text}")
                async for line in reply.aiter_lines():
                    if not line.startswith("data:") or line.strip() == "data: [DONE]":
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        return RequestTimes(sent, 0, 0, 0, 0, str(event["error"])[:200])
                    usage = event.get("usage") or usage
                    if any(choice.get("delta", {}).get(field) for choice in event.get("choices", []) for field in _OUTPUT_FIELDS):
                        last = now()
                        first = first or last
                        chunks += 1
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            return RequestTimes(sent, 0, 0, 0, 0, f"{type(error).__name__}: {error}")
        if not first:
            return RequestTimes(sent, 0, 0, 0, 0, "the reply had no text")
        return RequestTimes(sent, first, last, usage.get("prompt_tokens", 0), usage.get("completion_tokens", chunks))
