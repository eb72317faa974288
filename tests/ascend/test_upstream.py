"""The double against expected values that were computed by the definitions of CANN's own authors: the
CPU goldens of op-plugin's test/test_custom_ops (517f2e7), for the operators that are called here.

upstream.json has the calls and, of every result, values at some places. Operands are made here, from
their description and a seed: uniform in -2..2, or whole numbers.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("called")
CASES = json.loads(Path(__file__).with_name("upstream.json").read_text())
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16} | {
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def operand(text, rng):
    """`bf16 4x512`; of whole numbers below 100 or `i32 4x3 below 32`; `nines`, `order`: filled."""
    name, shape, *rest = text.split()
    sizes = [int(size) for size in shape.split("x")]
    if rest == ["nines"]:
        return torch.full(sizes, 9, dtype=DTYPES[name])
    if rest == ["order"]:
        return torch.arange(math.prod(sizes), dtype=DTYPES[name]).view(sizes)
    if name in ("i8", "i32", "i64"):
        low, high = (0, int(rest[1])) if rest else (-100, 100)
        return torch.from_numpy(rng.integers(low, high, sizes)).to(DTYPES[name])
    return torch.from_numpy(rng.random(sizes) * 4 - 2).to(DTYPES[name])


def operands(case):
    rng = np.random.default_rng(case["seed"])
    return {name: operand(text, rng) for name, text in case["operands"].items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['operator']}-{case['seed']}")
def test_a_result(case):
    operator = getattr(torch.ops.npu, case["operator"]).default
    found = operator(**operands(case), **case["options"])
    every = found if isinstance(found, (tuple, list)) else [found]
    for number, expected in case["results"].items():
        result = every[int(number)].contiguous()
        assert list(result.shape) == expected["shape"]
        values = result.flatten()[torch.tensor(expected["at"])].double()
        exact = torch.tensor(expected["values"], dtype=torch.float64)
        if not result.is_floating_point():  # a half may be rounded either way
            assert (values - exact).abs().max() <= case["whole"]
        else:
            scale = exact.abs().max()
            assert (values - exact).abs().max() <= ROUNDING[result.dtype] * scale, number


def test_there_are_enough_of_each():
    assert len(CASES) >= 100
    assert len({case["operator"] for case in CASES}) >= 8
