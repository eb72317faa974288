"""The double against expected values that were computed by the definitions of CANN's own authors: the
CPU goldens of op-plugin's test/test_custom_ops (517f2e7), and from case 121 on those of
vllm-ascend's tests (182b75e: gating, SwiGLU, experts, latent attention, W_UV's product), for the
operators that are called here. Of its attention with 128 heads a rank of eight's 16 are here.

upstream.json has the calls and, of every result, values at some places, or what is not supported. Operands are made here, from
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
FILLED = {"zeros": 0, "ones": 1, "nines": 9}
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def operand(text, rng):
    """`bf16 4x512`; of whole numbers below 100 or `i32 4x3 below 32`; `nines`, `order`: filled;
    `i64 2 is 5,0`. A list of operands is one of texts."""
    if isinstance(text, list):
        return [operand(one, rng) for one in text]
    name, shape, *rest = text.split()
    sizes = [int(size) for size in shape.split("x")]
    if rest and rest[0] in FILLED:
        return torch.full(sizes, FILLED[rest[0]], dtype=DTYPES[name])
    if rest and rest[0] == "is":
        return torch.tensor([*map(int, rest[1].split(","))], dtype=DTYPES[name]).view(sizes)
    if rest == ["order"]:
        return torch.arange(math.prod(sizes), dtype=DTYPES[name]).view(sizes)
    if name in ("i8", "i32", "i64"):
        low, high = (0, int(rest[1])) if rest else (-100, 100)
        return torch.from_numpy(rng.integers(low, high, sizes)).to(DTYPES[name])
    return torch.from_numpy(rng.random(sizes) * 4 - 2).to(DTYPES[name])


def operands(case):
    rng = np.random.default_rng(case["seed"])
    made = {}
    for name, text in case["operands"].items():
        made[name] = made[text] if isinstance(text, str) and text in made else operand(text, rng)
    return made


def of_upstream(key):
    cases = [case for case in CASES if key in case]
    return pytest.mark.parametrize(
        "case", cases, ids=lambda one: f"{one['operator']}-{one['seed']}"
    )


def call(case):
    return getattr(torch.ops.npu, case["operator"]).default(**operands(case), **case["options"])


@of_upstream("refused")
def test_what_is_not_supported_is_named(case):
    with pytest.raises(RuntimeError, match=case["refused"]):
        call(case)


@of_upstream("results")
def test_a_result(case):
    found = call(case)
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
    assert len(CASES) >= 230
    assert len({case["operator"] for case in CASES}) >= 13
