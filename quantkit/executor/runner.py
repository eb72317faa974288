"""The passes of a step: tokens of sequences in, hidden states and logits out."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.executor.cache import PagedCache
from quantkit.executor.context import Chunk, PrefillContext
from quantkit.executor.draws import Draws
from quantkit.executor.graphs import Capture, DecodeRows, DecodeSteps, DeviceCapture, EagerSteps, why_eager
from quantkit.executor.mixed import MixedContext
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

    where: the tokens' places in the cache, `DecodeRows` where each attended by itself.
    logits float32 [R, vocab] and greedy int64 [R] (the likeliest tokens): of the R tokens whose successors are to be chosen, None where
    there are none; rows: which of the T these are; counts: which sequence they belong to, and how many each has. Tensors are valid until
    the next pass.
    """

    spans: list[Span]
    hidden: Tensor
    where: PrefillContext | MixedContext | DecodeRows
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
        # An NPU's graphs want to know lengths, and draws have none.
        self.draw = Draws(self._capture if capture or self.device.type == "cuda" else None)

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
        spans = _prompt_spans(parts)
        return self._eager(spans, self.prompt_context(spans), 0)

    def decode(self, sequences: list[Sequence]) -> ForwardPass:
        """The newest token of each sequence, and the drafted ones after it: successors of all are chosen."""
        spans = _answer_spans(sequences)
        rows = self._answer_rows(spans)
        result = self.steps.run(rows)
        every, counts = list(range(len(rows.token_ids))), [(span.sequence, span.length) for span in spans]
        return ForwardPass(spans, result.hidden, rows, result.logits, result.greedy, every, counts)

    def mixed(self, sequences: list[Sequence], parts: list[tuple[Sequence, int]]) -> ForwardPass:
        """Both in one pass: as `decode` of `sequences` and `prefill` of `parts`."""
        answers, prompts = _answer_spans(sequences), _prompt_spans(parts)
        rows = self._answer_rows(answers)
        context = MixedContext(rows.context(self.cache), self.prompt_context(prompts))
        return self._eager([*answers, *prompts], context, len(answers))

    def _eager(self, spans: list[Span], context: PrefillContext | MixedContext, num_answers: int) -> ForwardPass:
        """A pass launched operator by operator. The first `num_answers` of the spans are of answers."""
        token_ids: list[int] = []
        rows: list[int] = []
        counts = []
        for number, (sequence, start, length) in enumerate(spans):
            chosen = length if number < num_answers else int(start + length == len(sequence.token_ids))
            token_ids += [*sequence.token_ids, *sequence.drafts][start : start + length]
            if number >= num_answers:
                sequence.num_cached += length
            if chosen:
                rows += range(len(token_ids) - chosen, len(token_ids))
                counts.append((sequence, chosen))
        hidden = self.model(torch.tensor(token_ids, device=self.device), context)
        if not rows:
            return ForwardPass(spans, hidden, context, None, None, rows, counts)
        logits = self.model.logits(hidden[torch.tensor(rows, device=self.device)])
        return ForwardPass(spans, hidden, context, logits, logits.argmax(dim=-1), rows, counts)

    def prompt_context(self, spans: list[Span]) -> PrefillContext:
        """Where so many tokens of sequences attend, as prompts do."""
        chunks = [Chunk(start, length, torch.tensor(one.blocks, device=self.device), one.state) for one, start, length in spans]
        return PrefillContext(self.cache, chunks)

    def _answer_rows(self, spans: list[Span]) -> DecodeRows:
        token_ids = [token for span in spans for token in (span.sequence.token_ids[-1], *span.sequence.drafts)]
        return self.rows(token_ids, [(sequence, start + i) for sequence, start, length in spans for i in range(length)])

    def rows(self, token_ids: list[int], tokens: list[tuple[Sequence, int]]) -> DecodeRows:
        """token_ids, one per (sequence, position), with where they lie in the cache."""
        size = self.cache.block_size
        positions = np.array([position for _, position in tokens])
        tables = np.zeros((len(tokens), max(len(sequence.blocks) for sequence, _ in tokens)), dtype=np.int32)
        for row, (sequence, _) in enumerate(tokens):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        slots = tables[np.arange(len(tokens)), positions // size] * size + positions % size
        states = np.array([sequence.state for sequence, _ in tokens])
        return DecodeRows(np.array(token_ids), positions, slots, tables, states)


def _prompt_spans(parts: list[tuple[Sequence, int]]) -> list[Span]:
    return [Span(sequence, sequence.num_cached, length) for sequence, length in parts]


def _answer_spans(sequences: list[Sequence]) -> list[Span]:
    return [Span(sequence, sequence.num_cached, 1 + len(sequence.drafts)) for sequence in sequences]
