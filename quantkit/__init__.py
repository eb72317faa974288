"""quantkit: quantize DeepSeek-R1 class models, run them on one box, and show that accuracy held."""

__version__ = "0.2.0"
