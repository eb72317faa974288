"""Quantization algorithms on tensors: no files, no printing, no choice of device.

awq, smooth       candidate scales that favour salient channels, or even out activations for int8
gptq              column-by-column rounding with error compensation; descent: coordinate descent after it
compensation      both of them for a linear; with an output cost, rows compensate for rows too
block_rounding    the inner loop of GPTQ on a CPU; block_kernel: in Triton
packing           4- and 8-bit codes in bytes and words, as the formats store them
"""
