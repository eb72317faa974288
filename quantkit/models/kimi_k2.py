"""Kimi-K2: DeepSeek-V3 with other sizes, 384 experts in one group, and no MTP layer."""

from quantkit.models.deepseek_v3 import (
    Config,
    DecoderLayer,
    Model,
    MtpLayer,
    parameters,
    scale_groups,
)

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
