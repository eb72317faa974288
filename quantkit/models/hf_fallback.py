"""Configs of an architecture that its file does not compute but transformers does, declared by the
file as `FALLBACK`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.models.rope import length_kind

_ACTIVATIONS = (
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
class HfFallback:
    """An activation other than SiLU, rotary frequencies that depend on the text length, and
    true_fields: fields of config.json that are true. null_fields: those that may be null, each with
    a part of the names of tensors that exist where it is not."""

    null_fields: Mapping[str, str] = field(default_factory=dict)
    true_fields: tuple[str, ...] = ()

    def reason(self, config: Mapping[str, Any]) -> str:
        """The first of these that a config.json has; empty for none."""
        for name in self.true_fields:
            if config.get(name) is True:
                return f"{name} true"
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        if (activation := text.get("hidden_act")) in _ACTIVATIONS:
            return f"hidden_act {activation!r}"
        kind = length_kind(text)
        return f"rope scaling {kind!r}" if kind else ""

    def check_stored(self, config: Mapping[str, Any], stored: Iterable[str]) -> None:
        """Raise QuantkitError where a field is null, but tensors are stored that exist only where
        it is not."""
        stored = list(stored)
        for name, part in self.null_fields.items():
            tensor = next((tensor for tensor in stored if part in tensor), "")
            if config.get(name, 0) is None and tensor:
                raise QuantkitError(
                    f"config.json has {name} null, and {tensor} is stored",
                    "use the config.json of these weights",
                )
