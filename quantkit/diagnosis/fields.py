"""Fields of config.json that are wrong by themselves, whatever the weights: what no model of any
architecture can have."""

import re
from collections.abc import Mapping
from typing import Any

from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.structure import Structure
from quantkit.diagnosis.survey import Survey
from quantkit.models import is_known

_LARGEST_EPSILON = 0.01
"""Published models have 1e-5 and less."""
_DTYPES = ("float16", "bfloat16", "float32", "float64", "half", "float", "double", "auto")
"""What transformers and vLLM take for activations."""
_GENERATES = ("CausalLM", "ConditionalGeneration")
_PUBLISHED_AS = {"kimik2": ("deepseekv3",), "kimik25": ("kimik25", "deepseekv3")}
"""Classes of another name than the model_type's, without signs: Kimi-K2 is published as DeepSeek's
class."""


def check_fields(survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
    """Epsilon, dtype and class. Of a config.json that could not be read nothing is told."""
    config = survey.config
    if not config:
        return
    if not isinstance(config.get("model_type"), str):
        findings.add(
            "config-field",
            "config.json",
            "it has no model_type, and engines choose the model's code and its fields by it",
        )
        return
    _check_class(config, findings)
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str) and dtype.removeprefix("torch.") not in _DTYPES:
        told = f"torch_dtype {dtype!r} is no dtype that a model is computed in"
        findings.add("config-field", "config.json", told, "write float16, bfloat16 or float32")
    epsilon = _LARGEST_EPSILON if structure.config is None else structure.config.rms_norm_eps
    if not 0 < epsilon <= _LARGEST_EPSILON:
        findings.add(
            "config-field", "config.json", f"rms_norm_eps is {epsilon:g}, and no model has that"
        )


def _check_class(config: Mapping[str, Any], findings: DiagnosisFindings) -> None:
    """vLLM and SGLang choose the model's code by `architectures`, transformers by model_type."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if not first:
        findings.add(
            "class-missing",
            "config.json",
            "architectures names no class, and vLLM and SGLang choose the model's code by it",
        )
        return
    if not is_known(config):
        return
    family, _, task = first.partition("For")
    kind = _plain_name(str(config["model_type"]))
    if _plain_name(family) not in (kind, *_PUBLISHED_AS.get(kind, ())) or not task.startswith(
        _GENERATES
    ):
        told = (
            f"architectures says {first}, and model_type {config['model_type']}: engines take "
            "the one or the other"
        )
        findings.add("class-wrong", "config.json", told)


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
