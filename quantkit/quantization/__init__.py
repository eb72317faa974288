"""From a checkpoint to a quantized checkpoint.

run.py      quantize(): the straight line
opening.py  what quantize() and plan() begin with: what is asked for, of which model, with nothing
known to be wrong
checks.py   everything that can be known to be wrong before the first weight is read
output.py   what the output holds, unit by unit, and what became of every tensor of the source
nearest.py  rounding without calibration
report.py   report.json and report.html
memory.py   what a run will hold in memory; cost.py: how long it should take
"""

from quantkit.quantization.run import QuantizationReport, quantize

__all__ = ["QuantizationReport", "quantize"]
