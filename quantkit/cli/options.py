"""Arguments and options that several commands take, and `flat`, which makes command-line options
of the fields of options dataclasses."""

import inspect
from collections.abc import Callable
from dataclasses import Field, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from quantkit.common.options import Option, options_of
from quantkit.quantization.options import scheme_names


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with one command-line option for each field of its options dataclasses, in place of
    the parameters that take these; `Annotated[Options, ("field", ...)]` has these fields only. The
    attribute `renamed` maps old flags to new ones."""
    signature, renamed = inspect.signature(command), dict[str, str]()
    parameters, groups = list[inspect.Parameter](), dict[str, tuple[type, list[str]]]()
    for one in signature.parameters.values():
        parts: list[Any] = (
            list(get_args(one.annotation)) if _is_group(one.annotation) else [one.annotation]
        )
        kind, *names = parts
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        chosen = {
            field: about
            for field, about in options_of(kind).items()
            if about.cli and (not names or field.name in names[0])
        }
        groups[one.name] = kind, [field.name for field in chosen]
        for field, about in chosen.items():
            parameters.append(_parameter(field, about))
            new = about.flags[0] if about.flags else f"--{field.name.replace('_', '-')}"
            renamed |= {old: new for old in about.old if old.startswith("--")}

    @wraps(command)
    def run(**values: Any) -> None:
        options = {
            name: kind(**{field: values.pop(field) for field in fields})
            for name, (kind, fields) in groups.items()
        }
        command(**values, **options)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.renamed = renamed  # type: ignore[attr-defined]
    return run


def _is_group(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and is_dataclass(get_args(annotation)[0])


def _parameter(field: Field[Any], about: Option) -> inspect.Parameter:
    """A field that takes a str or a list, or something else, takes a str or lists there."""
    types = get_args(field.type)
    kind = field.type if str not in types else str | None if type(None) in types else str
    if list[str] in types:
        kind = list[str] | None
    made = typer.Option(
        *about.flags,
        help=about.help,
        min=about.min,
        max=about.max,
        metavar=about.metavar,
        envvar=about.envvar,
        autocompletion=about.complete,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[kind, made],
    )


MaybeScheme = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(scheme_names()[:-1])} or {scheme_names()[-1]}; with --preset, --bits or "
        "--size awq-w4a16 by default.",
        autocompletion=scheme_names,
    ),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A directory, tiny-r1 (built in), or a hub id.")
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|URL", help="A model to run in this process, or an OpenAI-compatible server."
    ),
]
CountExperts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write how many tokens were routed to each expert, for `quantkit place`.",
    ),
]
Margin = Annotated[float, typer.Option(help="Loss that counts as lost, as a share.")]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed draws the same.")]
Host = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0 is every address of the machine.")
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
