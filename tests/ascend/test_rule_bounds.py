"""Every condition of every rule: a call just inside it passes, one just outside is refused by that
rule's own words."""

import functools
from typing import Any

import pytest
from ascend import attention_rule_bounds, rule_bounds
from ascend.rule_bounds import Change, made
from ascend.test_torch_npu import good_calls
from quantkit_kernels.torch_npu import calls, rules

pytestmark = pytest.mark.usefixtures("called")
INSIDE = rule_bounds.INSIDE + attention_rule_bounds.INSIDE
OUTSIDE = rule_bounds.OUTSIDE + attention_rule_bounds.OUTSIDE


@functools.cache
def good() -> dict[str, Any]:
    return good_calls()


def broken(name: str, change: Change) -> str | None:
    args, kwargs = good()[name]
    arguments = calls.bind(name, args, kwargs)
    for argument, value in change.items():
        assert hasattr(arguments, argument), argument
        setattr(arguments, argument, made(value))
    return rules.violated(name, arguments)


@pytest.mark.parametrize("name", rules.RULES)
def test_inside(name: str) -> None:
    refused = {
        str(change): why
        for operator, change in INSIDE
        if operator == name and (why := broken(name, change)) is not None
    }
    assert refused == {}


@pytest.mark.parametrize("name", rules.RULES)
def test_outside(name: str) -> None:
    """Each by the rule it breaks, and every rule refuses something."""
    said = set()
    for operator, change, words in OUTSIDE:
        if operator == name:
            why = broken(name, change)
            assert why is not None, f"passed: {change}"
            rule = why.partition("; got ")[0]
            assert words in rule, f"{change}: {why}"
            said.add(rule)
    assert said == {f"{name}: {rule.text}" for rule in rules.RULES[name]}
