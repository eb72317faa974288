"""Options that a command and a Python function of the same name share, each written once: a frozen
dataclass whose fields carry default, bounds and help. `cli.options` makes command-line options of
the fields, `read_options` reads keywords of the Python API."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import Parameter, get_annotations, signature
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from quantkit.common.errors import UsageError

_KEY = "option"
Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """What the command line and the documentation say about a field.

    flags: its spellings; --field-name if empty. min, max: bounds that the command line checks.
    complete: values that a shell offers. old: names of the field and flags of the previous version,
    which still work and warn. cli: whether the command line has it; otherwise only Python.
    """

    help: str
    flags: tuple[str, ...]
    min: float | None
    max: float | None
    metavar: str | None
    envvar: str | None
    complete: Callable[[], list[str]] | None
    old: tuple[str, ...]
    cli: bool


def option(
    default: Any,
    help: str,
    *flags: str,
    min: float | None = None,
    max: float | None = None,
    metavar: str | None = None,
    envvar: str | None = None,
    complete: Callable[[], list[str]] | None = None,
    old: tuple[str, ...] = (),
    cli: bool = True,
) -> Any:
    """A dataclass field that is an option."""
    about = Option(help, flags, min, max, metavar, envvar, complete, old, cli)
    return field(default=default, metadata={_KEY: about})


def device_names() -> list[str]:
    return ["auto", "cpu", "cuda", "npu"]


def device_option() -> Any:
    return option("auto", "auto, cpu, cuda or npu.", complete=device_names)


def options_of(kind: type) -> dict[Field[Any], Option]:
    """The fields of a dataclass that are options; those of a base class come last."""
    found = [one for one in fields(kind) if _KEY in one.metadata]
    rank = {
        name: place
        for place, base in reversed(list(enumerate(kind.__mro__)))
        for name in get_annotations(base)
    }
    return {one: one.metadata[_KEY] for one in sorted(found, key=lambda one: rank[one.name])}


def read_options(
    kind: type[Options], options: Options | None, keywords: Mapping[str, Any]
) -> Options:
    """`options`, or the defaults, with `keywords` in their fields; a str becomes a Path where the
    field is one. An old name gives a DeprecationWarning, an unknown one a TypeError that suggests
    the closest, a value of another type a UsageError."""
    known = {one.name: one for one in options_of(kind)}
    renamed = {old: one.name for one, about in options_of(kind).items() for old in about.old}
    values = {}
    for name, value in keywords.items():
        if name in renamed:
            said = f"{name} is now {renamed[name]}; the old name will be removed"
            warnings.warn(said, DeprecationWarning, stacklevel=3)
            name = renamed[name]
        if name not in known:
            close = get_close_matches(name, known, 1)
            raise TypeError(
                f"unexpected keyword argument {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )
        types = get_args(known[name].type)
        _check_type(name, value, types or (known[name].type,))
        values[name] = (
            Path(value) if isinstance(value, str) and Path in types and str not in types else value
        )
    return replace(options if options is not None else kind(), **values)  # type: ignore[type-var]


def _check_type(name: str, value: Any, types: tuple[Any, ...]) -> None:
    kinds = tuple(get_origin(one) or one for one in types)
    if Any in kinds or (isinstance(value, int) and float in kinds and not isinstance(value, bool)):
        return
    fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not (
        fits
        or (isinstance(value, str) and Path in kinds)
        or (isinstance(value, tuple) and list in kinds)
    ):
        wanted = " or ".join("None" if one is NoneType else one.__name__ for one in kinds)
        raise UsageError(f"{name} is {value!r}, a {type(value).__name__}", f"give {wanted}")


def documented(kind: type) -> Callable[[Function], Function]:
    """Add the fields of `kind`, which the function takes as **keywords, to its signature and
    documentation."""

    def decorate(function: Function) -> Function:
        own = signature(function)
        keywords = {
            one.name: Parameter(
                one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
            )
            for one in options_of(kind)
        }
        parameters = [one for one in own.parameters.values() if one.kind != Parameter.VAR_KEYWORD]
        function.__signature__ = own.replace(parameters=[*parameters, *keywords.values()])  # type: ignore[attr-defined]
        function.__annotations__.pop("keywords")
        function.__annotations__ |= {name: one.annotation for name, one in keywords.items()}
        lines = [f"    {one.name}: {about.help}" for one, about in options_of(kind).items()]
        function.__doc__ = "\n".join([f"{function.__doc__}", "    Options:", "", *lines, "    "])
        return function

    return decorate
