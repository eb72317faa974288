"""Function calls of a reply, compared with the possible answers of BFCL (single turn).

A call is right if its name is, every parameter has one of its possible values, and none is missing
that must be there ("" among the values: it may be left out). The order of parallel calls is free;
texts are compared without case, blanks and punctuation, and an integer may be given for a float but
no float for an integer, as BFCL's own checker does. Calls are Python (`[f(x=1)]`) or JSON objects with name and arguments, alone, in a
list, in a fence or in <tool_call>.
"""

import ast
import json
import re
from typing import Any

from quantkit.common.result import JsonObject
from quantkit.evaluation.grading.code_blocks import blocks

Call = tuple[str, JsonObject]


def read_calls(text: str) -> list[Call] | None:
    """The calls of a reply; None where it is not nothing but calls."""
    tagged = re.findall(r"(?s)<tool_call>(.*?)</tool_call>", text)
    fenced = [block.source for block in blocks(text)] if "```" in text else []
    sources = tagged or fenced[-1:] or [text]
    found = [calls for source in sources if (calls := _parsed(source.strip())) is not None]
    return [call for calls in found for call in calls] if len(found) == len(sources) else None


def _parsed(source: str) -> list[Call] | None:
    found = _json_calls(source)
    return _python_calls(source) if found is None else found


def _json_calls(source: str) -> list[Call] | None:
    try:
        held = json.loads(source)
        return [
            (str(one["name"]), _object(one.get("arguments", one.get("parameters", {}))))
            for one in (held if isinstance(held, list) else [held])
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _python_calls(source: str) -> list[Call] | None:
    try:
        body = ast.parse(source, mode="eval").body
        nodes = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        calls = [node for node in nodes if isinstance(node, ast.Call) and not node.args]
        if len(calls) < len(nodes):
            return None
        return [
            (
                ast.unparse(node.func),
                {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg},
            )
            for node in calls
        ]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _object(value: Any) -> JsonObject:
    return dict(json.loads(value) if isinstance(value, str) else value)


def same_calls(calls: list[Call], possible: list[dict[str, dict[str, list[Any]]]]) -> bool:
    """Whether the calls are those of a `ground_truth`: one dict of name -> parameter -> values a
    call."""
    left = list(calls)
    for target in possible:
        match = next((call for call in left if _fits(call, target)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def floats_for_integers(calls: list[Call], functions: list[JsonObject]) -> bool:
    """Whether a parameter that its function declares as an integer gets a float."""
    kinds = {
        (one["name"], name): about.get("type")
        for one in functions
        for name, about in one.get("parameters", {}).get("properties", {}).items()
    }
    return any(
        type(value) is float and kinds.get((name, key)) == "integer"
        for name, given in calls
        for key, value in given.items()
    )


def _fits(call: Call, target: dict[str, dict[str, list[Any]]]) -> bool:
    name, given = call
    wanted = target.get(name)
    return (
        wanted is not None
        and given.keys() <= wanted.keys()
        and all(
            _plain(given[key]) in map(_plain, values) if key in given else "" in values
            for key, values in wanted.items()
        )
    )


def _plain(value: Any) -> Any:
    """A value as it is compared; the values of a dict are lists of possible ones in the answers."""
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^'\"]", "", value).lower()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {
            key: _plain(one[0] if isinstance(one, list) and len(one) == 1 else one)
            for key, one in value.items()
        }
    return (type(value) is bool, value)
