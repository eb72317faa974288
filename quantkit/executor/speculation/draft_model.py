"""Guesses by a draft model: a small model over the same tokens, with a cache of its own (arXiv
2211.17192, without its sampling rule).

Its cache has the blocks of the main model's, by the same numbers: what the scheduler gives, takes
and shares holds for both. `num_drafter_tokens` of a sequence says how far the draft model has read it. It
reads prompts with the main model, chunk by chunk, and each chosen token when it guesses what comes
next. While no guesses are wanted answers are not read; what is missing is read at once when they
are again. Answers of which more is missing than is read at once are not guessed for any more: to
read what nobody guesses behind cost 2 % of a step and more.

Of a sequence that is longer than the draft model's positions nothing is guessed from there on.
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
from quantkit.models.context import Context
from quantkit.models.decoder import Model
from quantkit.models.eagle3 import is_head
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.loader import check_same_ids

_MOST_READ = 1024
"""Tokens that are read at once: of answers those of which the least is missing. A graph reads as
many (prompt_graphs.py)."""


class VocabAdapter:
    """A draft model over another's token ids. vocab: how many those are: tables of one family are
    padded to various sizes."""

    def __init__(self, model: Model, vocab: int) -> None:
        self._model, self._vocab = model, vocab
        self.embedding, self.width = model.embedding, model.width

    def __call__(self, token_ids: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """As `Model.__call__`; an id that the model does not know is read as its last."""
        known = len(self.embedding)
        return self._model(
            token_ids.clamp(max=known - 1) if known < self._vocab else token_ids, context, rows
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Model.logits`, of the other's ids at most."""
        return self._model.logits(hidden)[:, : self._vocab]


class ModelDrafter(Drafter):
    """draft: computes the draft model, whole on every rank. reach: its positions. shared: whether
    blocks are found by later requests, so that what is left behind in them should have been
    read."""

    def __init__(
        self,
        draft: Runner,
        runner: Runner,
        count: int,
        parallel: Parallel,
        *,
        reach: int,
        shared: bool,
    ) -> None:
        super().__init__(runner, count, parallel, reach, own=draft)
        self._shared, self.steps = shared, draft.steps
        self._guessed = False
        """Whether the tokens chosen in the last pass were read."""
        self._left: set[Sequence] = set()
        """Sequences of the last pass of which too much is missing."""

    def _behind(
        self, done: ForwardPass, token_ids: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        self._guessed = token_ids is not None and self.count > 0
        self._left.clear()
        if self._guessed or not isinstance(done.where, DecodeRows):
            self._catch_up(done.spans)
        if token_ids is None or self.count == 0:
            return None
        places = [
            (sequence, len(sequence.token_ids) + i)
            for sequence, count in done.counts
            for i in range(count)
        ]
        within = [row for row, (_, place) in enumerate(places) if place < self._reach]
        if not within:
            return None
        if len(within) == len(places):
            found = self._own.steps.run(
                self._own.rows([0] * len(places), places), token_ids, kept=kept
            )
            return found.logits, found.greedy
        rows = self._own.rows([0] * len(within), [places[row] for row in within])
        _, logits, greedy = self._own.steps.run(rows, token_ids[self._tensor(within)])
        number = {row: i for i, row in enumerate(within)}
        # Rows past the reach have the first one's guess, which is not taken.
        spread = self._tensor([number.get(row, 0) for row in range(len(places))])
        spread = spread if kept is None else spread[kept]
        return logits[spread], greedy[spread]

    def _further(
        self,
        guessed: Tensor,
        rows: Tensor | None,
        where: DecodeRows,
        places: DevicePositions | None,
    ) -> StepResult:
        return self._own.steps.run(where, guessed, places=places)

    def _settle(self, done: ForwardPass) -> None:
        advanced = [sequence for sequence, _ in done.counts]
        if self._guessed:
            for sequence in advanced:
                if sequence not in self._left:
                    sequence.num_drafter_tokens = min(len(sequence.token_ids), self._reach)
        if self._shared and (ended := [one for one in advanced if one.finish_reason is not None]):
            each = max(_MOST_READ // len(ended), 1)
            while self._read([(one, one.num_drafter_tokens + each) for one in ended]):
                pass

    def _wanted(self, sequence: Sequence) -> int:
        return 0 if sequence in self._left else super()._wanted(sequence)

    def _catch_up(self, spans: Items[tuple[Sequence, int, int]]) -> None:
        """Read the tokens of a pass, and where guesses are wanted what is missing before them, as
        far as that is not too much."""
        room, ends = _MOST_READ if self._guessed else 0, list[tuple[Sequence, int]]()
        for sequence, start, length in sorted(
            spans, key=lambda one: one[1] - one[0].num_drafter_tokens
        ):
            missing = max(start - sequence.num_drafter_tokens, 0)
            if missing > room:
                self._left.add(sequence)
            else:
                room -= missing
                ends.append((sequence, start + length))
        self._read(ends)

    def _read(self, ends: list[tuple[Sequence, int]]) -> bool:
        """Sequences up to so many tokens, as far as these are known. Returns whether anything was
        missing."""
        parts: list[tuple[Sequence, int]] = []
        for sequence, end in ends:
            known = min(end, len(sequence.token_ids), self._reach)
            if known > sequence.num_drafter_tokens:
                parts.append((sequence, known))
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
    """Raises QuantkitError where the draft model at `path` has other tokens than those of the model
    that it is to guess for. A head has none of its own."""
    if not is_head(read_json(path / "config.json")):
        check_same_ids(tokenizer.tokenizer, ChatTokenizer(path).tokenizer, tokenizer.path, path)


def load_draft(
    path: Path, loaded: LoadedModel, options: EngineOptions
) -> LoadedModel | LoadedEagleHead:
    """What guesses, at `path`, whole on this rank, for the model that is `loaded`. Raises
    QuantkitError where it cannot guess for that."""
    if is_head(read_json(path / "config.json")):
        return load_eagle_head(path, loaded, options)
    draft = load_model(
        path,
        device=options.device,
        backend=options.backend,
        dtype=options.dtype,
        cache=options.cache,
    )
    remedy = "bring another draft model"
    if draft.config.has_sequence_state:
        told = (
            f"{path} has layers whose state is of all the text before a token, which cannot be "
            "taken back where a guess is wrong"
        )
        raise QuantkitError(told, remedy)
    own, other = draft.cache_layout.block_size, loaded.cache_layout.block_size
    if own != other:
        raise QuantkitError(
            f"{path} keeps {own} tokens in a block of its cache here, {options.model_path} keeps "
            f"{other}",
            remedy,
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
    """What guesses `count` tokens a step with what was brought, over a cache of as many blocks as
    that of the model that `runner` computes.
    shared, capture: as `ModelDrafter` and `Runner` have them."""
    if isinstance(draft, LoadedEagleHead):
        return draft.drafter(plan, runner, count, parallel, capture)
    own = Runner(
        VocabAdapter(draft.model, loaded.config.vocab_size),
        draft.new_cache(plan.num_blocks),
        capture,
    )
    return ModelDrafter(
        own, runner, count, parallel, reach=draft.config.max_position_embeddings, shared=shared
    )
