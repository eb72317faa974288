"""Child process of chat.py: one JSON line in ({source, variables}) and one JSON line out
({text}, {fault} or {unreadable}).

A chat template is a program that comes with a model. Jinja's sandbox protects Python's own objects
but limits neither time nor memory, so it runs here under limits of the operating system: memory for
the process, CPU time for each rendering. When a limit is exceeded, the system ends this process.
Run by path with `python -I`, so it must not import quantkit.

Templates have what transformers 5 offers (utils/chat_template_utils.py): loop controls,
{% generation %}, tojson, raise_exception, strftime_now.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 1.0
_MEMORY = 1 << 29
_MAX_CHARS = 1 << 24
"""Characters of a rendered conversation: some 4 million tokens."""


class GenerationBlock(Extension):
    """{% generation %} marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own spelling

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    made.filters["tojson"] = _to_json
    return made


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def answer(line: str) -> dict[str, str]:
    """The rendered text, or why there is none: it does not compile, or it fails."""
    try:
        request = json.loads(line)
        text = _compile(request["source"]).render(**request["variables"])
    except TemplateSyntaxError as error:
        return {"unreadable": f"{error.message}, line {error.lineno}"}
    except Exception as error:  # whatever a program can raise
        return {
            "fault": f"{error}"
            if isinstance(error, TemplateError)
            else f"{type(error).__name__}: {error}"
        }
    return (
        {"text": text}
        if len(text) <= _MAX_CHARS
        else {"fault": f"it makes {len(text)} characters of them"}
    )


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    return environment().from_string(source)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        reply = json.dumps(answer(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
