"""Alternative tensor names of a release or of transformers, mapped to those of the model's table
and the formats.

DeepSeek-V4's and Hy4's tables have the release's names; transformers writes some of them
differently, and DeepSeek-V4's and V4.1's releases name their scales like no other one.
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
    "deepseek_v41": ((re.compile(r"(?<!\.engram\.embed)\.scale$"), ".weight_scale_inv"),),
    "hy_v4": (
        (re.compile(r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\."), r".\1.hc_pre."),
        (re.compile(r"\.hc_pre\.hc_head\."), ".hc_head."),
        (re.compile(r"(?<!attn)\.linear_gate\."), ".gate_proj."),
    ),
}
"""By model_type of config.json: (pattern, replacement), applied in order."""


def apply_aliases(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The tensors under the names of the model's table."""
    return renamed(tensors, aliases(config, tensors))


def renamed(tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> dict[str, TensorInfo]:
    """names: old -> new, of those that change."""
    return {
        names.get(name, name): replace(info, name=names[name]) if name in names else info
        for name, info in tensors.items()
    }


def aliases(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Stored name -> name of the model's table, where they differ. A name never maps to one that
    exists, or that another maps to."""
    found: dict[str, str] = {}
    used = set(names)
    for name in names:
        alias = name
        for pattern, replacement in _NAMES.get(str(config.get("model_type")), ()):
            alias = pattern.sub(replacement, alias)
        if alias not in used:
            found[name] = alias
            used.add(alias)
    return found
