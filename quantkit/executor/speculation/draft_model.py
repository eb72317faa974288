"""Drafts by a draft model: a small model with the same vocabulary and its own cache (arXiv
2211.17192, without its sampling rule). Also loads it, or an EAGLE-3 head in its place.

Its cache has the blocks of the main model's cache, by the same numbers: what the scheduler
allocates, frees and shares holds for both. `num_drafter_tokens` of a sequence says how many tokens
the draft model has read. It reads prompts with the main model, chunk by chunk, and each sampled
token when it drafts the next ones. While nothing is drafted it reads no sampled tokens; it catches
up in one pass when drafting starts again. Sequences with more to catch up on than one pass holds
are not drafted for: reading them cost 2 % of a step and more.

Sequences longer than the draft model's positions are not drafted for from there on.
"""

from collections.abc import Sequence as Items
from pathlib import Path

from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.executor.cache.cache import CachePlan
from quantkit.executor.options import EngineOptions
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DecodeRows, DevicePositions, StepResult
from quantkit.executor.runner.graphs import Capture
from quantkit.executor.runner.prefill_graphs import PrefillChunk
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.drafter import Drafter
from quantkit.executor.speculation.eagle_head import LoadedEagleHead, load_eagle_head
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.models.architecture import ModelConfig
from quantkit.models.context import Context
from quantkit.models.decoder import Model
from quantkit.models.eagle3 import is_head
from quantkit.models.ngram_table import NgramRows
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.loader import check_same_ids

_MAX_CATCH_UP = 1024
"""Tokens of a catch-up pass, sequences with the fewest missing tokens first; a prefill graph holds
as many (prefill_graphs.py)."""


_REMEDY = "use another draft model"


class VocabAdapter:
    """A draft model over the target's token ids. vocab: the target's vocabulary size: models of a
    family pad their tables to different sizes."""

    ngram_rows: tuple[NgramRows, ...] = ()
    """None: `load_draft` refuses models that keep last tokens, as those with tables do."""

    def __init__(self, model: Model, vocab: int) -> None:
        self._model, self._vocab = model, vocab
        self.embedding, self.width = model.embedding, model.width

    def __call__(self, token_ids: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """As `Model.__call__`; an id beyond the draft model's vocabulary is read as its last."""
        limit = len(self.embedding)
        return self._model(
            token_ids.clamp(max=limit - 1) if limit < self._vocab else token_ids, context, rows
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Model.logits`, at most of the target's ids."""
        return self._model.logits(hidden)[:, : self._vocab]


class ModelDrafter(Drafter):
    """draft: computes the draft model, unsharded on every rank. max_positions: of the draft model.
    shared: whether later requests may find the blocks (prefix cache), so that a finished sequence
    is read to its end."""

    def __init__(
        self,
        draft: Runner,
        runner: Runner,
        count: int,
        parallel: Parallel,
        *,
        max_positions: int,
        shared: bool,
    ) -> None:
        super().__init__(runner, count, parallel, max_positions, own=draft)
        self._shared, self.steps = shared, draft.steps
        self._read_sampled = False
        """Whether the tokens sampled in the last pass were read."""
        self._skipped: set[Sequence] = set()
        """Sequences of the last pass with too much to catch up on."""

    def _first_logits(
        self, output: ForwardPass, token_ids: Tensor | None, result_rows: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        self._read_sampled = token_ids is not None and self.count > 0
        self._skipped.clear()
        if self._read_sampled or not isinstance(output.batch, DecodeRows):
            self._catch_up(output.spans)
        if token_ids is None or self.count == 0:
            return None
        tokens = [
            (sequence, len(sequence.token_ids) + i)
            for sequence, count in output.counts
            for i in range(count)
        ]
        in_range = [row for row, (_, place) in enumerate(tokens) if place < self._max_positions]
        if not in_range:
            return None
        if len(in_range) == len(tokens):
            rows = self._own.rows([0] * len(tokens), tokens)
            found = self._own.steps.run(rows, token_ids, result_rows=result_rows)
            return found.logits, found.greedy
        rows = self._own.rows([0] * len(in_range), [tokens[row] for row in in_range])
        _, logits, greedy = self._own.steps.run(rows, token_ids[self._tensor(in_range)])
        number = {row: i for i, row in enumerate(in_range)}
        # Rows beyond the draft model's positions get the first row's draft, which is not used.
        spread = self._tensor([number.get(row, 0) for row in range(len(tokens))])
        spread = spread if result_rows is None else spread[result_rows]
        return logits[spread], greedy[spread]

    def _next_logits(
        self,
        drafts: Tensor,
        rows: Tensor | None,
        batch: DecodeRows,
        positions: DevicePositions | None,
    ) -> StepResult:
        return self._own.steps.run(batch, drafts, positions=positions)

    def _after_step(self, output: ForwardPass) -> None:
        advanced = [sequence for sequence, _ in output.counts]
        if self._read_sampled:
            for sequence in advanced:
                if sequence not in self._skipped:
                    sequence.num_drafter_tokens = min(len(sequence.token_ids), self._max_positions)
        if self._shared and (ended := [one for one in advanced if one.finish_reason is not None]):
            each = max(_MAX_CATCH_UP // len(ended), 1)
            while self._read([(one, one.num_drafter_tokens + each) for one in ended]):
                pass

    def _num_useful(self, sequence: Sequence) -> int:
        return 0 if sequence in self._skipped else super()._num_useful(sequence)

    def _catch_up(self, spans: Items[tuple[Sequence, int, int]]) -> None:
        """Read the tokens of a pass and, if drafts are wanted, the missing tokens before them, up
        to `_MAX_CATCH_UP`."""
        room, ends = _MAX_CATCH_UP if self._read_sampled else 0, list[tuple[Sequence, int]]()
        for sequence, start, length in sorted(
            spans, key=lambda span: span[1] - span[0].num_drafter_tokens
        ):
            missing = max(start - sequence.num_drafter_tokens, 0)
            if missing > room:
                self._skipped.add(sequence)
            else:
                room -= missing
                ends.append((sequence, start + length))
        self._read(ends)

    def _read(self, ends: list[tuple[Sequence, int]]) -> bool:
        """Read sequences up to the given lengths. Returns whether any token was missing."""
        parts: list[tuple[Sequence, int]] = []
        for sequence, end in ends:
            limit = min(end, len(sequence.token_ids), self._max_positions)
            if limit > sequence.num_drafter_tokens:
                parts.append((sequence, limit))
        if parts:
            self._own.prefill_runner.run(
                None,
                [
                    PrefillChunk(
                        one.token_ids[one.num_drafter_tokens : end],
                        one.num_drafter_tokens,
                        one.blocks,
                    )
                    for one, end in parts
                ],
            )
        for sequence, end in parts:
            sequence.num_drafter_tokens = end
        return bool(parts)


def check_draft(path: Path, tokenizer: ChatTokenizer) -> None:
    """Raises QuantkitError where the draft model at `path` has other token ids than the target
    model's tokenizer. An EAGLE-3 head has none of its own."""
    if not is_head(read_json(path / "config.json")):
        check_same_ids(tokenizer.tokenizer, ChatTokenizer(path).tokenizer, tokenizer.path, path)


def check_rolls_back(path: Path, config: ModelConfig) -> None:
    """Raises QuantkitError where rejected drafts would stay in the state of the model at `path`."""
    if config.has_sequence_state:
        raise QuantkitError(
            f"{path} has recurrent layers, whose state cannot be rolled back after a rejected "
            "draft",
            _REMEDY,
        )


def load_draft(
    path: Path, loaded: LoadedModel, options: EngineOptions
) -> LoadedModel | LoadedEagleHead:
    """The draft model or EAGLE-3 head at `path`, unsharded on this rank. Raises QuantkitError where
    it cannot draft for `loaded`."""
    if is_head(read_json(path / "config.json")):
        return load_eagle_head(path, loaded, options)
    draft = load_model(
        path,
        device=options.device,
        backend=options.backend,
        dtype=options.dtype,
        cache=options.cache,
    )
    check_rolls_back(path, draft.config)
    own, other = draft.cache_layout.block_size, loaded.cache_layout.block_size
    if own != other:
        raise QuantkitError(
            f"{path} has cache blocks of {own} tokens here, {options.model_path} of {other}",
            _REMEDY,
        )
    return draft


def make_drafter(
    draft: LoadedModel | LoadedEagleHead,
    loaded: LoadedModel,
    plan: CachePlan,
    runner: Runner,
    count: int,
    parallel: Parallel,
    *,
    shared: bool,
    capture: Capture | None = None,
) -> Drafter:
    """Drafts at most `count` tokens a step for the model that `runner` computes, over a cache with
    as many blocks. shared, capture: as of `ModelDrafter` and `Runner`."""
    if isinstance(draft, LoadedEagleHead):
        return draft.drafter(plan, runner, count, parallel, capture)
    own = Runner(
        VocabAdapter(draft.model, loaded.config.vocab_size),
        draft.new_cache(plan.num_blocks),
        capture,
    )
    max_positions = draft.config.max_position_embeddings
    return ModelDrafter(own, runner, count, parallel, max_positions=max_positions, shared=shared)
