"""Argument checks shared by the operators. Every refusal is a ValueError that names the
argument."""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse `tensor` unless it has `shape` (None: any size) and one of `dtypes`."""
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape {list(tensor.shape)}, expected [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{name}: dtype {tensor.dtype}, expected {' or '.join(str(dtype) for dtype in dtypes)}"
        )


def check_compute_dtype(dtype: torch.dtype) -> None:
    require(
        dtype in FLOAT_DTYPES,
        f"dtype: {dtype} is not a compute dtype, expected one of "
        f"{', '.join(map(str, FLOAT_DTYPES))}",
    )
