"""Pure tensor mathematics of quantization: no paths, no printing, no choice of device.

weights.py   what a quantized linear is, whatever the format on disk, and its value
integer.py   int4 and int8 grids, round to nearest
fp4.py       E2M1 with two-level scales (NVFP4)
fp8.py       e4m3 over 128 x 128 blocks (DeepSeek's source format)
rounding.py  the grids as calibration sees them: fit, snap, store
awq.py       scales that favour salient channels
smooth.py    scales that even out activations for int8
gptq.py      rounding column by column, compensating the error so far
packing.py   nibbles into bytes and words, as the formats store them
npu_tiles.py the in-memory layout of the Ascend FP4 kernels
"""
