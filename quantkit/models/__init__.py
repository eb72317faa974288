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
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "hy_v3",
    "kimi_k2",
    "kimi_k25",
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
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
)
_FILES = {"PanguEmbedded": "pangu_embedded", "deepseek_v4": "deepseek_v4.architecture"}
"""Files that are not named after the model_type."""
if TYPE_CHECKING:  # mypy proves that each file offers what is asked of it
    from quantkit.models import (
        deepseek_v3,
        deepseek_v32,
        glm4_moe,
        glm_moe_dsa,
        gpt_oss,
        hy_v3,
        kimi_k2,
        kimi_k25,
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

    _DEEPSEEK_V3: Architecture[deepseek_v3.Config] = deepseek_v3
    _DEEPSEEK_V32: Architecture[deepseek_v32.Config] = deepseek_v32
    _DEEPSEEK_V4: Architecture[deepseek_v4.Config] = deepseek_v4
    _GLM4_MOE: Architecture[glm4_moe.Config] = glm4_moe
    _GLM_MOE_DSA: Architecture[glm_moe_dsa.Config] = glm_moe_dsa
    _GPT_OSS: Architecture[gpt_oss.Config] = gpt_oss
    _HY_V3: Architecture[hy_v3.Config] = hy_v3
    _KIMI_K2: Architecture[kimi_k2.Config] = kimi_k2
    _KIMI_K25: Architecture[kimi_k25.Config] = kimi_k25
    _LLAMA: Architecture[llama.Config] = llama
    _MINIMAX_M2: Architecture[minimax_m2.Config] = minimax_m2
    _MISTRAL: Architecture[mistral.Config] = mistral
    _MIXTRAL: Architecture[mixtral.Config] = mixtral
    _OPENPANGU_V2: Architecture[openpangu_v2.Config] = openpangu_v2
    _PANGU_EMBEDDED: Architecture[pangu_embedded.Config] = pangu_embedded
    _PANGU_ULTRA_MOE: Architecture[pangu_ultra_moe.Config] = pangu_ultra_moe
    _QWEN2: Architecture[qwen2.Config] = qwen2
    _QWEN2_MOE: Architecture[qwen2_moe.Config] = qwen2_moe
    _QWEN3: Architecture[qwen3.Config] = qwen3
    _QWEN3_5: Architecture[qwen3_5.Config] = qwen3_5
    _QWEN3_5_MOE: Architecture[qwen3_5_moe.Config] = qwen3_5_moe
    _QWEN3_MOE: Architecture[qwen3_moe.Config] = qwen3_moe
    _QWEN3_NEXT: Architecture[qwen3_next.Config] = qwen3_next
    _SOLAR_OPEN: Architecture[solar_open.Config] = solar_open


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether there is a model file that computes a config.json."""
    return config.get("model_type") in ARCHITECTURES and not _elsewhere(config)


def _elsewhere(config: Mapping[str, Any]) -> str:
    """What a config.json has that the architecture's file leaves to transformers; empty without."""
    left = _left_to_transformers(config)
    return left.asked(config) if left else ""


def _left_to_transformers(config: Mapping[str, Any]) -> HfFallback | None:
    model_type = config.get("model_type")
    return (
        getattr(_file(str(model_type)), "FALLBACK", None) if model_type in ARCHITECTURES else None
    )


def _file(model_type: str) -> ModuleType:
    return import_module(f"quantkit.models.{_FILES.get(model_type, model_type)}")


def check_missing(config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """Raise QuantkitError where a field is null that decides who computes a model, and tensors are
    `stored` of another value."""
    if left := _left_to_transformers(config):
        left.check_stored(config, stored)


def find_architecture(config: dict[str, Any]) -> Architecture[ModelConfig]:
    """The model file for a config.json. Raises QuantkitError where there is none."""
    model_type = config.get("model_type")
    if what := _elsewhere(config):
        problem = (
            f"config.json has {what}, and quantkit's file of {model_type} does not compute that"
        )
        raise QuantkitError(
            problem,
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
