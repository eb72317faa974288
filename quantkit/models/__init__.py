"""Architectures: one file each, named after config.json's `model_type`."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from quantkit.errors import QuantkitError
from quantkit.models.architecture import Architecture, ModelConfig

ARCHITECTURES = ("deepseek_v3", "llama", "pangu_ultra_moe", "qwen2", "qwen3", "qwen3_moe")

if TYPE_CHECKING:  # mypy proves that each file offers what is asked of it
    from quantkit.models import deepseek_v3, llama, pangu_ultra_moe, qwen2, qwen3, qwen3_moe

    _DEEPSEEK: Architecture[deepseek_v3.Config] = deepseek_v3
    _PANGU: Architecture[pangu_ultra_moe.Config] = pangu_ultra_moe
    _LLAMA: Architecture[llama.Config] = llama
    _QWEN2: Architecture[qwen2.Config] = qwen2
    _QWEN3: Architecture[qwen3.Config] = qwen3
    _QWEN3_MOE: Architecture[qwen3_moe.Config] = qwen3_moe


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether there is a model file for a config.json."""
    return config.get("model_type") in ARCHITECTURES


def find_architecture(config: dict[str, Any]) -> Architecture[ModelConfig]:
    """The model file for a config.json. Raises QuantkitError where there is none."""
    model_type = config.get("model_type")
    if not is_known(config):
        raise QuantkitError(
            f"architecture {model_type!r} is not supported",
            f"quantkit has {', '.join(ARCHITECTURES)}",
        )
    return cast(Architecture[ModelConfig], import_module(f"quantkit.models.{model_type}"))
