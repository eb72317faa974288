"""Reading a config.json into an architecture's dataclass, whose fields have config.json's names."""

from dataclasses import MISSING, fields
from typing import Any

from quantkit.errors import QuantkitError


def read_fields(config_class: type, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `config_class` that config.json gives. Raises QuantkitError naming a field that has no default and is missing.

    `rope` is not read: it is made from several keys by the architecture.
    """
    values = {}
    for field in fields(config_class):
        if field.name in config:
            values[field.name] = config[field.name]
        elif field.name != "rope" and field.default is MISSING:
            raise QuantkitError(f"config.json lacks {field.name}", "use the config.json that came with the model")
    return values


def refuse_attention_bias(config: dict[str, Any]) -> None:
    if config.get("attention_bias"):
        raise QuantkitError("config.json has attention_bias", "quantkit computes this architecture without attention biases")
