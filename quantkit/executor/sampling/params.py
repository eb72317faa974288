"""Sampling parameters, and sampling the next token: greedy, temperature, min-p, top-k and top-p,
with a seed per request.

The random number of a token depends only on the request's seed and the token's position, so a
request draws the same numbers in any batch, and again after a preemption. Each token takes one
uniform number and the inverse of the cumulative distribution: there is no generator state, and
nothing waits for the host. The sum runs in the order of token ids: matrix products round a row
differently in another batch (drafts, other requests), and in the order of probabilities two nearly
equal tokens would then swap, and with them every random number that selects one of them.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.common.devices import to_device
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject

MAX_TEMPERATURE = 100.0
MAX_TOP_K = (1 << 31) - 1
MAX_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1
MAX_PENALTY = 2.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_BIAS, MAX_BIASED = 100.0, 1024
MAX_STOP_TOKENS = 64
"""Bounds of request parameters: what is within them fits the tensors it is put into."""

_PENALTY = (-MAX_PENALTY, MAX_PENALTY, f"use {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
_LOGPROBS = (0, MAX_LOGPROBS, f"use 0 to {MAX_LOGPROBS}")
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, MAX_TEMPERATURE, f"use 0 (greedy) to {MAX_TEMPERATURE:g}"),
    "top_p": (math.ulp(0.0), 1, "use a number above 0 and at most 1"),
    "top_k": (0, MAX_TOP_K, f"use 0 (all tokens) to {MAX_TOP_K}"),
    "min_p": (0, 1, "use 0 (all tokens) to 1"),
    "seed": (-MAX_SEED - 1, MAX_SEED, "use a number of 64 bits"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (
        MIN_REPETITION,
        MAX_REPETITION,
        f"use {MIN_REPETITION:g} to {MAX_REPETITION:g}; 1 is none",
    ),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
"""Of each parameter that is given: the least, the most, and the remedy."""

_NO_LIMIT = 1 << 62
"""A top_k that keeps every token."""

_COLDEST = 1e-6
"""The lowest temperature above 0: logits divided by it stay finite in float32, and the likeliest
token has all probability."""

_SMALLEST = torch.finfo(torch.float32).tiny
"""The lowest top_p: one that float32 rounds to zero would not keep the likeliest token."""


@dataclass(frozen=True)
class SamplingParams:
    """How to generate for one prompt. A list in place of a tuple becomes one.

    temperature 0 is greedy. min_p keeps tokens with at least this share of the likeliest token's
    probability, top_k the k likeliest (0: all), then top_p the likeliest that together reach it.
    seed: None draws one at random.

    presence_penalty and frequency_penalty are subtracted from the logits of tokens in the output,
    once and for each occurrence; repetition_penalty divides the positive logits of tokens in the
    prompt or the output, and multiplies the others (arXiv 1909.05858). logit_bias: (token id, value
    added to its logit). grammar: what the output must match, as of `grammar.Grammars`;
    grammar_after: the token after which it begins (None: at once).

    `stop` ends the text before any of its strings, stop_token_ids before any of its tokens;
    ignore_eos continues to max_new_tokens (for benchmarks). Before min_new_tokens no token or stop
    string ends the output. skip_special_tokens: leave them out of the text. logprobs: None, or how
    many alternatives to report with each token's log-probability (0: none); prompt_logprobs: the
    same for the prompt's tokens. Log-probabilities are the model's own, before any of the above.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    grammar_after: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("logit_bias", "stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise QuantkitError(
                    f"{name} is {value!r}, a {type(value).__name__}", "give a list or a tuple"
                )
            object.__setattr__(self, name, tuple(value))  # hashable, as what is cached by them
        if self.max_new_tokens < 1:
            raise QuantkitError(
                f"max_new_tokens is {self.max_new_tokens}", "ask for at least one token"
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise QuantkitError(
                f"min_new_tokens is {self.min_new_tokens}", "use 0 to max_new_tokens"
            )
        if self.min_new_tokens and self.grammar is not None:
            raise QuantkitError(
                "a grammar decides where the output ends, and min_new_tokens forbids it",
                "leave one of them out",
            )
        for name, (least, most, remedy) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise QuantkitError(f"{name} is {value}", remedy)
        if "" in self.stop:
            raise QuantkitError("a stop string is empty", "leave it out")
        if len(self.logit_bias) > MAX_BIASED or not all(
            -MAX_BIAS <= bias <= MAX_BIAS for _, bias in self.logit_bias
        ):
            raise QuantkitError(
                "logit_bias is out of bounds",
                f"use {-MAX_BIAS:g} to {MAX_BIAS:g}, for at most {MAX_BIASED} tokens",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise QuantkitError(
                f"stop_token_ids holds {len(self.stop_token_ids)}",
                f"give at most {MAX_STOP_TOKENS}",
            )

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def named_tokens(self) -> list[int]:
        """Token ids that the request names."""
        return [*(token for token, _ in self.logit_bias), *self.stop_token_ids]

    @classmethod
    def from_json(cls, values: JsonObject) -> "SamplingParams":
        """From `dataclasses.asdict` via JSON, which has no tuples."""
        tuples = {name: tuple(values[name]) for name in ("stop", "stop_token_ids")}
        bias = tuple(map(tuple, values["logit_bias"]))
        return cls(**{**values, **tuples, "logit_bias": bias})


def check_defaults(defaults: JsonObject, file: Path) -> None:
    """Refuse sampling defaults that are out of bounds, naming their file."""
    known = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        **defaults,
    }
    for name, value in known.items():
        if isinstance(value, bool) or not isinstance(
            value, int if name == "top_k" else int | float
        ):
            raise QuantkitError(
                f"{file}: {name} is {value!r:.100}",
                f"use {'an integer' if name == 'top_k' else 'a number'}",
            )
    try:
        SamplingParams(**{**known, "top_k": max(known["top_k"], 0)})
    except QuantkitError as fault:
        raise QuantkitError(f"{file}: {fault.problem:.200}", fault.remedy) from fault


class Batch(NamedTuple):
    """Sampling parameters of a batch as tensors: temperature, top_p, min_p float32 [B]; top_k, seed
    int64 [B].

    None: every row is greedy.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor

    @classmethod
    def of(
        cls, params: list[SamplingParams], seeds: list[int], device: torch.device
    ) -> "Batch | None":
        if all(one.temperature == 0 for one in params):
            return None
        return cls(
            to_device(
                [max(one.temperature, _COLDEST) if one.temperature else 0.0 for one in params],
                device,
            ),
            to_device([max(one.top_p, _SMALLEST) for one in params], device),
            to_device([one.min_p for one in params], device),
            to_device([one.top_k or _NO_LIMIT for one in params], device),
            to_device([signed64(seed) for seed in seeds], device),
        )


class Logprobs(NamedTuple):
    """Of the model's own distribution (before temperature): of the chosen token [B]; values and ids
    of the n likeliest [B, n]; ranks int64 [B] of the chosen tokens, 1 for the likeliest."""

    chosen: Tensor
    top_values: Tensor
    top_ids: Tensor
    ranks: Tensor


def sample(logits: Tensor, batch: Batch | None, positions: Tensor) -> Tensor:
    """logits float32 [B, V], positions int64 [B] of the tokens to sample -> ids int64 [B]."""
    greedy = logits.argmax(dim=-1)
    if batch is None:
        return greedy
    drawn = draw(distribution(logits, batch), uniform(batch.seed, positions))
    return torch.where(batch.temperature == 0, greedy, drawn)


def distribution(logits: Tensor, batch: Batch) -> Tensor:
    """Probabilities float32 [B, V] to draw from, zero outside min_p, top_k and top_p. Rows of
    temperature 0 have those of temperature 1; their draw is not used."""
    temperature = torch.where(batch.temperature == 0, 1.0, batch.temperature)
    scaled = logits / temperature[:, None]
    if logits.device.type != "cpu":  # a captured step has no branches, and a GPU sorts fast
        return _limited(scaled, batch)
    limited = (batch.top_k < logits.shape[1]) | (batch.top_p < 1) | (batch.min_p > 0)
    if limited.all():
        return _limited(scaled, batch)
    probabilities = scaled.softmax(dim=-1)
    if limited.any():
        of_limited = Batch(*(values[limited] for values in batch))
        probabilities[limited] = _limited(scaled[limited], of_limited)
    return probabilities


def _limited(scaled: Tensor, batch: Batch) -> Tensor:
    """`distribution` of logits over their temperatures."""
    values, ids = scaled.sort(dim=-1, descending=True)
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    left_out = (ranks >= batch.top_k[:, None]) | (
        values < values[:, :1] + batch.min_p.log()[:, None]
    )
    probabilities = values.masked_fill_(left_out, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The first token stays even where it alone exceeds top_p: nothing comes before it.
    kept = torch.where(before < batch.top_p[:, None], probabilities, 0.0)
    return torch.empty_like(kept).scatter_(-1, ids, kept / kept.sum(dim=-1, keepdim=True))


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """probabilities [B, V], rows summing to 1; numbers [B] in [0, 1) -> where the cumulative sum
    first exceeds the number [B]."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    target = numbers.double() * cumulative[:, -1]
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    # A number so close to 1 that rounding carries it past the last token with any probability.
    last = probabilities.shape[1] - 1 - probabilities.flip(-1).gt(0).int().argmax(dim=-1)
    return torch.minimum(index, last)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Numbers in [0, 1) float64 [B], a hash (splitmix64, two rounds) of seed and position int64
    [B]."""
    mixed = _mix(_mix(seed) ^ position)
    return ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def log_probabilities(logits: Tensor, ids: Tensor, count: int) -> Logprobs:
    """logits float32 [B, V], chosen ids [B]; count: alternatives, at most the vocabulary."""
    values = logits.log_softmax(dim=-1)
    top_values, top_ids = values.topk(min(count, values.shape[1]), dim=-1)
    chosen = values.gather(1, ids[:, None])
    return Logprobs(chosen[:, 0], top_values, top_ids, (values > chosen).sum(dim=-1) + 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's step; int64 arithmetic wraps, and shifts are made logical by masking."""
    x = x + signed64(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed64(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed64(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def signed64(x: int) -> int:
    """The int64 with the low 64 bits of x."""
    return ((x + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
