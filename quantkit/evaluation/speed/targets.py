"""What a speed is measured of: the engine in this process, or an OpenAI-compatible server.

A server's requests are streamed, so that the first token's time is measured. Prompts are random
words, one a token, different in every run, since a server may cache prefixes. Token counts come
from the server's `usage`; without one, chunks are counted, and the row says so. A reply with
neither a finish reason nor a usage failed. Only a chunk with output (text or reasoning) counts as a
token's arrival: role-only first chunks come before any computation.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import httpx

from quantkit.checkpoint.hub import find_model
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generators.endpoint import ReplyReader, request_body
from quantkit.evaluation.generators.generator import Generation, Prompt, reject_cache_option
from quantkit.evaluation.generators.openai_server import (
    REQUEST_ERRORS,
    OpenAIServer,
    StreamError,
    describe_error,
    is_url,
)
from quantkit.evaluation.speed.measure import RequestTimes, Target, Workload, now
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence as EngineSequence
from quantkit.tokenizer.chat import ChatTokenizer

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


def encode_prompt(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Token ids of a text prompt, as a chat message."""
    return tokenizer.encode_chat([{"role": "user", "content": text}])


class EngineTarget:
    def __init__(self, engine: Engine, name: str, max_batch: int) -> None:
        self.engine, self.name, self.max_batch = engine, name, max_batch

    def check(self, work: Workload) -> None:
        longest = max(map(len, self._prompts(work)), default=0) if work.prompts else work.input_len
        if longest + work.output_len > self.engine.max_model_len:
            raise QuantkitError(
                f"{longest} input and {work.output_len} output tokens exceed the context of "
                f"{self.engine.max_model_len}",
                "lower --input-len or --output-len",
            )
        if work.concurrency > self.max_batch:
            raise QuantkitError(
                f"concurrency {work.concurrency} exceeds the engine's batch of {self.max_batch}",
                "lower --concurrency",
            )

    def run(self, work: Workload) -> Iterator[RequestTimes]:
        """Closed loop: send a new request as soon as one finishes. With a rate: at its arrival
        time, or when a slot is free after it; the waiting time counts as part of the request."""
        params = SamplingParams(max_new_tokens=work.output_len, ignore_eos=not work.prompts)
        prompts, arrivals = iter(self._prompts(work)), list(work.arrivals())
        start, sent = now(), 0
        # Each with its arrival and the times of its tokens.
        running: list[tuple[EngineSequence, float, list[float]]] = []
        while sent < work.requests or running:
            while (
                sent < work.requests
                and len(running) < work.concurrency
                and now() >= start + arrivals[sent]
            ):
                sequence = self.engine.submit(next(prompts), params, index=sent)
                arrived = start + arrivals[sent] if work.rate is not None else sequence.arrival
                running.append((sequence, arrived, []))
                sent += 1
            if not running:
                time.sleep(max(0.0, start + arrivals[sent] - now()))
                continue
            self.engine.step()
            for sequence, _, moments in running:
                if sequence.generated and sequence.last_token not in moments[-1:]:
                    moments.append(sequence.last_token)
            ended = [one for one in running if one[0].finish_reason]
            running = [one for one in running if not one[0].finish_reason]
            for sequence, arrived, moments in ended:
                if sequence.fault is not None:
                    raise sequence.fault
                yield RequestTimes(
                    arrived,
                    sequence.first_token,
                    sequence.last_token,
                    sequence.prompt_len,
                    len(sequence.generated),
                    gaps=tuple(after - before for before, after in pairwise(moments)),
                )

    def _prompts(self, work: Workload) -> list[list[int]]:
        if work.prompts:
            encoded = [
                encode_prompt(self.engine.tokenizer, text) for text in work.prompts[: work.requests]
            ]
            return [encoded[number % len(encoded)] for number in range(work.requests)]
        generator = work.rng()
        vocab = self.engine.loaded.config.vocab_size
        return [
            [generator.randrange(vocab) for _ in range(work.input_len)]
            for _ in range(work.requests)
        ]

    def close(self) -> None:
        self.engine.close()


def open_target(
    name: str,
    options: EngineOptions,
    *,
    input_len: int,
    output_len: int,
    prompts: Sequence[str] = (),
    api_key: str | None = None,
    served_model: str | None = None,
) -> Target:
    """A URL is a server, anything else a model to load with `options`, for contexts of the longest
    prompt and reply.

    input_len, output_len: their tokens; prompts: used instead of random ones, and counted by the
    model's tokenizer. served_model: the server's name for the model. Raises QuantkitError for a
    server if `options` sets the cache's precision.
    """
    if is_url(name):
        reject_cache_option(name, options.cache)
        return EndpointTarget(name, served_model, api_key=api_key)
    from quantkit.executor.worker import lead_or_follow

    path = find_model(name)
    tokenizer = ChatTokenizer(path)
    longest = output_len + (
        max(len(encode_prompt(tokenizer, text)) for text in prompts) if prompts else input_len
    )
    engine = lead_or_follow(replace(options, model_path=path, max_model_len=longest))
    return EngineTarget(engine, f"{name} on {engine.loaded.device}", options.max_batch)
