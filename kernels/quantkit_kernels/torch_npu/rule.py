"""A rule of torch_npu's manuals: a sentence, and whether a call's arguments keep it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
Arguments = SimpleNamespace
"""An operator's arguments by the names of its schema, defaults filled in."""


@dataclass(frozen=True)
class Rule:
    text: str
    holds: Callable[[Arguments], bool]
