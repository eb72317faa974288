"""quantkit: quantize DeepSeek-R1 class models, run them on one box, and show that accuracy held.

The functions and classes below are imported on first use, so that `import quantkit` takes no time
(docs/python.md).
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# torch would import torch_npu with itself, which without CANN's libraries fails for every device:
# `find_device` imports it, where an NPU is asked for.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

__version__ = "0.2.0"
__all__ = [
    "Engine",
    "QuantkitError",
    "SamplingParams",
    "__version__",
    "convert",
    "evaluate",
    "inspect",
    "perplexity",
    "plan",
    "quantize",
    "register_rounding",
]

if TYPE_CHECKING:
    from quantkit.api import convert, inspect, plan, quantize
    from quantkit.calibrate.recipe import register_rounding
    from quantkit.common.errors import QuantkitError
    from quantkit.evaluation.api import evaluate, perplexity
    from quantkit.executor.engine import Engine
    from quantkit.executor.sampling.params import SamplingParams
else:  # hidden from type checkers, which would then accept any name
    _MODULES = {
        "Engine": "quantkit.executor.engine",
        "QuantkitError": "quantkit.common.errors",
        "SamplingParams": "quantkit.executor.sampling.params",
        "convert": "quantkit.api",
        "evaluate": "quantkit.evaluation.api",
        "inspect": "quantkit.api",
        "perplexity": "quantkit.evaluation.api",
        "plan": "quantkit.api",
        "quantize": "quantkit.api",
        "register_rounding": "quantkit.calibrate.recipe",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
