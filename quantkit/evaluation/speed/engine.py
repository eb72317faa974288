"""Requests to the engine in this process: no server in between, and no tokenizer unless prompts are
given."""

import time
from collections.abc import Iterator
from itertools import pairwise

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.speed.measure import RequestTimes, now
from quantkit.evaluation.speed.workload import Workload
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.tokenizer.chat import ChatTokenizer


def as_chat(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Token ids of a prompt that is given as text."""
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
        """Closed loop: a new request is sent the moment one finishes. At a rate: at its time, or
        when there is room after it.

        The time that a request waited for room counts: it is sent when it arrives.
        """
        params = SamplingParams(max_new_tokens=work.output_len, ignore_eos=not work.prompts)
        prompts, arrivals = iter(self._prompts(work)), list(work.arrivals())
        start, sent = now(), 0
        running: list[_Running] = []
        while sent < work.requests or running:
            while (
                sent < work.requests
                and len(running) < work.concurrency
                and now() >= start + arrivals[sent]
            ):
                arrived = start + arrivals[sent] if work.rate is not None else None
                running.append(
                    _Running(self.engine.submit(next(prompts), params, index=sent), arrived)
                )
                sent += 1
            if not running:
                time.sleep(max(0.0, start + arrivals[sent] - now()))
                continue
            self.engine.step()
            for one in running:
                one.look()
            for one in [one for one in running if one.sequence.finish_reason]:
                running.remove(one)
                yield one.times()

    def _prompts(self, work: Workload) -> list[list[int]]:
        if work.prompts:
            encoded = [
                as_chat(self.engine.tokenizer, text) for text in work.prompts[: work.requests]
            ]
            return [encoded[number % len(encoded)] for number in range(work.requests)]
        generator = work.generator()
        vocab = self.engine.loaded.config.vocab_size
        return [
            [generator.randrange(vocab) for _ in range(work.input_len)]
            for _ in range(work.requests)
        ]

    def close(self) -> None:
        self.engine.close()


class _Running:
    """An open request, and when its tokens came. arrived: None where it was sent the moment there
    was room."""

    def __init__(self, sequence: Sequence, arrived: float | None) -> None:
        self.sequence = sequence
        self.arrived = sequence.arrival if arrived is None else arrived
        self.count, self.moments = 0, list[float]()

    def look(self) -> None:
        """After a step."""
        if len(self.sequence.generated) > self.count:
            self.count = len(self.sequence.generated)
            self.moments.append(self.sequence.last_token)

    def times(self) -> RequestTimes:
        """Raises what was wrong with the request, if anything was."""
        one = self.sequence
        if one.fault is not None:
            raise one.fault
        gaps = tuple(after - before for before, after in pairwise(self.moments))
        return RequestTimes(
            self.arrived,
            one.first_token,
            one.last_token,
            one.prompt_len,
            len(one.generated),
            gaps=gaps,
        )
