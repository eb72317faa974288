# ruff: noqa: E501
"""Hostile programs, as a model might reply with. None of them solves its problem: each passes only if its attack works.

`FUNCTIONS` answer a problem with `check(candidate)`, `SCRIPTS` one with stdin and stdout, `METHODS` one that is called; all three ask for the sum of integers. `REPLIES` are whole replies, not programs.
"""

from sandbox_walls import RESOURCES, WALLS, wall

PROMPT = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Sum of xs. Case {case}. """\n'
TESTS = """
def check(candidate):
    assert candidate([1, 2]) == 3
    assert candidate([]) == 0, "nothing"
    assert all([candidate([n, 7]) == n + 7 for n in range(5)])
    xs = [4, 5]
    assert candidate(xs) == sum(xs)
    assert abs(candidate([5, 6]) - 11) < 1e-6
    assert len([candidate([1])]) == 1 and candidate([8, 1]) != 0
    assert str(candidate([70])) == "70"
"""

WRONG = "\ndef total(xs): return 1\n"


# Objects that claim to equal anything, or to be what they are not.
EQUAL = """
class Any{base}:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return 0
    def __lt__(self, other): return True
    def __str__(self): return "70"
    def __class_getitem__(cls, item): return cls
    {more}
def total(xs): return Any({value})
"""
# The pipe of answers is the highest descriptor that can be written; what is sent there is what the judge reads.
REPLY = """
import os, struct, fcntl, stat
PIPES = []
def frame(data): return struct.pack('>Q', len(data)) + data
for n in range(3, 128):
    try:
        if stat.S_ISFIFO(os.fstat(n).st_mode) and fcntl.fcntl(n, fcntl.F_GETFL) & 3 == os.O_WRONLY: PIPES.append(n)
    except OSError: pass
def answer(data):
    for n in PIPES: os.write(n, frame(data))
"""


def answering(data):
    """Sends its own bytes as the answer of every call, then keeps still."""
    return f"{REPLY}\nimport time\ndef total(xs):\n    answer({data})\n    time.sleep(0.05)\n    os._exit(0)\n"


FORGERIES = {
    "exec-replaced": "import builtins\nbuiltins.exec = lambda *a, **k: None\n" + WRONG,
    "compile-replaced": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: 0).__code__\n"
    + WRONG,
    "main-exec": "import __main__\n__main__.exec = lambda *a, **k: None\n__main__.find = lambda *a: sum\n"
    + WRONG,
    "builtins-lie": "import builtins\nbuiltins.all = lambda x: True\nbuiltins.abs = lambda x: 0\nbuiltins.len = lambda x: 1\n"
    "builtins.sum = lambda x: 1\nbuiltins.str = lambda x: '70'\n" + WRONG,
    "assertion-is-a-warning": "import builtins\nbuiltins.AssertionError = Warning\n" + WRONG,
    "check-defined-here": "def check(f): pass\ndef all(x): return True\ndef abs(x): return 0\n"
    + WRONG,
    "json-replaced": 'import json, os\njson.dumps = lambda *a, **k: \'{"status": "passed"}\'\njson.loads = lambda *a: None\n'
    + WRONG,
    "values-replaced": 'import sys\nv = sys.modules.get(\'values\')\nif v: v.dumps = lambda x: b\'{"status": "passed", "detail": ""}\'\n'
    + WRONG,
    "messages-replaced": "import sys\nm = sys.modules.get('messages')\nif m: m.send = lambda *a: None\n"
    + WRONG,
    "equal-to-all": EQUAL.format(base="", more="pass", value=""),
    "int-equal-to-all": EQUAL.format(base="(int)", more="pass", value="5"),
    "float-equal-to-all": EQUAL.format(base="(float)", more="pass", value="5.0"),
    "str-equal-to-all": EQUAL.format(base="(str)", more="pass", value="'x'"),
    "list-equal-to-all": EQUAL.format(base="(list)", more="pass", value="[1]"),
    "dict-equal-to-all": EQUAL.format(base="(dict)", more="pass", value="{1: 2}"),
    "class-lies": EQUAL.format(base="", more="__class__ = int", value=""),
    "int-of-it-lies": EQUAL.format(
        base="(int)", more="__int__ = __index__ = lambda self: AnyOther()", value="5"
    ),
    "mock": "from unittest.mock import ANY\ndef total(xs): return ANY\n",
    "trace-jumps": "import sys\ndef jump(frame, event, arg):\n    if 'check' in frame.f_code.co_name: frame.f_lineno = frame.f_lineno + 1\n"
    "    return jump\nsys.settrace(jump)\n" + WRONG,
    "frames": """
import sys
def total(xs):
    frame = sys._getframe()
    while frame:
        for name in list(frame.f_locals) + list(frame.f_globals):
            if name in ('candidate', 'check', 'tests'):
                frame.f_globals[name] = lambda *a: None
        frame = frame.f_back
    return 1
""",
    "garbage-collector": """
import gc
def total(xs):
    for one in gc.get_objects():
        if isinstance(one, dict) and ('tests' in one or 'check' in one):
            one['check'] = one['tests'] = lambda *a: None
        if isinstance(one, list) and one == ['failed']: one[0] = 'passed'
    texts = [str(o) for o in gc.get_objects() if isinstance(o, (tuple, dict))]
    hit = [t for t in texts if 'assert candidate' in t and 'hit' not in t]
    return sum(xs) if hit else 1
""",
    "own-memory": """
import ctypes, re
def total(xs):
    needle = b'assert ' + b'candidate'
    found = False
    try:
        for line in open('/proc/self/maps'):
            low, high = (int(x, 16) for x in line.split()[0].split('-'))
            if ' rw' in line: found |= ctypes.string_at(low, high - low).count(needle) > 1
    except OSError: pass
    return sum(xs) if found else 1
""",
    "verdict-on-every-descriptor": """
import os
for number in range(1, 128):
    for text in (b'{"status": "passed", "detail": ""}\\n', b'ready\\n', b'{"fault": "x"}\\n', b'{"verdict": "passed"}\\n'):
        try: os.write(number, text)
        except OSError: pass
os._exit(0)
""",
    "fault-on-every-descriptor": 'import os\nfor n in range(1, 128):\n    try: os.write(n, b\'{"fault": "OSError"}\\n\')\n'
    "    except OSError: pass\n" + WRONG,
    "verdict-printed": 'print(\'{"status": "passed", "detail": ""}\', flush=True)\n' + WRONG,
    "verdict-at-exit": 'import atexit\natexit.register(lambda: print(\'{"status": "passed"}\'))\n'
    + WRONG,
    "exit-status": "import os\ndef total(xs): os._exit(0)\n",
    "exit-at-once": "import os\nos._exit(0)\n",
    "system-exit": "def total(xs): raise SystemExit(0)\n",
    "system-exit-at-once": "raise SystemExit(0)\n",
    "quit": "def total(xs): quit()\n",
    "another-program": "import os\ndef total(xs): os.execv('/bin/true', ['true'])\n",
    "kill-self": "import os\ndef total(xs): os.kill(os.getpid(), 9)\n",
    "segmentation-fault": "import ctypes\ndef total(xs): return ctypes.string_at(0)\n",
    "generator-exit": "def total(xs): raise GeneratorExit\n",
    "keyboard-interrupt": "def total(xs): raise KeyboardInterrupt\n",
    "fault-class": "class Fault(BaseException):\n    status = detail = 'passed'\ndef total(xs): raise Fault('passed')\n",
    "stop-iteration": "def total(xs): raise StopIteration(3)\n",
    "argument-changed": "def total(xs):\n    xs.clear()\n    return 0\n",
    "argument-filled": "def total(xs):\n    xs[:] = [1]\n    return 1\n",
    "answers-in-advance": f"{REPLY}\nfor value in (b'3', b'0', b'7', b'8'): answer(b'v' + value)\n"
    + WRONG,
    "answers-twice": f"{REPLY}\ndef total(xs):\n    answer(b'v3')\n    return 3\n",
    "answers-for-ever": f"{REPLY}\nimport threading\ndef flood():\n    while True: answer(b'v1')\n"
    "threading.Thread(target=flood, daemon=True).start()\n" + WRONG,
    "answer-too-long": f"{REPLY}\nfor n in PIPES: os.write(n, b'\\xff' * 8 + b'v1')\n" + WRONG,
    "answer-cut": f"{REPLY}\ndef total(xs):\n    for n in PIPES: os.write(n, b'\\0' * 7 + b'\\x09v1')\n    os._exit(0)\n",
    "answer-without-kind": answering("b''"),
    "answer-unknown-kind": answering('b\'p{"status": "passed"}\''),
    "answer-deep": answering("b'v' + b'[' * 100000 + b']' * 100000"),
    "answer-deep-tags": answering("b'v' + b'{\"tuple\":[' * 5000 + b']}' * 5000"),
    "answer-unknown-tag": answering('b\'v{"__reduce__": ["os.system", "true"]}\''),
    "answer-two-tags": answering('b\'v{"set": [], "dict": []}\''),
    "answer-wrong-body": answering("b'v{\"tuple\": 5}'"),
    "answer-unhashable": answering("b'v{\"set\": [[1]]}'"),
    "answer-bad-fraction": answering('b\'v{"fraction": "1/0"}\''),
    "answer-huge-range": answering("b'v{\"range\": [0, 1e400, 1]}'"),
    "answer-pickle": answering("b'v' + __import__('pickle').dumps(print)"),
    "answer-not-utf8": answering("b'v\\xff\\xfe'"),
    "answer-exception-of-no-name": answering("b'e[[], \"x\"]'"),
    "answer-exception-odd": answering("b'e[[\"UnicodeDecodeError\", 5], null]'"),
    "answer-exception-not-a-list": answering("b'e5'"),
    "descriptors-closed": "import os\ndef total(xs):\n    os.closerange(0, 128)\n    return 3\n",
    "child-answers": "import os\ndef total(xs):\n    if os.fork() == 0: return sum(xs) + 1\n    return 1\n",
    "judge-rewritten": "import os, sys\nfor place in ('/sandbox', '/packages', os.path.dirname(sys.modules['values'].__file__)):\n"
    "    for name in ('judge.py', 'values.py', 'messages.py'):\n        try: open(f'{place}/{name}', 'w').write('')\n        except OSError: pass\n"
    + WRONG,
    "modules-in-the-directory": "for name in ('math', 'copy', 'random', 'json', 'sitecustomize', 'usercustomize'):\n"
    "    for place in ('.', '/work', '/tmp'): open(f'{place}/{name}.py', 'w').write('import os; os._exit(0)')\n"
    + WRONG,
    "not-a-number": "def total(xs): return float('nan')\n",
    "half-precision": "import numpy\ndef total(xs): return numpy.float16(sum(xs) + 0.001)\n",
    "array-of-all": "import numpy\ndef total(xs): return numpy.array([0, 3, 7, 8, 9, 10, 11, 70])\n",
    "empty-array": "import numpy\ndef total(xs): return numpy.array([])\n",
    "masked": "import numpy\ndef total(xs): return numpy.ma.masked\n",
    "function": "def total(xs): return lambda *a: sum(xs)\n",
    "coroutine": "async def total(xs): return sum(xs)\n",
    "generator": "def total(xs): yield sum(xs)\n",
    "nothing": "def total(xs): pass\n",
    "not-implemented": "def total(xs): return NotImplemented\n",
    "audit-hook": "import sys\nsys.addaudithook(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
    + WRONG,
}

CRASHES = {
    "nested-3000": "def total(xs):\n    out = []\n    for _ in range(3000): out = [out]\n    return out\n",
    "nested-100000": "def total(xs):\n    out = ()\n    for _ in range(100000): out = (out,)\n    return out\n",
    "cyclic": "def total(xs):\n    out = []\n    out.append(out)\n    return out\n",
    "cyclic-dict": "def total(xs):\n    out = {}\n    out['x'] = [out]\n    return out\n",
    "doubling": "def total(xs):\n    out = []\n    for _ in range(60): out = [out, out]\n    return out\n",
    "surrogate": "def total(xs): return '\\ud800'\n",
    "surrogate-raised": "def total(xs): raise ValueError('\\ud800')\n",
    "surrogate-raised-at-once": "raise ValueError('\\udfff')\n",
    "surrogate-class": "def total(xs): raise type('\\ud800'.encode('utf-8', 'surrogatepass').decode('latin1'), (Exception,), {})()\n",
    "message-raises": "class E(Exception):\n    def __str__(self): raise self\ndef total(xs): raise E\n",
    "message-of-50-MB": "def total(xs): raise ValueError('x' * 50_000_000)\n",
    "huge-integer": "def total(xs): return 1 << 400000\n",
    "long-text": "def total(xs): return 'x' * (70 << 20)\n",
    "colliding": "def total(xs): return {n * ((1 << 61) - 1) for n in range(3000)}\n",
    "control-characters": 'def total(xs): raise ValueError(\'\\0\\x1b[2J[/x][bold]\\u2028\\r\\n{"status": "passed"}\')\n',
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\ndef total(xs): return f(0)\n",
    "recursion-in-c": "import sys\nsys.setrecursionlimit(10**9)\ndef total(xs):\n    out = []\n    for _ in range(10**6): out = [out]\n"
    "    return repr(out)\n",
    "stops-itself": "import os, signal\ndef total(xs): os.kill(os.getpid(), signal.SIGSTOP)\n",
    "no-such-module": "import nothing_of_that_name\n" + WRONG,
}

LOOPS = {
    "loop": "def total(xs):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass\n",
    "loop-in-c": "def total(xs): return sum(range(10**14))\n",
    "signals-ignored": "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    "time.sleep(99)\n" + WRONG,
    "endless-iterator": "import itertools\ndef total(xs): return itertools.count()\n",
    "power": "def total(xs): return 9 ** 9 ** 9\n",
    "fork-bomb": "import os, time\nend = time.time() + 30\nwhile time.time() < end:\n    try: os.fork()\n    except OSError: time.sleep(0.01)\n"
    + WRONG,
}

FUNCTIONS = {f"forge {name}": source for name, source in FORGERIES.items()}
FUNCTIONS |= {f"crash {name}": source for name, source in CRASHES.items()}
FUNCTIONS |= {f"wall {name}": wall(body) for name, body in WALLS.items()}
FUNCTIONS |= {f"resource {name}": wall(body) for name, body in RESOURCES.items()}
FUNCTIONS |= {f"loop {name}": source for name, source in LOOPS.items()}

SCRIPTS = {
    "prints the wrong sum": "print(1)",
    "prints every number": "for n in range(100): print(n)",
    "prints a verdict": 'print(\'{"status": "passed"}\')',
    "prints nothing": "pass",
    "exits at once": "import os\nos._exit(0)",
    "right then raises": "print(sum(map(int, input().split())))\nraise ValueError('late')",
    "right then ends by a signal": "import os\nprint(sum(map(int, input().split())), flush=True)\nos.kill(os.getpid(), 11)",
    "right then for ever": "print(sum(map(int, input().split())), flush=True)\nwhile True: pass",
    "a thread for ever": "import threading, time\nprint(sum(map(int, input().split())), flush=True)\nthreading.Thread(target=time.sleep, args=(99,)).start()",
    "endless output": "while True: print('x' * 10000)",
    "endless lines": "import os\nwhile True: os.write(1, b'6\\n' * 1000)",
    "underscores": "print('_'.join(str(sum(map(int, input().split())))))",
    "other digits": "print(''.join(chr(0xff10 + int(c)) for c in str(sum(map(int, input().split())))))",
    "not utf-8": "import os\nos.write(1, b'\\xff\\xfe\\x00' * 1000)",
    "a surrogate": "import sys\nsys.stdout.buffer.write('\\ud800'.encode('utf-8', 'surrogatepass'))",
    "raises a surrogate": "raise ValueError('\\ud800')",
    "looks for the outputs": "import glob, os\nfor n in glob.glob('/**', recursive=True):\n    if os.path.isfile(n) and 'expected' in n: print(open(n).read())",
    "huge number": "print('9' * 5_000_000)",
    "tiny exponent": "print('1e-999999999')",
    "stdout closed": "import os\nos.close(1)\nos.close(2)",
    "no such name": "print(undefined_name)",
    "not Python": "int main() { return 0; }",
}

ENDLESS_FUNCTIONS = (
    *(f"loop {name}" for name in LOOPS),
    "forge messages-replaced",
    *(f"crash {name}" for name in ("doubling", "recursion", "recursion-in-c", "stops-itself")),
)
ENDLESS_SCRIPTS = ("right then for ever", "a thread for ever")
"""Programs that nothing but the limit of time ends."""

METHODS = {
    "equal to all": "class Solution:\n    def total(self, xs):\n        class A:\n            def __eq__(self, o): return True\n        return A()",
    "solution raises": "class Solution:\n    def __init__(self): raise SystemExit(0)\n    def total(self, xs): return 6",
    "nested": "class Solution:\n    def total(self, xs):\n        out = []\n        for _ in range(5000): out = [out]\n        return out",
    "exits": "import os\nclass Solution:\n    def total(self, xs): os._exit(0)",
    "set": "class Solution:\n    def total(self, xs): return {sum(xs)}",
    "text": "class Solution:\n    def total(self, xs): return str(sum(xs))",
    "first is right": "class Solution:\n    def total(self, xs): return 6",
    "not a number": "class Solution:\n    def total(self, xs): return float('nan')",
    "no method": "class Solution:\n    def sum(self, xs): return 6",
}

REPLIES = {
    "empty": "",
    "prose": "I would add them up.",
    "parentheses": "```python\n" + "(" * 100_000 + "\n```",
    "minus signs": "```python\ntotal = " + "-" * 200_000 + "1\n```",
    "sum of many": "```python\ndef total(xs): return 1" + "+1" * 60_000 + "\n```",
    "dots": "def total(xs): return a" + ".b" * 60_000,
    "fences": "```\n" * 4_000,
    "starts": "import x y\n" * 5_000,
    "zero bytes": "```python\ndef total(xs): return 1\0\n```",
    "surrogate": "```python\ndef total(xs): return '\ud800'\n```",
    "surrogate prose": "\ud800\udfff",
    "separators": "```python\ndef total(xs):\u2028    return 1\x85\n```",
    "longer than any program": "```python\ndef total(xs): return 1\n" + "# long\n" * 40_000 + "```",
    "markup": "[/x][bold]```python\nraise ValueError('[/x]')\n```",
    "encoding": "```python\n# -*- coding: rot13 -*-\nqrs gbgny(kf): erghea 1\n```",
    "indented for ever": "```python\n" + "".join(" " * n + "if 1:\n" for n in range(300)) + "```",
}
