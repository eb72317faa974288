"""From one format to another without calibration, or to plain BF16: decode format A, encode format
B, write.

Codes and zero points are never touched; MXFP4 becomes NVFP4 with the same values where its powers
of two allow it (grids/mxfp4_to_nvfp4.py). What may change is the dtype of scales, and values that
become plain; for every part of the model the largest relative error is measured while converting
and written into manifest.json. Zero means bit-exact.

Memory is one unit, UNIT_BYTES of output or the largest single tensor, a few copies of it in
float32, and what waits to be written (`checkpoint.writer.WAITING`).

run.py           convert(): the straight line
plan.py          what every tensor becomes; target.py: which format a checkpoint may have
differences.py   how a stored value differs from what it was made of
report.py        what came of it
"""

from quantkit.quantization.conversion.report import ConversionReport
from quantkit.quantization.conversion.run import convert

__all__ = ["ConversionReport", "convert"]
