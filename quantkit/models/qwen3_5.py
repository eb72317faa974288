"""Qwen3.5 dense: Qwen3-Next with a linear for each part of the linear attention, and a vision
tower, which is copied.

The text model is computed. Rotary embeddings with three axes (mrope) reduce to ordinary ones for
text, whose tokens have the same position on all axes. The MTP layer (mtp.*) is copied for engines
that run it; transformers has no forward of it.
"""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import check_flag, refusal
from quantkit.models.gqa import MtpLayer
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.qwen3_next import DEFAULTS, ROTARY_SHARE, read_delta_net
from quantkit.models.sliding_window import refuse_windows
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()

ROPES = ("rope_scaling", "rope_parameters")
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
_KV_HEADS = 4
"""transformers' default."""


def _rename(name: str) -> str:
    return (
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
    )


def read_text(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of config.json. Raises QuantkitError where there is none."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise refusal("text_config", text, "an object")
    return {
        **text,
        "tie_word_embeddings": check_flag(
            config, "tie_word_embeddings", default=check_flag(text, "tie_word_embeddings")
        ),
    }


def plain_ropes(text: dict[str, Any]) -> dict[str, Any]:
    """The text model's fields with rotary embeddings of one axis."""
    ropes = {key: text[key] for key in ROPES if isinstance(text.get(key), dict)}
    return text | {
        key: {name: value for name, value in rope.items() if name not in _MROPE_KEYS}
        for key, rope in ropes.items()
    }


def read_decoder(text: dict[str, Any]) -> dict[str, Any]:
    """The fields of `gqa.Config` that both Qwen3.5 architectures share."""
    text = DEFAULTS | plain_ropes(text)
    refuse_windows({key: value for key, value in text.items() if key != "layer_types"})
    values = gqa.read_config(text, partial_rotary_factor=ROTARY_SHARE)
    bias = check_flag(text, "attention_bias")
    return {
        **values,
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
        "recurrent": read_delta_net(text, values["num_hidden_layers"], joined=False),
        "output_gate": True,
        "norm_offset": 1.0,
        "copied_prefixes": ("mtp.", "model.visual."),
    }


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        return cls(**read_decoder({"num_key_value_heads": _KV_HEADS, **read_text(config)}))


def parameters(config: gqa.Config) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""
    return rename_rows(gqa.parameters(config), _rename)


def scale_groups(config: gqa.Config, layer: int) -> list[ScaleGroup]:
    return rename_groups(gqa.scale_groups(config, layer), _rename)


class DecoderLayer(gqa.DecoderLayer):
    def __init__(self, config: gqa.Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, RenamedWeights(weights, _rename))


class Model(gqa.Model):
    def __init__(self, config: gqa.Config, weights: Weights) -> None:
        super().__init__(config, RenamedWeights(weights, _rename))
