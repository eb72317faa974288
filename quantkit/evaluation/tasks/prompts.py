"""Rendering prompts: a task's Jinja2 template over one problem and its few-shot examples."""

import hashlib
import json
import re
import string
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generators.generator import Prompt
from quantkit.evaluation.tasks.definitions import Problem, Setting

Shot = dict[str, Any]

_environment = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
)
_environment.filters["regex_replace"] = lambda text, pattern, value: re.sub(pattern, value, text)
_environment.globals["letters"] = string.ascii_uppercase


def render(setting: Setting, problem: Problem, shots: list[Shot], seed: int) -> Prompt:
    """The prompt of one problem. `shots` are the fields of candidate examples; the first that
    apply are used."""
    if setting.shots_same_group:
        shots = [shot for shot in shots if shot.get("group") == problem.group]
    shots = shots[: setting.shots]
    if len(shots) < setting.shots:
        raise QuantkitError(
            f"{setting.task.name} needs {setting.shots} shots and has {len(shots)}",
            "complete the file of shots",
        )
    try:
        text = _environment.from_string(setting.prompt).render(problem.fields | {"shots": shots})
    except TemplateError as error:
        raise QuantkitError(
            f"prompt of {setting.task.name} under {setting.protocol}: {error}",
            "see the task's YAML",
        ) from error
    if setting.raw:
        return Prompt(text=text, seed=seed)
    system = ({"role": "system", "content": setting.system},) if setting.system else ()
    return Prompt(
        messages=(*system, {"role": "user", "content": text}), seed=seed, think=setting.thinking
    )


RAW = "raw prompt"
"""Role of a prompt that is no conversation."""


def prompt_parts(prompt: Prompt) -> list[dict[str, str]]:
    """Role and content of the sent messages; a raw prompt is one part. The server or tokenizer
    applies the chat template to them."""
    return list(prompt.messages) or [{"role": RAW, "content": prompt.text or ""}]


def sample_seed(seed: int, problem: str, repeat: int) -> int:
    """The seed of one sample; independent of the number of problems and repeats."""
    return (
        int.from_bytes(
            hashlib.sha256(json.dumps([seed, problem, repeat]).encode()).digest()[:4], "big"
        )
        & 0x7FFFFFFF
    )
