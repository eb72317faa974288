"""From a checkpoint to a quantized checkpoint, and from one format to another.

run, result       quantize(); request, job: what to quantize and how, also for plan(); checks: the source
rtn               round-to-nearest without calibration
mixed_precision   --keep and --preset; bit_allocation, allocation: --bits and --size
pruning           removing routed experts
memory, cost      expected peak memory and run time
report            report.json, report.html and the verdict
convert           convert(); conversion_plan: what every tensor becomes
"""

from typing import TYPE_CHECKING

__all__ = ["QuantizationReport", "quantize"]

if TYPE_CHECKING:
    from quantkit.quantization.result import QuantizationReport
    from quantkit.quantization.run import quantize
else:

    def __getattr__(name: str) -> object:
        """On first use: options.py is imported without torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from quantkit.quantization import run

        return getattr(run, name)
