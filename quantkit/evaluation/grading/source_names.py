"""Names that Python source defines, imports and uses, by parsing it."""

import ast
from collections.abc import Iterator

LONGEST = 1 << 18  # characters of a program; parsing more takes longer than it is worth


def tree_of(source: str) -> ast.Module | int:
    """The parsed source, or the number of the line where it stops being Python."""
    if len(source) > LONGEST:
        return 0
    try:
        return ast.parse(source)
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return 0


def parses(source: str) -> bool:
    return isinstance(tree_of(source), ast.Module)


def used_names(source: str) -> set[str]:
    """Names that are read anywhere."""
    tree = tree_of(source)
    nodes = ast.walk(tree) if isinstance(tree, ast.Module) else ()
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def defined_names(source: str) -> set[str]:
    """Names of functions, classes and variables at the top of a module, other than functions
    that are only sketched."""
    tree, found = tree_of(source), set()
    for node in _at_the_top(tree.body) if isinstance(tree, ast.Module) else []:
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not is_sketch(node):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def is_sketch(node: ast.stmt) -> bool:
    """A function whose body is `...` or `pass`, perhaps after a docstring."""
    body = node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
    empty = [
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        for one in body
    ]
    return bool(body) and all(empty)


def bound_names(source: str) -> set[str]:
    """Names that a module defines or imports at its top."""
    tree = tree_of(source)
    nodes = _at_the_top(tree.body) if isinstance(tree, ast.Module) else ()
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return defined_names(source) | {
        (alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names
    }


def only_defines(source: str) -> bool:
    tree = tree_of(source)
    harmless = (
        ast.Import
        | ast.ImportFrom
        | ast.FunctionDef
        | ast.AsyncFunctionDef
        | ast.ClassDef
        | ast.Assign
    )
    return isinstance(tree, ast.Module) and all(isinstance(node, harmless) for node in tree.body)


def defines(source: str, name: str) -> bool:
    return name in defined_names(source)


def _at_the_top(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements whose names are the module's: those of its ifs, tries and withs too."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _at_the_top([*statement.body, *getattr(statement, "orelse", [])])
