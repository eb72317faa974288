"""What every launch of a kernel needs besides its tensors: the stream, and the check of what it
returned."""

import torch

FORMATS = {"int4": 0, "fp4": 1, "int8": 2}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
CODES = {torch.int8: 0, torch.float8_e4m3fn: 1}
"""Of a cache in 8 bits."""
STORE, SILU_MUL, WEIGH = range(3)
"""`Epilogue` of common/packed.cuh: what becomes of a product."""


def stream_of(device: torch.device) -> int:
    """As `torch.cuda.current_stream(device).cuda_stream`, without the object that it makes: every
    launch asks."""
    index = torch.cuda.current_device() if device.index is None else device.index
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def checked(error: int) -> None:
    assert error == 0, f"CUDA error {error} at launch"
