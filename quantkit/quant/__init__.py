"""Pure tensor mathematics of quantization: no paths, no printing, no choice of device.

weights.py   what a quantized linear is, whatever the format on disk, and its value
integer.py   int4 and int8 grids
fp4.py       E2M1 with two-level scales (NVFP4)
rounding.py  the grids as calibration sees them: fit, snap, store
awq.py       scales that favour salient channels
smooth.py    scales that even out activations for int8
gptq.py      rounding column by column, compensating the error so far
packing.py   nibbles into bytes and words, as the formats store them
"""
