"""Every condition of every rule: a call just inside it passes, one just outside is refused by that
rule's own words.

rule_bounds.yaml has the calls. A tensor is its dtype and shape, `bf16 4x128`; `strided` is not
contiguous, `= 1 3` are values, `1 times 9` is a list.
"""

import re
from pathlib import Path

import pytest
import torch
import yaml
from quantkit_kernels.torch_npu import calls, rules

pytestmark = pytest.mark.usefixtures("called")
BOUNDS = yaml.safe_load(Path(__file__).with_name("rule_bounds.yaml").read_text())
DTYPES = {
    **{"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64},
    **{"i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64},
}


def read(value, device="meta"):
    """What a value of the table means; floats on a CPU are random, whole numbers zero."""
    if isinstance(value, list):
        return [read(one, device) for one in value]
    if not isinstance(value, str):
        return value
    if repeated := re.fullmatch(r"(\d+) times (\d+)", value):
        return [int(repeated[1])] * int(repeated[2])
    name, _, rest = value.partition(" ")
    if name not in DTYPES or not rest:
        return DTYPES.get(name, value)
    if rest.startswith("= "):
        return torch.tensor([int(one) for one in rest[2:].split()], dtype=DTYPES[name])
    sizes = [int(size) for size in rest.removesuffix(" strided").split("x")]
    strided = rest.endswith(" strided")
    if strided:
        sizes[-1] *= 2
    made = torch.zeros(sizes, dtype=DTYPES[name], device=device)
    if device == "cpu" and made.is_floating_point():
        made.normal_(generator=torch.Generator().manual_seed(0))
    return made[..., ::2] if strided else made


def good_call(name):
    """Arguments by name that keep every rule of operator `name`."""
    return {key: read(value, "cpu") for key, value in BOUNDS[name]["call"].items()}


def broken(name, change):
    merged = BOUNDS[name]["call"] | change
    return rules.violated(
        name, calls.bind(name, (), {key: read(value) for key, value in merged.items()})
    )


@pytest.mark.parametrize("name", rules.RULES)
def test_inside(name):
    found = {str(change): broken(name, change) for change in [{}, *BOUNDS[name]["passes"]]}
    assert {change: why for change, why in found.items() if why is not None} == {}


@pytest.mark.parametrize("name", rules.RULES)
def test_outside(name):
    """Each by the rule it breaks, and every rule refuses something."""
    refusing = set()
    for words, changes in BOUNDS[name]["refused"].items():
        for change in changes:
            why = broken(name, change)
            assert why is not None, f"passed: {change}"
            rule = why.partition("; got ")[0]
            assert words in rule, f"{change}: {why}"
            refusing.add(rule)
    assert refusing == {f"{name}: {rule.text}" for rule in rules.RULES[name]}
