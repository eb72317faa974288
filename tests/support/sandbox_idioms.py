# ruff: noqa: E501
"""Right programs in unusual dress: what people write in contests, and what models write. Each must be graded right.

The problems are those of sandbox_attacks.py: the sum of integers, by a function, by stdin and stdout, by a method.
"""

SCRIPTS = {
    "quit": "print(sum(map(int, input().split())))\nquit()",
    "exit with 0": "print(sum(map(int, input().split())))\nexit(0)",
    "exit with 3": "import sys\nprint(sum(map(int, input().split())))\nsys.exit(3)",
    "raise SystemExit": "print(sum(map(int, input().split())))\nraise SystemExit",
    "os._exit after a flush": "import os, sys\nprint(sum(map(int, input().split())))\nsys.stdout.flush()\nos._exit(0)",
    "unjoined thread": "import threading\ndef main(): print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
    "deep recursion in a thread": """
import sys, threading
sys.setrecursionlimit(1 << 25)
threading.stack_size(1 << 28)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main():
    assert depth(50000) == 50000
    print(sum(map(int, input().split())))
t = threading.Thread(target=main)
t.start()
t.join()
""",
    "recursion": "import sys\nsys.setrecursionlimit(10**6)\ndef f(xs): return xs[0] + f(xs[1:]) if xs else 0\ndef d(n): return n and d(n - 1)\nd(20000)\n"
    "print(f(list(map(int, input().split()))))",
    "cached recursion": "import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n@lru_cache(None)\n"
    "def d(n): return 0 if n == 0 else d(n - 1)\nd(5000)\nprint(sum(map(int, input().split())))",
    "output at exit": "import atexit\nout = []\natexit.register(lambda: print('\\n'.join(out)))\nout.append(str(sum(map(int, input().split()))))",
    "output of a destructor": "class A:\n    def __del__(self): print(self.x, flush=True)\na = A()\na.x = sum(map(int, input().split()))\ndel a",
    "/dev/stdin": "print(sum(map(int, open('/dev/stdin').read().split())))",
    "/dev/stdout": "with open('/dev/stdout', 'w') as f: f.write(str(sum(map(int, input().split()))))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "open(1)": "open(1, 'w').write(str(sum(map(int, open(0)  .read().split()))))",
    "future import": "from __future__ import annotations\nprint(sum(map(int, input().split())))",
    "future import after a docstring": '"""Sum."""\n# solution\nfrom __future__ import (\n    annotations,\n    division,\n)\nimport sys\n'
    "print(sum(map(int, sys.stdin.read().split())))",
    "stdin.buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "readline": "import sys\ninput = sys.stdin.readline\nprint(sum(map(int, input().split())))",
    "buffer readline": "import sys\nread = sys.stdin.buffer.readline\nprint(sum(map(int, read().split())))",
    "os.read": "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
    "os.read in pieces": "import os, io\nBUFSIZE = 8192\nb = os.read(0, max(os.fstat(0).st_size, BUFSIZE))\ns = io.BytesIO(b)\n"
    "os.write(1, str(sum(map(int, s.readline().split()))).encode())",
    "mmap": "import mmap\nprint(sum(map(int, mmap.mmap(0, 0, access=mmap.ACCESS_READ).read().split())))",
    "fileinput": "import fileinput\nprint(sum(int(x) for line in fileinput.input() for x in line.split()))",
    "replaced stdout": "import sys, io\nold, sys.stdout = sys.stdout, io.StringIO()\nprint(sum(map(int, input().split())))\n"
    "old.write(sys.stdout.getvalue())",
    "stdout buffer": "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, input().split())))",
    "numpy": "import numpy as np\nprint(np.array(list(map(int, input().split()))).sum())",
    "numpy from stdin": "import sys\nimport numpy as np\nprint(int(np.array(sys.stdin.read().split(), dtype=np.int64).sum()))",
    "pool of processes": "import multiprocessing\ndef f(x): return x\nif __name__ == '__main__':\n    with multiprocessing.Pool(2) as p:\n"
    "        print(sum(p.map(f, map(int, input().split()))))",
    "process pool executor": "from concurrent.futures import ProcessPoolExecutor\ndef f(x): return x\nif __name__ == '__main__':\n"
    "    with ProcessPoolExecutor(2) as p: print(sum(p.map(f, map(int, input().split()))))",
    "thread pool": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as p: print(sum(p.map(int, input().split())))",
    "subprocess": "import subprocess, sys\nn = input()\nprint(subprocess.run([sys.executable, '-c', 'print(sum(map(int, input().split())))'],\n"
    "    input=n, capture_output=True, text=True).stdout)",
    "asyncio": "import asyncio\nasync def main(): print(sum(map(int, input().split())))\nasyncio.run(main())",
    "main guard": "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
    "names of the prelude": "print(reduce(lambda a, b: a + b, map(int, input().split())), Counter()[0] or '')",
    "temporary file": "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write(input())\n    f.seek(0)\n"
    "    print(sum(map(int, f.read().split())))",
    "stderr": "import sys\nprint('Traceback of my own', file=sys.stderr)\nprint(sum(map(int, input().split())))",
    "end of input": "total = 0\ntry:\n    while True: total += sum(map(int, input().split()))\nexcept EOFError: print(total)",
    "a caught exception": "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nprint(sum(map(int, input().split())))",
    "stack limit": "import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 28, resource.getrlimit(resource.RLIMIT_STACK)[1]))\n"
    "print(sum(map(int, input().split())))",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    xs: list\nprint(sum(P(list(map(int, input().split()))).xs))",
    "decimal output": "print('%.3f' % sum(map(int, input().split())))",
    "trailing blanks": "print(sum(map(int, input().split())), end='  \\n\\n')",
    "exec of a string": "exec('print(sum(map(int, input().split())))')",
    "memory of 500 MB": "b = bytearray(500 << 20)\nprint(sum(map(int, input().split())))",
    "random and time": "import random, time, datetime\nrandom.seed(time.time())\ndatetime.datetime.now()\nprint(sum(map(int, input().split())))",
}

FUNCTIONS = {
    "numpy sum": "import numpy as np\ndef total(xs): return np.array(xs, dtype=np.int64).sum()",
    "numpy float": "import numpy as np\ndef total(xs): return int(np.float64(sum(xs)))",
    "bool of int": "def total(xs): return sum(xs, 0)",
    "lambda": "total = lambda xs: sum(xs)",
    "future import": "from __future__ import annotations\ndef total(xs: List[int]) -> int:\n    return sum(xs)",
    "partial": "from functools import partial\ntotal = partial(sum)",
    "builtin": "total = sum",
    "callable object": "class Sum:\n    def __call__(self, xs): return sum(xs)\ntotal = Sum()",
    "cached": "from functools import lru_cache\n@lru_cache\ndef s(xs): return sum(xs)\ndef total(xs): return s(tuple(xs))",
    "changes its argument": "def total(xs):\n    out = 0\n    while xs: out += xs.pop()\n    return out",
    "prints": "def total(xs):\n    print('working', xs)\n    return sum(xs)",
    "prints without end": "import sys\ndef total(xs):\n    for _ in range(10000): print('working' * 10)\n    return sum(xs)",
    "main guard": "def total(xs): return sum(xs)\nif __name__ == '__main__':\n    import sys\n    sys.exit(total([1]))",
    "asks at the top": "import sys\nsys.setrecursionlimit(10**6)\ndef total(xs):\n    return xs[0] + total(xs[1:]) if xs else 0",
    "thread": "import threading\ndef total(xs):\n    out = []\n    t = threading.Thread(target=lambda: out.append(sum(xs)))\n    t.start()\n"
    "    t.join()\n    return out[0]",
    "pool": "from multiprocessing import Pool\ndef one(x): return x\ndef total(xs):\n    with Pool(2) as p: return sum(p.map(one, xs))",
    "int enum": "import enum\ndef total(xs):\n    E = enum.IntEnum('E', {'a': sum(xs)})\n    return E.a",
    "subclass of int": "class N(int): pass\ndef total(xs): return N(sum(xs))",
    "logging": "import logging\nlogging.basicConfig(level=logging.DEBUG)\ndef total(xs):\n    logging.info(xs)\n    return sum(xs)",
    "its own tests": "def total(xs): return sum(xs)\nassert total([1, 2]) == 3\ndef check(f): assert f([1]) == 1\ncheck(total)",
    "name of a module": "import json, math, values as v if False else json\n".replace(
        ", values as v if False else json", ""
    )
    + "def total(xs): return int(math.fsum(xs))",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef total(xs): return sum(P(x).x for x in xs)",
    "signal": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\nsignal.alarm(5)\ndef total(xs): return sum(xs)",
    "big result on the way": "def total(xs): return (10**6000 + sum(xs)) - 10**6000",
    "stdin at the top": "import sys\nsys.stdin.read()\ndef total(xs): return sum(xs)",
}

METHODS = {
    "class": "class Solution:\n    def total(self, xs: List[int]) -> int:\n        return sum(xs)",
    "numpy integer": "import numpy as np\nclass Solution:\n    def total(self, xs): return np.sum(xs)",
    "plain function": "def total(xs): return sum(xs)",
    "main guard": "class Solution:\n    def total(self, xs): return sum(xs)\nif __name__ == '__main__':\n    print(Solution().total(eval(input())))",
    "future import": "from __future__ import annotations\nclass Solution:\n    def total(self, xs): return sum(xs)",
    "static": "class Solution:\n    @staticmethod\n    def total(xs): return sum(xs)",
    "slots": "class Solution:\n    __slots__ = ()\n    def total(self, xs): return sum(xs)",
    "state": "class Solution:\n    def __init__(self): self.n = 0\n    def total(self, xs):\n        self.n = 0\n        for x in xs: self.n += x\n"
    "        return self.n",
}

# Whole replies: the program is to be found in them.
REPLIES = {
    "tildes": "~~~python\ndef total(xs):\n    return sum(xs)\n~~~",
    "bare, then prose": "def total(xs):\n    return sum(xs)\n\nThis adds them up, one by one.",
    "prose, bare, prose": "Here it is:\n\ndef total(xs):\n    return sum(xs)\n\nDone\nIt's simple: we add.\n",
    "fence inside a docstring": '```python\ndef total(xs):\n    """Example:\n    ```\n    total([1])\n    ```\n    """\n    return sum(xs)\n```',
    "output last": "```python\ndef total(xs):\n    return sum(xs)\n```\nThis prints\n```\n6\n```",
    "usage last": "```python\ndef total(xs):\n    return sum(xs)\n```\n```python\nprint(total([1, 2]))\n```",
    "body, then output": "```python\n    return sum(xs)\n```\n```\n[1, 2]\n```",
    "four backticks": "````python\ndef total(xs):\n    return sum(xs)\n````",
    "indented fence": "1. So:\n   ```py\n   def total(xs):\n       return sum(xs)\n   ```",
    "never closed": "```python\ndef total(xs):\n    return sum(xs)\n",
}

_READS = "print(sum(map(int, input().split())))"
SCRIPT_REPLIES = {
    "output last": f"```python\n{_READS}\n```\nFor the sample it prints\n```\n6\n```",
    "word last": f"```python\n{_READS}\n```\n```\nYes\n```",
    "list last": f"```python\n{_READS}\n```\n```text\n[1, 2]\n```",
    "usage last": f"```python\nimport sys\n{_READS}\n```\nRun it:\n```bash\necho 1 2 3\n```\nor\n```python\nprint(6)\n```",
    "tildes": f"~~~\n{_READS}\n~~~",
    "helper first": f"```python\ndef f(): pass\n```\nall of it:\n```python\n{_READS}\n```",
}
