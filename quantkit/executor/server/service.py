"""The engine in a thread of its own, and requests to it from an event loop.

The engine is not thread-safe and is touched by its thread alone: requests and cancellations go in
through a queue, and what each step produced comes back to the event loop in one call per step.

It counts what operators see: counters, gauges and histograms in Prometheus' text format (exposition
format 0.0.4), written by hand as there are a dozen of them, and a log of faults.
"""

import asyncio
import logging
import queue
import threading
import traceback
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.common.result import one_line
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.grammar import GrammarError
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Completion, Sequence, TokenLogprob

_LOG = logging.getLogger("uvicorn.error")  # the server's own
LONGEST_MESSAGE = 300
"""Characters of a fault's message, or of its path, in the log."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Counter:
    """Counts up, per value of one label."""

    kind = "counter"

    def __init__(self, name: str, text: str, label: str | None = None) -> None:
        self.name, self.text, self.label = name, text, label
        self.values: dict[str, int] = {} if label else {"": 0}

    def add(self, amount: int = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + amount

    def lines(self) -> list[str]:
        if self.label is None:
            return [f"{self.name} {self.values['']}"]
        return [
            f'{self.name}{{{self.label}="{key}"}} {value}' for key, value in self.values.items()
        ]


@dataclass
class Gauge:
    """A number as it is now."""

    name: str
    text: str
    value: float
    kind: str = "gauge"

    def lines(self) -> list[str]:
        return [f"{self.name} {_number(self.value)}"]


class Histogram:
    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            total += count
            lines.append(
                f'{self.name}_bucket{{le="{"+Inf" if bound == float("inf") else _number(bound)}"}} '
                f"{total}"
            )
        return [*lines, f"{self.name}_sum {_number(self.sum)}", f"{self.name}_count {total}"]


Metric = Counter | Gauge | Histogram


def exposition(metrics: list[Metric]) -> str:
    """The page that Prometheus scrapes."""
    lines = []
    for metric in metrics:
        lines += [
            f"# HELP {metric.name} {metric.text}",
            f"# TYPE {metric.name} {metric.kind}",
            *metric.lines(),
        ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Every digit: an integer as it is, else the shortest text that reads back as the same
    float."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def log_fault(what: str, fault: BaseException) -> None:
    """One line for a fault that nothing foresaw: what failed, why and where."""
    where = "".join(
        f" ({Path(last.filename).name}:{last.lineno})"
        for last in traceback.extract_tb(fault.__traceback__)[-1:]  # none if it was not raised
    )
    _LOG.error(one_line(f"{what}: {type(fault).__name__}: {str(fault)[:LONGEST_MESSAGE]}{where}"))


class QueueFull(Exception):
    """As many requests wait as the server accepts."""


class EngineFault(Exception):
    """The engine stopped on an unexpected error; nothing can be answered any more."""


class RequestFault(Exception):
    """One request ended on an error; the others go on. status: 400 where its grammar is at fault,
    500 where an unexpected error is."""

    def __init__(self, problem: str, status: int = 500) -> None:
        self.status = status
        super().__init__(problem)


@dataclass(frozen=True)
class Piece:
    """What one step added to one choice of a request; `completion` comes with its last piece."""

    choice: int
    text: str
    logprobs: list[TokenLogprob]
    completion: Completion | None


class AnswerStream:
    """The answers to one request, piece by piece: several choices where it has several prompts or
    asks for several.

    The receiver closes it, finished or not: that frees its place, and cancels what is unfinished.
    """

    def __init__(self, service: "Service", sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.arrived: asyncio.Queue[Piece | RequestFault | EngineFault] = asyncio.Queue()
        self.unfinished = len(sequences)
        self._service = service
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Raises RequestFault and EngineFault."""
        while self.unfinished:
            piece = await self.arrived.get()
            if isinstance(piece, RequestFault):
                self.unfinished -= 1
            if not isinstance(piece, Piece):
                raise piece
            if piece.completion is not None:
                self.unfinished -= 1
            yield piece

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._service.closed(self)


@dataclass(frozen=True)
class _Add:
    stream: AnswerStream


@dataclass(frozen=True)
class _Cancel:
    stream: AnswerStream


class Service:
    """max_queue: requests that may wait beyond the `max_batch` that run."""

    def __init__(
        self, engine: Engine, *, max_queue: int, on_fault: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self.limit = engine.scheduler.max_batch + max_queue
        self.open = 0
        self.fault: BaseException | None = None
        self._on_fault = on_fault
        engine.while_computing = self._hand_over
        self._inbox: queue.SimpleQueue[_Add | _Cancel | None] = queue.SimpleQueue()
        self._streams: dict[Sequence, AnswerStream] = {}
        self._advanced: list[Sequence] = []
        """What the last step returned, until its texts are on their way: the next step's device
        time is long enough for them."""
        self._thread = threading.Thread(target=self._run, name="quantkit-engine", daemon=True)
        self.prompt_tokens = Counter("quantkit_prompt_tokens_total", "Tokens of accepted prompts.")
        self.generated_tokens = Counter("quantkit_generated_tokens_total", "Tokens generated.")
        self.finished = Counter(
            "quantkit_requests_finished_total", "Answers by how they ended.", "reason"
        )
        self.refused = Counter(
            "quantkit_requests_refused_total",
            "Requests answered with an error, by HTTP status.",
            "status",
        )
        self.first_token = Histogram(
            "quantkit_time_to_first_token_seconds", "From arrival to the first token."
        )
        self.per_token = Histogram(
            "quantkit_time_per_output_token_seconds", "Mean time between tokens of one answer."
        )
        self.duration = Histogram(
            "quantkit_request_duration_seconds", "From arrival to the last token."
        )

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Let the engine's thread end after its current step; whatever is unfinished is dropped."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, prompts: list[tuple[list[int], SamplingParams]]) -> AnswerStream:
        """Answer `prompts` together, one choice each.

        Raises QuantkitError for a prompt that can never run, QueueFull, and EngineFault where the
        engine is gone.
        """
        if self.fault is not None:
            raise EngineFault(f"the engine stopped: {self.fault}")
        assert len(prompts) <= self.limit, (len(prompts), self.limit)
        if self.open + len(prompts) > self.limit:
            raise QueueFull(
                f"the server holds {self.open} of at most {self.limit} requests, {len(prompts)} "
                "more do not fit"
            )
        sequences = [
            self.engine.sequence(prompt, params, index)
            for index, (prompt, params) in enumerate(prompts)
        ]
        self.open += len(sequences)
        self.prompt_tokens.add(sum(len(prompt) for prompt, _ in prompts))
        stream = AnswerStream(self, sequences)
        self._inbox.put(_Add(stream))
        return stream

    def closed(self, stream: AnswerStream) -> None:
        """A stream's reader is done with it."""
        self.open -= len(stream.sequences)
        if stream.unfinished:
            self.finished.add(stream.unfinished, "cancelled")
            self._inbox.put(_Cancel(stream))

    def metrics(self) -> list[Metric]:
        scheduler = self.engine.scheduler
        acceptance = self.engine.speculation.acceptance
        now = (
            ("requests_running", "Requests being computed.", len(scheduler.running)),
            ("requests_waiting", "Requests in the queue.", len(scheduler.waiting)),
            ("cache_usage_ratio", "Share of the cache in use.", scheduler.cache_usage),
        )
        counted = (
            ("preemptions", "Requests put back for lack of cache.", scheduler.num_preempted),
            ("drafted_tokens", "Tokens guessed, of any source.", acceptance.drafted),
            ("accepted_tokens", "Guessed tokens that were kept.", acceptance.accepted),
        )
        return [
            *(Gauge(f"quantkit_{name}", text, value) for name, text, value in now),
            *(
                Gauge(f"quantkit_{name}_total", text, value, "counter")
                for name, text, value in counted
            ),
            self.prompt_tokens,
            self.generated_tokens,
            self.finished,
            self.refused,
            self.first_token,
            self.per_token,
            self.duration,
        ]

    def _observe(self, completion: Completion) -> None:
        tokens, times = len(completion.token_ids), completion.timings
        self.generated_tokens.add(tokens)
        self.finished.add(1, completion.finish_reason)
        self.first_token.observe(times.first_token_s)
        self.duration.observe(times.total_s)
        if tokens > 1:
            self.per_token.observe((times.total_s - times.first_token_s) / (tokens - 1))

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._take_orders():
                if self.engine.has_work:
                    self._advanced = self.engine.step()
                    if not self.engine.has_work:
                        self._hand_over([])
        except BaseException as fault:  # the thread's last act: waiters must be notified
            self.fault = fault
            self._hand_over([])
            gone = EngineFault(f"the engine stopped: {fault}")
            self._loop.call_soon_threadsafe(
                self._notify_all, list(set(self._streams.values())), gone
            )
            raise

    def _take_orders(self) -> bool:
        """Carry out what came in; wait for something where there is nothing to compute. False:
        stop."""
        while not (self._inbox.empty() and self.engine.has_work):
            order = self._inbox.get()
            if order is None:
                return False
            for sequence in order.stream.sequences:
                if isinstance(order, _Add):
                    self._streams[sequence] = order.stream
                    self.engine.add(sequence)
                elif self._streams.pop(sequence, None):
                    self.engine.cancel(sequence)
        return True

    def _hand_over(self, brought: list[Sequence]) -> None:
        """brought: what the running step has of others so far. It returns them again, then mostly
        with nothing new."""
        news: list[tuple[AnswerStream, Piece | RequestFault]] = []
        advanced, self._advanced = [*self._advanced, *brought], []
        for sequence in advanced:
            if sequence in self._streams:  # not cancelled since
                news.append((self._streams[sequence], _news(sequence)))
                if sequence.finish_reason:
                    del self._streams[sequence]
        if news:
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _notify_all(self, streams: list[AnswerStream], fault: EngineFault) -> None:
        for stream in streams:
            stream.arrived.put_nowait(fault)
        self._on_fault()

    def _deliver(self, news: list[tuple[AnswerStream, Piece | RequestFault]]) -> None:
        for stream, piece in news:
            stream.arrived.put_nowait(piece)
            if isinstance(piece, RequestFault):
                self.finished.add(1, "error")
            elif piece.completion is not None:
                self._observe(piece.completion)


def _news(sequence: Sequence) -> Piece | RequestFault:
    """What the last step added to a sequence, or what ended it."""
    if sequence.fault is not None:
        if isinstance(sequence.fault, GrammarError):
            return RequestFault(str(sequence.fault), 400)
        log_fault("a request", sequence.fault)
        return RequestFault(
            f"this request ended with an error: {type(sequence.fault).__name__}: "
            f"{str(sequence.fault)[:500]}"
        )
    done = sequence.completion() if sequence.finish_reason else None
    return Piece(sequence.index, sequence.take_text(), sequence.take_logprobs(), done)
