"""Architectures: one file each, named after config.json's `model_type`."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from quantkit.common.errors import QuantkitError
from quantkit.models.architecture import Architecture, ModelConfig
from quantkit.models.hf_fallback import HfFallback

ARCHITECTURES = (
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "glm4_moe",
    "glm5_next",
    "glm_moe_dsa",
    "gpt_oss",
    "hy_v3",
    "hy_v4",
    "kimi_k2",
    "kimi_k25",
    "kimi_k3",
    "kimi_linear",
    "llama",
    "minimax_m2",
    "mistral",
    "mixtral",
    "openpangu_v2",
    "PanguEmbedded",
    "pangu_ultra_moe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "solar_open",
)
_FILES = {
    "PanguEmbedded": "pangu_embedded",
    "deepseek_v4": "deepseek_v4.architecture",
    "deepseek_v41": "deepseek_v41.architecture",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen4_exp": "qwen4_exp.architecture",
    "qwen4_exp_text": "qwen4_exp.architecture",
}
"""Modules that are not named after the model_type."""
_BLOCK_HEADS = {"deepseek_v4": "deepseek_v4.dspark", "deepseek_v41": "deepseek_v41.dspark"}
if TYPE_CHECKING:  # mypy checks that every file implements the protocol
    from quantkit.models import (
        deepseek_v3,
        deepseek_v32,
        glm4_moe,
        glm5_next,
        glm_moe_dsa,
        gpt_oss,
        hy_v3,
        hy_v4,
        kimi_k2,
        kimi_k3,
        kimi_k25,
        kimi_linear,
        llama,
        minimax_m2,
        mistral,
        mixtral,
        openpangu_v2,
        pangu_embedded,
        pangu_ultra_moe,
        qwen2,
        qwen2_moe,
        qwen3,
        qwen3_5,
        qwen3_5_moe,
        qwen3_moe,
        qwen3_next,
        solar_open,
    )
    from quantkit.models.deepseek_v4 import architecture as deepseek_v4
    from quantkit.models.deepseek_v41 import architecture as deepseek_v41
    from quantkit.models.qwen4_exp import architecture as qwen4_exp

    _CHECKED: tuple[Architecture[Any], ...] = (
        deepseek_v3,
        deepseek_v32,
        deepseek_v4,
        deepseek_v41,
        glm4_moe,
        glm5_next,
        glm_moe_dsa,
        gpt_oss,
        hy_v3,
        hy_v4,
        kimi_k2,
        kimi_k25,
        kimi_k3,
        kimi_linear,
        llama,
        minimax_m2,
        mistral,
        mixtral,
        openpangu_v2,
        pangu_embedded,
        pangu_ultra_moe,
        qwen2,
        qwen2_moe,
        qwen3,
        qwen3_5,
        qwen3_5_moe,
        qwen3_moe,
        qwen3_next,
        qwen4_exp,
        solar_open,
    )


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether an architecture file computes the model of a config.json."""
    return config.get("model_type") in ARCHITECTURES and not _fallback_reason(config)


def _fallback_reason(config: Mapping[str, Any]) -> str:
    """Why a known model_type is left to transformers; empty where it is not."""
    fallback = _fallback(config)
    return fallback.reason(config) if fallback else ""


def _fallback(config: Mapping[str, Any]) -> HfFallback | None:
    model_type = config.get("model_type")
    known = model_type in ARCHITECTURES
    return getattr(_file(str(model_type)), "FALLBACK", None) if known else None


def _file(model_type: str) -> ModuleType:
    return import_module(f"quantkit.models.{_FILES.get(model_type, model_type)}")


def check_missing(config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """Raise QuantkitError where a null field of config.json contradicts the `stored` tensors."""
    if fallback := _fallback(config):
        fallback.check_stored(config, stored)


def find_block_head(config: Mapping[str, Any]) -> Any:
    """The module of a draft head that guesses blocks of tokens (`HEAD`, `head_parameters`);
    None for models that have none here."""
    module = _BLOCK_HEADS.get(str(config.get("model_type")))
    return None if module is None else import_module(f"quantkit.models.{module}")


def find_architecture(config: dict[str, Any]) -> Architecture[ModelConfig]:
    """The architecture file for a config.json. Raises QuantkitError where there is none."""
    model_type = config.get("model_type")
    if reason := _fallback_reason(config):
        raise QuantkitError(
            f"config.json has {reason}, and quantkit's file of {model_type} does not compute that",
            "quantize, run, eval and ppl compute it by transformers; serve it with another engine",
        )
    if model_type is None:
        raise QuantkitError(
            "config.json has no model_type, by which the model's code is chosen",
            "use the config.json that came with the model",
        )
    if not is_known(config):
        raise QuantkitError(
            f"architecture {model_type!r} is not supported by this command",
            "quantize, run, ppl and eval compute it where transformers does; quantkit has files "
            f"of {', '.join(ARCHITECTURES)}",
        )
    return cast(Architecture[ModelConfig], _file(str(model_type)))
