"""Tensors that a release, or transformers, writes by other names than the model's table and the
formats know: seen by these.

DeepSeek-V4's table has the release's names. Of these transformers writes some otherwise, and the
release calls scales as no other does.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from quantkit.checkpoint.header import TensorInfo

_NAMES: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "deepseek_v4": (
        (re.compile(r"^model\.embed_tokens\."), "embed."),
        (re.compile(r"^model\.hc_head\."), ""),
        (re.compile(r"^hc_(fn|base|scale)$"), r"hc_head_\1"),
        (re.compile(r"^model\."), ""),
        (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
        (re.compile(r"\.scale$"), ".weight_scale_inv"),
    ),
}
"""By model_type of config.json: patterns and what replaces them, one after the other."""


def renamed(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by names that are known."""
    names = known_names(config, tensors)
    return {
        names.get(name, name): replace(one, name=names[name]) if name in names else one
        for name, one in tensors.items()
    }


def known_names(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Names of tensors that are seen by others, and these. None becomes one that is there, or that
    another becomes."""
    found: dict[str, str] = {}
    taken = set(names)
    for name in names:
        own = name
        for pattern, replacement in _NAMES.get(str(config.get("model_type")), ()):
            own = pattern.sub(replacement, own)
        if own not in taken:
            found[name] = own
            taken.add(own)
    return found
