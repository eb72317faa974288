"""One request on its way: the prompt, what was generated so far, where its cache is, and when
things happened."""

import random
import time
from dataclasses import dataclass
from typing import Literal

from quantkit.executor.sampling.grammar import Guide
from quantkit.executor.sampling.params import SamplingParams
from quantkit.tokenizer.chat import ChatTokenizer, TextStream, stop_tokens

DRAFTER, PROMPT_LOOKUP = "computed", "lookup"
"""Who guessed."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a chosen token, and the likeliest alternatives (id, log-probability), best
    first. rank: 1 for the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds from arrival: until the first computation, the first token, and the last token."""

    queued_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Completion:
    """A finished request. `index` is its number among the prompts; `token_ids` ends with the
    end-of-answer token where there was one.

    prompt_logprobs: of the prompt's tokens but the first, where they were asked for. cached_tokens:
    of the prompt's, how many the
    prefix cache held. fault: what went wrong with this request alone, where its
    finish_reason is "error"; `text` is then what was certain before.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    logprobs: list[TokenLogprob] | None
    cached_tokens: int = 0
    fault: BaseException | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer; `completion` comes with the last one."""

    text: str
    completion: Completion | None


class Sequence:
    """State of one request. The engine appends tokens; the scheduler gives and takes blocks. guide:
    of its grammar, if any."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: ChatTokenizer,
        max_len: int,
        *,
        streams: bool,
        guide: Guide | None = None,
    ) -> None:
        self.index, self.params, self.guide = index, params, guide
        self.token_ids = list(prompt)
        self.prompt_len = len(prompt)
        self.max_len = min(len(prompt) + params.max_new_tokens, max_len)
        self.seed = random.getrandbits(63) if params.seed is None else params.seed
        self.dp_rank = 0
        """The data-parallel rank that computes it."""
        self.blocks: list[int] = []
        self.state = 0
        """Its place in the cache's states, where the model has some; 0 while it does not run."""
        self.num_cached = 0
        """Tokens whose cache entries exist: the first `num_cached` of `token_ids`."""
        self.num_drafter_tokens = 0
        """Tokens that a draft model has in its cache: the first `num_drafter_tokens`, which may be the
        newest, too."""
        self.num_prefix_hits = 0
        """Prompt tokens that needed no computing when the sequence first ran, because the prefix
        cache held them."""
        self.num_published_blocks = 0
        """Blocks that others may find, where there is a prefix cache; `block_digests` are its names
        for them."""
        self.block_digests: list[bytes] = []
        self.drafts: list[int] = []
        """Guesses for the tokens after the last one, to be computed with it; `draft_source` says who
        made them."""
        self.draft_source = DRAFTER
        self.finish_reason: FinishReason | None = None
        self.fault: BaseException | None = None
        """What went wrong with this request alone; whoever steps the engine finishes it for
        that."""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.arrival = time.perf_counter()
        self.started = self.first_token = self.last_token = 0.0
        self._tokenizer = tokenizer
        self.alters_logits = bool(params.logit_bias or params.penalizes)
        """Whether logits are changed by what the request asks for, whatever comes before."""
        self._end_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else tokenizer.eos_ids
        )
        self._stops = (
            stop_tokens(tokenizer.tokenizer, params.stop, params.skip_special_tokens)
            if params.stop
            else None
        )
        """Behind which tokens a stop string may have ended the answer."""
        watched = streams or params.stop or params.stop_token_ids or not params.skip_special_tokens
        special, early = params.skip_special_tokens, params.min_new_tokens
        self._stream = (
            TextStream(tokenizer.tokenizer, params.stop, skip_special=special, min_tokens=early)
            if watched
            else None
        )
        self._text: list[str] = []
        self._unread: list[int] = []
        """Tokens whose text nobody has asked for yet: where no stop string may have ended the
        answer it can wait."""
        self._taken = self._taken_logprobs = 0

    @property
    def num_new(self) -> int:
        """Tokens that wait to be computed: the rest of the prompt, or the token chosen last."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_useful_drafts(self) -> int:
        """Guesses behind the last token that can be of use: the step that computes them chooses one
        token more."""
        return 0 if self.finish_reason is not None else self.max_len - len(self.token_ids) - 1

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    def extend(self, chosen: list[int], now: float) -> int:
        """The successors of the last token and of each draft: kept as long as the drafts were
        right. Returns how many were kept."""
        kept = 1
        self._append(chosen[0], now)
        if self.drafts:
            for draft, token_id in zip(self.drafts, chosen[1:]):
                if self.token_ids[-1] != draft or self.finish_reason:
                    break
                self._append(token_id, now)
                kept += 1
            self.drafts = []
        self.num_cached = len(self.token_ids) - 1
        return kept

    def follow(self, chosen: int, now: float) -> None:
        """As `extend`, by one token where there are no drafts."""
        tokens = self.token_ids
        known = len(tokens)
        may_end = (
            chosen in self._end_ids
            or self.guide is not None
            or (self._stops is not None and self._stops[chosen])
        )
        if not may_end and self.first_token and known + 1 < self.max_len:
            # As `_append`, in a third of its time: nearly every token of every answer.
            assert self.finish_reason is None, (self.index, self.finish_reason)
            tokens.append(chosen)
            self.last_token = now
            if self._stream is not None:
                self._unread.append(chosen)
        else:
            self._append(chosen, now)
        self.num_cached = known

    def drop_drafts(self) -> None:
        """Guesses that nobody will check."""
        self.drafts, self.draft_source = [], DRAFTER

    def _append(self, token_id: int, now: float) -> None:
        """A chosen token: kept, and the end of the answer noticed."""
        assert self.finish_reason is None, (self.index, self.finish_reason)
        self.token_ids.append(token_id)
        if not self.first_token:
            self.first_token = now
        self.last_token = now
        ended = self.guide is not None and self._guided(self.guide, token_id)
        if token_id in self._end_ids:
            self.finish("stop")
            return
        if self._stream is not None:
            self._unread.append(token_id)
            ended = ended or (
                self._stops is not None and self._stops[token_id] and self._read(self._stream)
            )
        if ended:
            self.finish("stop")
            return
        if len(self.token_ids) >= self.max_len:
            self.finish("length")

    def _guided(self, guide: Guide, token_id: int) -> bool:
        """Take the token; whether the grammar ended the answer. A fault is kept, as in `_read`."""
        if self.fault is None:
            try:
                return guide.advance(token_id)
            except Exception as fault:
                self.fault = fault
        return False

    def _read(self, stream: TextStream) -> bool:
        """Take the text of what is not read yet; whether a stop string ended it. A fault is kept:
        the step it is found in goes on for the others."""
        unread, self._unread = self._unread, []
        if self.fault is None:
            try:
                self._text += map(stream.push, unread)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as fault:  # a panic of the tokenizer is no Exception
                self.fault = fault
        return stream.stopped

    def _decoded(self) -> str:
        """The text of an answer that nobody watched; empty where it cannot be had."""
        try:
            return self._tokenizer.decode(self.generated)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:
            self.fail(self.fault or fault)
            return ""

    def fail(self, fault: BaseException) -> None:
        """Finish for a fault of this request alone. What the cache holds of it is not to be
        trusted."""
        self.fault, self.finish_reason = fault, "error"
        self.num_cached = 0

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._stream is not None and not self._read(self._stream):
            self._text.append(self._stream.finish())

    def take_text(self) -> str:
        """Text that is new since the last call; only for sequences that stream. A fault of the text
        is kept, for the next step to find."""
        if self._stream is not None and self._unread:
            self._read(self._stream)
        text = "".join(self._text[self._taken :])
        self._taken = len(self._text)
        return text

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities that are new since the last call."""
        new = self.logprobs[self._taken_logprobs :]
        self._taken_logprobs = len(self.logprobs)
        return new

    def completion(self) -> Completion:
        assert self.finish_reason is not None, self.index
        text = "".join(self._text) if self._stream is not None else self._decoded()
        timings = Timings(
            self.started - self.arrival,
            self.first_token - self.arrival,
            self.last_token - self.arrival,
        )
        logprobs = None if self.params.logprobs is None else self.logprobs
        return Completion(
            self.index,
            self.generated,
            text,
            self.finish_reason,
            self.prompt_len,
            timings,
            logprobs,
            self.num_prefix_hits,
            self.fault,
            None if self.params.prompt_logprobs is None else self.prompt_logprobs,
        )
