"""The one protocol through which evaluation reaches a model, in this process (local.py) or at an
endpoint (endpoint.py).

Everything after the text is the same code for both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.common.errors import QuantkitError


@dataclass(frozen=True)
class Generation:
    """Sampling parameters. temperature 0 is greedy; max_tokens None leaves the limit to the model's
    context."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One request: chat messages, or a raw text to continue. `think` asks for a reply that starts
    inside <think>."""

    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None
    seed: int = 0
    think: bool = False


@dataclass(frozen=True)
class ModelReply:
    """One reply to `prompts[index]`.

    `think_open` says whether the prompt ended inside <think>, None where that is not known (an
    endpoint applies its own template).
    `reasoning` is set where the server parsed the thinking out of the text. `finish_reason` is
    stop, length, content_filter (a server's filter ended it), context (the request did not fit the
    model's context; `refusal` says so in the server's words, and there is no text) or a server's
    own word. With `error` set, there is no reply. Times are seconds. `logprobs`: of every token, as
    OpenAI's interface returns them, where they were asked for; they are not kept.
    """

    index: int
    text: str = ""
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float = 0.0
    think_open: bool | None = None
    reasoning: str | None = None
    error: str | None = None
    refusal: str | None = None
    logprobs: tuple[dict[str, Any], ...] = ()


class Generator(Protocol):
    """A model that answers prompts. `identity` names it for results and fingerprints: what changes
    when the weights do.

    identity_is_certain: no other model can have this identity. A server's word for its model is not
    that.
    """

    name: str
    identity: dict[str, Any]
    identity_is_certain: bool

    def generate(self, prompts: Sequence[Prompt], parameters: Generation) -> Iterator[ModelReply]:
        """Yield one completion per prompt, in any order, as they finish."""
        ...

    def close(self) -> None: ...


def reject_cache_option(url: str, cache: str | None) -> None:
    """Refuse to choose a server's cache."""
    if cache is not None:
        raise QuantkitError(
            f"--cache {cache} is for a model loaded here, and {url} has a cache of its own",
            "leave --cache out",
        )
