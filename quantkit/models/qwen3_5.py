"""Qwen3.5 dense: Qwen3-Next with a linear for each part of the linear attention, and a vision
tower, which is copied. A text model may also be published alone (model_type ends in _text), as
Qwen3.8-2.4T-A95B is.

The text model is computed. Rotary embeddings with three axes (mrope) reduce to ordinary ones for
text, whose tokens have the same position on all axes. The MTP layer (mtp.*) is copied for engines
that run it; transformers has no forward of it.
"""

from dataclasses import dataclass
from typing import Annotated

from quantkit.common.result import JsonObject
from quantkit.models import gqa
from quantkit.models.config import DECIDED, check_flag, refusal
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


@dataclass(frozen=True)
class TextConfig(gqa.Config):
    """flat: a text model alone, without `language_model` in its names."""

    flat: Annotated[bool, DECIDED] = False

    def name(self, name: str) -> str:
        """Name in the checkpoint of a tensor or module of the text model."""
        outer = name.startswith("model.") and not self.flat
        return f"model.language_model.{name.removeprefix('model.')}" if outer else name


def is_flat(config: JsonObject) -> bool:
    """Whether config.json is that of a text model alone."""
    return str(config.get("model_type")).endswith("_text")


def read_text(config: JsonObject) -> JsonObject:
    """The text model's part of config.json. Raises QuantkitError where there is none."""
    text = config if is_flat(config) else config.get("text_config")
    if not isinstance(text, dict):
        raise refusal("text_config", text, "an object")
    return {
        **text,
        "tie_word_embeddings": check_flag(
            config, "tie_word_embeddings", default=check_flag(text, "tie_word_embeddings")
        ),
    }


def plain_ropes(text: JsonObject) -> JsonObject:
    """The text model's fields with rotary embeddings of one axis."""
    ropes = {key: text[key] for key in ROPES if isinstance(text.get(key), dict)}
    return text | {
        key: {name: value for name, value in rope.items() if name not in _MROPE_KEYS}
        for key, rope in ropes.items()
    }


def read_decoder(text: JsonObject) -> JsonObject:
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


class Config(TextConfig):
    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        text = {"num_key_value_heads": _KV_HEADS, **read_text(config)}
        return cls(**read_decoder(text), flat=is_flat(config))


def parameters(config: TextConfig) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""
    return rename_rows(gqa.parameters(config), config.name)


def scale_groups(config: TextConfig, layer: int) -> list[ScaleGroup]:
    return rename_groups(gqa.scale_groups(config, layer), config.name)


class DecoderLayer(gqa.DecoderLayer):
    def __init__(self, config: TextConfig, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, RenamedWeights(weights, config.name))


class Model(gqa.Model):
    def __init__(self, config: TextConfig, weights: Weights) -> None:
        super().__init__(config, RenamedWeights(weights, config.name))
