"""One request in the engine: its prompt, the tokens generated so far, its cache blocks and its
timings."""

import random
import time
from dataclasses import dataclass
from typing import Literal

from quantkit.common.errors import QuantkitError
from quantkit.executor.sampling.grammar import Guide
from quantkit.executor.sampling.params import SamplingParams
from quantkit.tokenizer.chat import ChatTokenizer, TextStream, stop_tokens

DRAFTER, PROMPT_LOOKUP = "drafter", "prompt_lookup"
"""Sources of drafts."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a sampled token, and the likeliest alternatives (id, log-probability),
    best first. rank: 1 for the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds from arrival to the first computation, the first token, and the last token."""

    queued_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Completion:
    """A finished request. index: its number among the prompts. token_ids: includes the end-of-text
    token, if any. cached_tokens: prompt tokens found in the prefix cache. fault: what went wrong
    with this request alone, if its finish_reason is "error"; `text` is then what was decoded
    before. prompt_logprobs: of the prompt's tokens but the first, if requested.
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
    """A piece of streamed text; `completion` comes with the last one."""

    text: str
    completion: Completion | None


class Sequence:
    """State of one request. The engine appends tokens; the scheduler allocates and frees blocks.
    guide: follows its grammar, if any."""

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
        """Data-parallel rank that computes it."""
        self.blocks: list[int] = []
        self.state = 0
        """Place in the cache's per-sequence states; 0 while it does not run."""
        self.num_cached = 0
        """Computed tokens: the first `num_cached` of `token_ids` are in the KV cache."""
        self.num_drafter_tokens = 0
        """Tokens in the draft model's cache, the newest one possibly included."""
        self.num_prefix_hits = 0
        """Prompt tokens found in the prefix cache when the sequence first ran."""
        self.num_published_blocks = 0
        """Blocks in the prefix cache, identified by `block_digests`."""
        self.block_digests: list[bytes] = []
        self.borders: list[int] = []
        """After so many tokens a chunk ends, and its state is kept."""
        self.num_checkpointed = 0
        """Tokens of its last state that is kept."""
        self.drafts: list[int] = []
        """Draft tokens after the last token, verified with it in the next step."""
        self.draft_source = DRAFTER
        self.finish_reason: FinishReason | None = None
        self.fault: BaseException | None = None
        """What went wrong with this request alone; the engine's next step ends it."""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.arrival = time.perf_counter()
        self.started = self.first_token = self.last_token = 0.0
        self._tokenizer = tokenizer
        self.alters_logits = bool(params.logit_bias or params.penalizes)
        """Whether biases or penalties change its logits."""
        self._end_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else tokenizer.eos_ids
        )
        self._stops = (
            stop_tokens(tokenizer.tokenizer, params.stop, params.skip_special_tokens)
            if params.stop
            else None
        )
        """After which tokens a stop string may have ended the text."""
        decodes = streams or params.stop or params.stop_token_ids or not params.skip_special_tokens
        special, early = params.skip_special_tokens, params.min_new_tokens
        self._stream = (
            TextStream(tokenizer.tokenizer, params.stop, skip_special=special, min_tokens=early)
            if decodes
            else None
        )
        self._text: list[str] = []
        self._undecoded: list[int] = []
        """Tokens that are not decoded yet: text is decoded when it is taken, or where a stop string
        may have ended it."""
        self._num_taken = self._num_logprobs_taken = 0

    @property
    def num_new(self) -> int:
        """Tokens not computed yet: the rest of the prompt, or the last sampled token."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_useful_drafts(self) -> int:
        """Drafts that can be accepted: the step that verifies them samples one token more."""
        return 0 if self.finish_reason is not None else self.max_len - len(self.token_ids) - 1

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    def extend(self, sampled: list[int], now: float) -> int:
        """Append the tokens sampled after the last token and each draft, for as long as the drafts
        equal them. Returns how many were appended."""
        kept = 1
        self._append(sampled[0], now)
        if self.drafts:
            for draft, token_id in zip(self.drafts, sampled[1:]):
                if self.token_ids[-1] != draft or self.finish_reason:
                    break
                self._append(token_id, now)
                kept += 1
            self.drafts = []
        self.num_cached = len(self.token_ids) - 1
        return kept

    def append(self, sampled: int, now: float) -> None:
        """As `extend`, by one token, without drafts."""
        tokens = self.token_ids
        known = len(tokens)
        may_end = (
            sampled in self._end_ids
            or self.guide is not None
            or (self._stops is not None and self._stops[sampled])
        )
        if not may_end and self.first_token and known + 1 < self.max_len:
            # Same effect as `_append` in a third of its time, for nearly every token.
            assert self.finish_reason is None, (self.index, self.finish_reason)
            tokens.append(sampled)
            self.last_token = now
            if self._stream is not None:
                self._undecoded.append(sampled)
        else:
            self._append(sampled, now)
        self.num_cached = known

    def drop_drafts(self) -> None:
        self.drafts, self.draft_source = [], DRAFTER

    def _append(self, token_id: int, now: float) -> None:
        assert self.finish_reason is None, (self.index, self.finish_reason)
        self.token_ids.append(token_id)
        if not self.first_token:
            self.first_token = now
        self.last_token = now
        ended = self.guide is not None and self._advance(self.guide, token_id)
        if token_id in self._end_ids:
            self.finish("stop")
            return
        if self._stream is not None:
            self._undecoded.append(token_id)
            ended = ended or (
                self._stops is not None and self._stops[token_id] and self._decode(self._stream)
            )
        if ended:
            self.finish("stop")
            return
        if len(self.token_ids) >= self.max_len:
            self.finish("length")

    def _advance(self, guide: Guide, token_id: int) -> bool:
        """Whether the grammar ends after this token. Stores a fault, as `_decode` does."""
        if self.fault is None:
            try:
                return guide.advance(token_id)
            except Exception as fault:
                self.fault = fault
        return False

    def _decode(self, stream: TextStream) -> bool:
        """Decode new tokens; whether a stop string ended the text. A fault is stored, so that the
        step goes on for other sequences."""
        tokens, self._undecoded = self._undecoded, []
        if self.fault is None:
            try:
                self._text += map(stream.push, tokens)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as fault:  # a panic of the tokenizer is not an Exception
                self.fault = fault
        return stream.stopped

    def _decode_all(self) -> str:
        """The text of a sequence that was not streamed; empty if it cannot be decoded."""
        try:
            return self._tokenizer.decode(self.generated)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:
            self.fail(self.fault or fault)
            return ""

    def fail(self, fault: BaseException) -> None:
        """Finish for a fault of this request alone. Its cache is not trusted any more."""
        self.fault, self.finish_reason = fault, "error"
        self.num_cached = 0

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._stream is not None and not self._decode(self._stream):
            self._text.append(self._stream.finish())

    def take_text(self) -> str:
        """Text that is new since the last call; only for sequences that stream. A decoding fault is
        stored, for the next step to find."""
        if self._stream is not None and self._undecoded:
            self._decode(self._stream)
        text = "".join(self._text[self._num_taken :])
        self._num_taken = len(self._text)
        return text

    def take_delta(self) -> Delta | None:
        """Text that is new since the last call, and the end; None without either."""
        text, done = self.take_text(), self.finish_reason is not None
        return Delta(text, self.completion() if done else None) if text or done else None

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities that are new since the last call."""
        new = self.logprobs[self._num_logprobs_taken :]
        self._num_logprobs_taken = len(self.logprobs)
        return new

    def completion(self) -> Completion:
        assert self.finish_reason is not None, self.index
        text = "".join(self._text) if self._stream is not None else self._decode_all()
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


def check_request(prompt: list[int], params: SamplingParams, context: int, vocab: int) -> None:
    """Raises QuantkitError for a prompt that does not fit in `context` tokens, a token id
    outside the vocabulary, or one in place of a prompt."""
    if isinstance(prompt, int):
        raise QuantkitError(
            f"a prompt is {prompt}, an int",
            "give a list of prompts, each a text or a list of token ids",
        )
    if not prompt:
        raise QuantkitError("the prompt is empty", "give at least one token")
    if len(prompt) >= context:
        raise QuantkitError(
            f"the prompt has {len(prompt)} tokens, the context is {context}", "shorten it"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise QuantkitError(
            f"the prompt has token ids outside 0..{vocab - 1}", "use the model's own tokenizer"
        )
    if any(not 0 <= token < vocab for token in params.named_tokens):
        raise QuantkitError(
            f"logit_bias or stop_token_ids names a token outside 0..{vocab - 1}",
            "use the model's own tokenizer",
        )
