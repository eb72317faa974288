"""openPangu-Embedded 1B and 7B: Llama with biases on q, k, v and o."""

from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.models import gqa
from quantkit.models.config import check_flag
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.sliding_window import refuse_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]

_OTHERS = ("mlp_bias", "qkv_bias", "attention_bias", "param_sink_number", "sandwich_norm")
"""Fields of related architectures that this release does not have, and that would change the
forward pass."""


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        """The vendor's configuration class has `bias` true and a rope_theta of 16 million, vLLM
        10000: config.json must have one."""
        for key in _OTHERS:
            if config.get(key):
                raise QuantkitError(
                    f"config.json has {key} = {config[key]!r}",
                    "quantkit computes openPangu-Embedded without",
                )
        refuse_windows(config)
        bias = check_flag(config, "bias", default=True)
        return cls(**gqa.read_config(config, default_theta=None), qkv_bias=bias, o_bias=bias)
