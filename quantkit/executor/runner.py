"""The passes of a step: tokens of sequences in, hidden states and logits out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.executor.cache import PagedCache
from quantkit.executor.context import PrefillContext
from quantkit.executor.draws import Draws
from quantkit.executor.graphs import Capture, DecodeRows, DecodeSteps, DeviceCapture, EagerSteps, why_eager
from quantkit.executor.mixed import MixedContext
from quantkit.executor.prompt_graphs import PromptPasses, PromptRows
from quantkit.executor.sequence import Sequence
from quantkit.models.architecture import MtpModel
from quantkit.models.decoder import Model


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a pass, from position `start` on."""

    sequence: Sequence
    start: int
    length: int


@dataclass(frozen=True)
class ForwardPass:
    """What a pass computed: `hidden` [T, H] of the spans' tokens, one span after the other.

    where: the tokens' places in the cache, `DecodeRows` where each attended by itself; else what makes the context of all.
    logits float32 [R, vocab] and greedy int64 [R] (the likeliest tokens): of the R tokens whose successors are to be chosen, None where
    there are none; rows: which of the T these are; counts: which sequence they belong to, and how many each has. Tensors are valid until
    the next pass.
    """

    spans: list[Span]
    hidden: Tensor
    where: DecodeRows | Callable[[], PrefillContext | MixedContext]
    logits: Tensor | None
    greedy: Tensor | None
    rows: list[int]
    counts: list[tuple[Sequence, int]]


class Runner:
    """A model with its cache on one device. capture: how decode steps are captured; by default as the device allows. eager: why they
    must not be."""

    def __init__(self, model: Model, cache: PagedCache, capture: Capture | None = None, *, eager: str = "") -> None:
        self.model, self.cache, self.device = model, cache, cache.device
        self._why_eager = eager or ("" if capture else why_eager(self.device))
        self._capture = None if self._why_eager else capture or DeviceCapture(self.device)
        self.steps = self.make_steps(model)
        self._tables = BlockTables()
        # Attention of prompts on an NPU wants lengths on the host.
        self.prompts = PromptPasses(model, cache, None if self.device.type == "npu" else self._capture)
        # An NPU's graphs want to know lengths, and draws have none. Graphs of one pool write over each other's results, and draws come
        # before all of a pass's have been read: theirs is another.
        self.draw = Draws(capture or (DeviceCapture(self.device) if self._capture and self.device.type == "cuda" else None))

    def make_steps(self, model: Model | MtpModel) -> DecodeSteps | EagerSteps:
        """Decode steps over this cache: of the model, or of an MTP layer behind it."""
        if self._capture is None:
            return EagerSteps(model, self.cache, self._why_eager)
        return DecodeSteps(model, self.cache, self._capture)

    @property
    def why_eager(self) -> str:
        """Why decode steps are computed launch by launch; empty where they are captured."""
        return self.steps.failure

    def prefill(self, parts: list[tuple[Sequence, int]]) -> ForwardPass:
        """The next tokens of prompts; successors are chosen where a prompt is complete."""
        return self._with_prompts([], _prompt_spans(parts))

    def decode(self, sequences: list[Sequence]) -> ForwardPass:
        """The newest token of each sequence, and the drafted ones after it: successors of all are chosen."""
        spans = _answer_spans(sequences)
        rows = self._answer_rows(spans)
        result = self.steps.run(rows)
        every, counts = list(range(len(rows.token_ids))), [(span.sequence, span.length) for span in spans]
        return ForwardPass(spans, result.hidden, rows, result.logits, result.greedy, every, counts)

    def mixed(self, sequences: list[Sequence], parts: list[tuple[Sequence, int]]) -> ForwardPass:
        """Both in one pass: as `decode` of `sequences` and `prefill` of `parts`."""
        return self._with_prompts(_answer_spans(sequences), _prompt_spans(parts))

    def _with_prompts(self, answers: list[Span], prompts: list[Span]) -> ForwardPass:
        own = [PromptRows(one.token_ids[start : start + length], start, one.blocks, one.state) for one, start, length in prompts]
        given = self._answer_rows(answers) if answers else None
        hidden = self.prompts.run(given, own)
        rows = list(range(0 if given is None else len(given.token_ids)))
        counts, end = [(one.sequence, one.length) for one in answers], len(rows)
        for sequence, start, length in prompts:
            end += length
            sequence.num_cached += length
            if start + length == len(sequence.token_ids):
                rows.append(end - 1)
                counts.append((sequence, 1))
        spans, where = [*answers, *prompts], partial(self.prompts.context, given, own)
        if not rows:
            return ForwardPass(spans, hidden, where, None, None, rows, counts)
        logits = self.model.logits(hidden[torch.tensor(rows, device=self.device)])
        return ForwardPass(spans, hidden, where, logits, logits.argmax(dim=-1), rows, counts)

    def prompt_context(self, spans: list[Span]) -> PrefillContext | MixedContext:
        """Where so many tokens of sequences attend, as prompts do."""
        return self.prompts.context(None, [PromptRows([0] * length, start, one.blocks, one.state) for one, start, length in spans])

    def _answer_rows(self, spans: list[Span]) -> DecodeRows:
        token_ids = [token for span in spans for token in (span.sequence.token_ids[-1], *span.sequence.drafts)]
        return self.rows(token_ids, [(sequence, start + i) for sequence, start, length in spans for i in range(length)])

    def rows(self, token_ids: list[int], tokens: list[tuple[Sequence, int]]) -> DecodeRows:
        """token_ids, one per (sequence, position), with where they lie in the cache."""
        size = self.cache.block_size
        positions = np.array([position for _, position in tokens])
        tables = self._tables.of([sequence.blocks for sequence, _ in tokens])
        slots = tables[np.arange(len(tokens)), positions // size] * size + positions % size
        states = np.array([sequence.state for sequence, _ in tokens])
        return DecodeRows(np.array(token_ids), positions, slots, tables, states)


class BlockTables:
    """Block tables as arrays. What is written once is kept while the same rows come again with the same blocks, or some more."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), dtype=np.int32)
        self._known: list[tuple[list[int], int]] = []

    def of(self, blocks: list[list[int]]) -> np.ndarray:
        """[rows, most blocks of a row], valid until the next call. A list that is the same object may only have grown."""
        shape = (len(blocks), max(map(len, blocks)))
        if self._array.shape != shape:
            self._array, self._known = np.zeros(shape, dtype=np.int32), [([], 0)] * len(blocks)
        for row, (own, (known, count)) in enumerate(zip(blocks, self._known)):
            if own is not known or len(own) != count:
                self._array[row, : len(own)] = own
                self._array[row, len(own) :] = 0
                self._known[row] = (own, len(own))
        return self._array


def _prompt_spans(parts: list[tuple[Sequence, int]]) -> list[Span]:
    return [Span(sequence, sequence.num_cached, length) for sequence, length in parts]


def _answer_spans(sequences: list[Sequence]) -> list[Span]:
    return [Span(sequence, sequence.num_cached, 1 + len(sequence.drafts)) for sequence in sequences]
