"""Names of dtypes: one table, whoever asks."""

import pytest
import torch

from quantkit.devices import dtype_named, find_dtype
from quantkit.errors import QuantkitError


@pytest.mark.parametrize(("short", "long"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_a_dtype_has_a_short_name_and_torchs(short: str, long: str) -> None:
    assert dtype_named(short) == dtype_named(long) == getattr(torch, long)
    assert find_dtype(short, torch.device("cpu")) == getattr(torch, long)


@pytest.mark.parametrize("name", ["", "half", "int8", "BF16"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(QuantkitError, match=r"is not known; use float32, bfloat16, float16, or fp32, bf16, fp16"):
        dtype_named(name)
