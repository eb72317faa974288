"""The untrusted side: defines the program's names, then answers calls of one function, one message
each.

    python candidate.py CALLS REPLIES < request

CALLS and REPLIES are descriptors of pipes to the judge. The request (JSON) holds the program and
the function's name; tests and expected values are never in this process. A program may write to
REPLIES itself: that returns a value, which it could have returned anyway.
"""

import io
import json
import os
import sys
import types
from typing import Any


def main() -> None:
    import messages
    import values

    calls, replies = int(sys.argv[1]), int(sys.argv[2])
    request = json.loads(sys.stdin.buffer.read())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.argv[:] = ["candidate.py"]
    sys.path[0] = os.getcwd()
    function: Any = None
    while True:
        message = messages.receive(calls)
        try:
            if function is None:
                function, answer = find(request), None
            else:
                arguments, named = values.loads(message)
                answer = function(*arguments, **named)
            reply = b"v" + values.dumps(answer)
        except values.Unsupported as error:
            reply = b"u" + values.dumps(str(error))
        except BaseException as error:
            reply = b"e" + values.dumps(describe(error))
        messages.send(replies, reply)


def find(request: dict[str, Any]) -> Any:
    """The function `entry_point` of the program, or that method of its class Solution, after
    running the program's parts in order."""
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    space = vars(module)
    for part in request["parts"]:
        exec(compile(part, "<candidate>", "exec", dont_inherit=True), space)
    name = request["entry_point"]
    if name not in space and "Solution" in space:
        return getattr(space["Solution"](), name)
    if name not in space:
        raise NameError(f"name {name!r} is not defined")
    return space[name]


def describe(error: BaseException) -> list:
    """Names of the exception's classes in MRO order, and its message."""
    try:
        message = str(error)
    except BaseException:
        message = ""
    return [[kind.__name__ for kind in type(error).__mro__], message[:2000]]


if __name__ == "__main__":
    main()
