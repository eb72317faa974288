"""The interface of evaluation to a model, in this process (local.py) or at a server
(endpoint.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import ConfigDict, Field

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject


@dataclass(frozen=True)
class Generation:
    """Sampling parameters. temperature 0 is greedy; max_tokens None: up to the model's context."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One request: chat messages, or a raw text to continue. `think`: start the reply inside
    <think>."""

    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None
    seed: int = 0
    think: bool = False


TokenCount = Annotated[int, Field(ge=0, le=2**53)]
"""Exact in every reader of JSON."""


@dataclass(frozen=True)
class ModelReply:
    """One reply to `prompts[index]`.

    think_open: whether the prompt ended inside <think>; None where unknown (a server applies its
    own template). reasoning: set where the server separated it from the text. finish_reason: stop,
    length, content_filter, context (the request did not fit the model's context; `refusal` is the
    server's message, and there is no text), or a server's own. Texts are made encodable
    (`whole_text`). error: the request failed and there
    is no reply. latency_s in seconds. logprobs: of every token, in OpenAI's format, where
    requested; not stored.
    """

    index: int
    text: str = ""
    finish_reason: str = "stop"
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0
    latency_s: float = 0.0
    think_open: bool | None = None
    reasoning: str | None = None
    error: str | None = None
    refusal: str | None = None
    logprobs: tuple[JsonObject, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str) and not value.isascii():
                object.__setattr__(self, name, whole_text(value))


def whole_text(text: str) -> str:
    """Text that can be encoded: two halves of a surrogate pair, which a stream may send apart,
    become their character, and a lone one U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def estimated_tokens(*texts: str | None) -> int:
    """Tokens of texts that were not counted: one for five bytes, in Chinese as in English."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if text) // 5


@dataclass(frozen=True)
class Drafts:
    """Tokens that speculation drafted, and those that were accepted."""

    drafted: int
    accepted: int


class Generator(Protocol):
    """A model that answers prompts. `identity` identifies it in results and fingerprints: it
    changes when the weights do.

    identity_is_certain: no other model can have this identity; False for servers.
    """

    name: str
    identity: JsonObject
    identity_is_certain: bool

    def open_tokens(self) -> list[int]:
        """Tokens so far of the replies that are not finished; asked from another thread."""
        ...

    def drafts(self) -> Drafts | None:
        """Drafted tokens since the model was loaded; None where it does not say."""
        ...

    def generate(self, prompts: Sequence[Prompt], parameters: Generation) -> Iterator[ModelReply]:
        """Yield one reply per prompt, in any order, as they finish."""
        ...

    def close(self) -> None: ...


def reject_cache_option(url: str, cache: str | None) -> None:
    """Raise QuantkitError where --cache is given for a server."""
    if cache is not None:
        raise QuantkitError(
            f"--cache {cache} applies to a model loaded here, and {url} is a server",
            "leave --cache out",
        )
