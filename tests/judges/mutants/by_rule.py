"""Mutants by rule: one small change at a place of a source, in Python by its syntax tree, in C++ by
its tokens."""

import ast
import hashlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate

SWAPPED = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.MatMult: "*",
}
COMPARED = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}


@dataclass(frozen=True)
class Mutant:
    """`source[start:end]` replaced by `new` in a file; `line` is 1-based, `function` the innermost
    one around it.

    number: which of the function's mutants that read the same it is.
    """

    path: str
    start: int
    end: int
    new: str
    old: str
    rule: str
    line: int
    function: str
    number: int = 0

    @property
    def key(self):
        """What names a mutant from run to run, wherever in the file it stands."""
        told = (self.path, self.function, self.rule, self.old, self.new, self.number)
        return hashlib.sha256(":".join(map(str, told)).encode()).hexdigest()[:10]

    def apply(self, source):
        assert source[self.start : self.end] == self.old, (
            f"{self.path}:{self.line} changed since the mutant was made"
        )
        return source[: self.start] + self.new + source[self.end :]


class Places:
    """Offsets in a source of the nodes of its tree."""

    def __init__(self, source):
        self.source = source
        self._lines = source.split("\n")
        self._starts = [0, *accumulate(len(line) + 1 for line in self._lines)]

    def span(self, node):
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _offset(self, line, column):
        """column: in bytes, as the tree has it."""
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def text(self, node):
        start, end = self.span(node)
        return self.source[start:end]


def of_python(path, source):
    places, tree = Places(source), ast.parse(source)
    found = []
    for node, function, skipped in _walk(tree, "", False):
        if skipped:
            continue
        for start, end, new, rule in _changes(node, places):
            line = source.count("\n", 0, start) + 1
            found.append(Mutant(path, start, end, new, source[start:end], rule, line, function))
    return numbered(found)


def numbered(found):
    seen = Counter()
    numbered = []
    for one in found:
        alike = (one.function, one.rule, one.old, one.new)
        numbered.append(replace(one, number=seen[alike]))
        seen[alike] += 1
    return numbered


def _walk(node, function, skipped):
    """Every node with the function around it; not: annotations, docstrings, messages, assertions,
    imports, what a rule says of itself."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".strip(".")
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not function:
        function = node.targets[0].id
    yield node, function, skipped
    for name, value in ast.iter_fields(node):
        hidden = (
            skipped
            or name in ("annotation", "returns", "decorator_list")
            or isinstance(node, (ast.Assert, ast.JoinedStr))
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(
                    child, function, hidden or isinstance(child, (ast.Import, ast.ImportFrom))
                )


def _changes(node, places):
    rule = _RULES.get(type(node))
    if rule is not None:
        yield from rule(node, places)


def _operator(node, places):
    left, right = places.span(node.left)[1], places.span(node.right)[0]
    between = places.source[left:right]
    if type(node.op) in SWAPPED and "#" not in between:
        core = between.strip(" ()\n")
        start = left + between.index(core)
        yield start, start + len(core), SWAPPED[type(node.op)], "operator"


def _compare(node, places):
    parts = [node.left, *node.comparators]
    for index, op in enumerate(node.ops):
        left, right = places.span(parts[index])[1], places.span(parts[index + 1])[0]
        between = places.source[left:right]
        core = between.strip(" ()\n")
        start = left + between.index(core)
        yield start, start + len(core), COMPARED[type(op)], "comparison"


def _constant(node, places):
    start, end = places.span(node)
    if isinstance(node.value, bool):
        yield start, end, str(not node.value), "constant"
    elif isinstance(node.value, int):
        yield start, end, str(node.value + 1), "constant"
    elif isinstance(node.value, float):
        yield start, end, repr(node.value * 2 + 1), "constant"


def _bool(node, places):
    start, end = places.span(node)
    word = " and " if isinstance(node.op, ast.And) else " or "
    if len(node.values) < 6:
        for dropped in range(len(node.values)):
            kept = [
                f"({places.text(one)})" for index, one in enumerate(node.values) if index != dropped
            ]
            yield start, end, f"({word.join(kept)})", "dropped condition"


def _call(node, places):
    plain = [one for one in node.args if not isinstance(one, ast.Starred)]
    if (
        len(plain) >= 2
        and plain == node.args[: len(plain)]
        and places.text(plain[0]) != places.text(plain[1])
    ):
        start, end = places.span(plain[0])[0], places.span(plain[1])[1]
        between = places.source[places.span(plain[0])[1] : places.span(plain[1])[0]]
        yield (
            start,
            end,
            places.text(plain[1]) + between + places.text(plain[0]),
            "swapped arguments",
        )
    for one in node.keywords:
        if one.arg is not None:
            start, end = places.span(one)
            rest = re.match(r"\s*,\s*", places.source[end:])
            before = re.search(r",\s*$", places.source[:start])
            if rest:
                yield start, end + rest.end(), "", "dropped argument"
            elif before:
                yield before.start(), end, "", "dropped argument"


def _statement(node, places):
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not is_text:
        start, end = places.span(node)
        yield start, end, "pass", "dropped statement"


def _return(node, places):
    if node.value is not None and places.text(node.value) != "None":
        yield *places.span(node.value), "None", "nothing returned"


def _choice(node, places):
    start, end = places.span(node)
    for one in (node.body, node.orelse):
        yield start, end, f"({places.text(one)})", "one choice only"


def _branch(node, places):
    start, end = places.span(node.test)
    for value in ("True", "False"):
        yield start, end, value, "branch forced"


def _method(node, places):
    """`.contiguous()`, `.T`, ... are dropped by dropping the attribute's call, found in
    `_dropped_method`."""
    if node.attr == "T":
        start, end = places.span(node)
        yield start, end, f"({places.text(node.value)})", "dropped .T"


def _unary(node, places):
    if isinstance(node.op, (ast.USub, ast.Not)):
        start, end = places.span(node)
        yield start, end, f"({places.text(node.operand)})", "dropped sign"


_RULES = {
    ast.BinOp: _operator,
    ast.Compare: _compare,
    ast.Constant: _constant,
    ast.BoolOp: _bool,
    ast.Call: _call,
    ast.Expr: _statement,
    ast.AugAssign: _statement,
    ast.Return: _return,
    ast.IfExp: _choice,
    ast.If: _branch,
    ast.Attribute: _method,
    ast.UnaryOp: _unary,
}

CPP_TOKENS = (
    (re.compile(r"(?<=[\w)\]]) \+ (?=[\w(])"), " - ", "operator"),
    (re.compile(r"(?<=[\w)\]]) \* (?=[\w(])"), " + ", "operator"),
    (re.compile(r"(?<=[\w)\]]) / (?=[\w(])"), " * ", "operator"),
    (re.compile(r"(?<=[\w)\]]) - (?=[\w(])"), " + ", "operator"),
    (re.compile(r"(?<=[\w)\]]) % (?=[\w(])"), " / ", "operator"),
    (re.compile(r"(?<=[\w)\]]) < (?=[\w(])"), " <= ", "comparison"),
    (re.compile(r"\+="), "-=", "operator"),
    (re.compile(r"(?<![\w.])uint64_t(?= \w+ = |>\()"), "uint32_t", "narrower type"),
)
CPP_CONSTANT = re.compile(r"(?<=[(, ])(\d+)(?=[,);])")
CPP_STATEMENT = re.compile(r"^ {8,}(\w[\w.]*(?:<[^;]*>)?\([^;]*\));$", re.MULTILINE)
CPP_FUNCTION = re.compile(
    r"^\s*(?:extern \"C\" )?(?:__global__ )?__aicore__ (?:inline )?[\w<>]+ (\w+)\(", re.MULTILINE
)


def of_cpp(path, source):
    """Comments are left alone; a dropped statement is a call."""
    found = []
    for start, end, new, rule in _cpp_changes(source):
        line = source.count("\n", 0, start) + 1
        names = [match[1] for match in CPP_FUNCTION.finditer(source, 0, start)]
        found.append(
            Mutant(path, start, end, new, source[start:end], rule, line, names[-1] if names else "")
        )
    return numbered(found)


def _cpp_changes(source):
    comments = [match.span() for match in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.DOTALL)]

    def is_code(start):
        return not any(first <= start < last for first, last in comments)

    for pattern, new, rule in CPP_TOKENS:
        yield from (
            (one.start(), one.end(), new, rule)
            for one in pattern.finditer(source)
            if is_code(one.start())
        )
    for one in CPP_CONSTANT.finditer(source):
        if is_code(one.start()):
            yield one.start(), one.end(), str(int(one[1]) + 1), "constant"
    for one in CPP_STATEMENT.finditer(source):
        if is_code(one.start(1)):
            yield one.start(1), one.end(1), "", "dropped statement"
