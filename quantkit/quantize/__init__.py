"""From a checkpoint to a quantized checkpoint.

run.py      quantize(): the straight line
checks.py   everything that can be known to be wrong before the first weight is read
output.py   what the output holds, unit by unit, and what became of every tensor of the source
nearest.py  rounding without calibration
"""

from quantkit.quantize.run import Report, quantize

__all__ = ["Report", "quantize"]
