"""GLM-5: DeepSeek-V3.2's attention with an indexer that rotates adjacent channels, and layers that
share one.

A sharing layer attends to the tokens that the last layer with an indexer selected (arXiv
2603.12201). The MTP layer has its own.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Annotated

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.models import deepseek_v32
from quantkit.models.config import DECIDED, check_count, refusal
from quantkit.models.deepseek_v32 import DecoderLayer, Model, MtpLayer, parameters, scale_groups

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]

_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}
_FIRST_SHARED = 2
"""transformers' default of index_skip_topk_offset."""


@dataclass(frozen=True)
class Config(deepseek_v32.Config):
    """indexer_types: full or shared, for each layer before the MTP layers."""

    index_n_heads: int = 32
    indexer_types: Annotated[tuple[str, ...], DECIDED] = ()

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        made = cls.read(config, interleaved=True)
        assert isinstance(made, cls), made
        return replace(made, indexer_types=read_types(config, made.num_hidden_layers))

    @property
    def indexer_interleaved(self) -> bool:
        return True

    @property
    def max_independent_tokens(self) -> int | None:
        return self.index_topk if _SHARED in self.indexer_types else None

    def has_indexer(self, layer: int) -> bool:
        return layer >= len(self.indexer_types) or self.indexer_types[layer] == _FULL


def read_types(config: JsonObject, num_layers: int, others: Container[int] = ()) -> tuple[str, ...]:
    """As in transformers: listed, or as a pattern of letters, or with a frequency from some layer
    on. others: layers without sparse attention, for which this is `full`."""
    key = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    listed = config.get(key)
    if listed is None:
        key = "index_topk_freq"
        frequency, first = config.get("index_topk_freq"), config.get("index_skip_topk_offset")
        step = 1 if frequency is None else check_count("index_topk_freq", frequency)
        start = (
            _FIRST_SHARED
            if first is None
            else check_count("index_skip_topk_offset", first, least=0)
        )
        types = [
            _SHARED if max(layer - start + 1, 0) % step else _FULL for layer in range(num_layers)
        ]
    else:
        types = [_LETTERS.get(one, one) for one in listed] if isinstance(listed, str | list) else []
        if len(types) != num_layers or not {*map(str, types)} <= {_FULL, _SHARED}:
            raise refusal(
                key, listed, f"{_FULL} or {_SHARED} for each of num_hidden_layers = {num_layers}"
            )
    types = [_FULL if layer in others else one for layer, one in enumerate(types)]
    first = next(layer for layer in range(num_layers + 1) if layer not in others)
    if types[first:] and types[first] == _SHARED:
        raise QuantkitError(
            f"config.json has {key} by which the first layer shares an indexer",
            "there is no layer before it: use the model's own",
        )
    return tuple(types)
