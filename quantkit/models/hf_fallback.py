"""Configs of an architecture that its file does not compute, and transformers does. The file says
so, in `FALLBACK`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.models.rope import length_kind

_GATES = (
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "sigmoid",
    "tanh",
    "mish",
)


@dataclass(frozen=True)
class NullField:
    """A field that is null. part: of a tensor's name that tells that it is not."""

    field: str
    part: str

    def asked(self, config: Mapping[str, Any]) -> str:
        """What a config.json has of these; empty without."""
        return f"{self.field} null" if config.get(self.field, 0) is None else ""

    def check_stored(self, config: Mapping[str, Any], stored: Iterable[str]) -> None:
        if self.asked(config) and (
            name := next((name for name in stored if self.part in name), "")
        ):
            raise QuantkitError(
                f"config.json has {self.asked(config)}, and {name} is stored",
                "use the config.json of these weights",
            )


@dataclass(frozen=True)
class GatesAndLengths:
    """Other gates than SiLU's, and frequencies that depend on the length of the text."""

    def asked(self, config: Mapping[str, Any]) -> str:
        """What a config.json has of these; empty without."""
        inner = config.get("text_config")
        text = inner if isinstance(inner, Mapping) else config
        if (gate := text.get("hidden_act")) in _GATES:
            return f"hidden_act {gate!r}"
        kind = length_kind(text)
        return f"rope scaling {kind!r}" if kind else ""

    def check_stored(self, config: Mapping[str, Any], stored: Iterable[str]) -> None:
        """Names of tensors tell nothing of these."""


@dataclass(frozen=True)
class TrueFields:
    """Fields that are true."""

    fields: tuple[str, ...]

    def asked(self, config: Mapping[str, Any]) -> str:
        """What a config.json has of these; empty without."""
        return next((f"{field} true" for field in self.fields if config.get(field) is True), "")

    def check_stored(self, config: Mapping[str, Any], stored: Iterable[str]) -> None:
        """Names of tensors tell nothing of these."""


@dataclass(frozen=True)
class AnyOf:
    """Any of several."""

    parts: tuple[NullField | GatesAndLengths | TrueFields, ...]

    def asked(self, config: Mapping[str, Any]) -> str:
        """What a config.json has of these, the first; empty without."""
        return next((told for part in self.parts if (told := part.asked(config))), "")

    def check_stored(self, config: Mapping[str, Any], stored: Iterable[str]) -> None:
        names = list(stored)
        for part in self.parts:
            part.check_stored(config, names)


HfFallback = NullField | GatesAndLengths | AnyOf
