"""Architectures: one file each, named after config.json's `model_type`."""

from importlib import import_module
from types import ModuleType
from typing import Any

from quantkit.errors import QuantkitError

ARCHITECTURES = ("deepseek_v3", "llama", "pangu_ultra_moe", "qwen2", "qwen3", "qwen3_moe")


def find_architecture(config: dict[str, Any]) -> ModuleType:
    """The model file for a config.json: it has Config, parameters, scale_groups and Model, and MtpLayer where the model has one."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise QuantkitError(
            f"architecture {model_type!r} is not supported",
            f"quantkit has {', '.join(ARCHITECTURES)}; others can be rounded without calibration (rtn-w4a16)",
        )
    return import_module(f"quantkit.models.{model_type}")
