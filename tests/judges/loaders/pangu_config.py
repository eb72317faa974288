"""openPangu's releases bring a configuration class as code to be run; this one has what engines
read of it."""

from transformers import DeepseekV3Config


class PanguConfig(DeepseekV3Config):
    model_type = "pangu_ultra_moe"
