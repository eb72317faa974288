"""Programs made from lists of acts: hostile ones, which do not solve their problem and try to leave
the score, end the run or pass by how they end; and right ones, which differ only in how they read,
write and end. A fixed seed orders them, so that a sample holds some of every kind.
"""

import itertools
import random

_NAMES = (
    rb"\xff\xfe",
    rb"a\nRssAnon:\t1 kB",
    rb"\xed\xa0\x80",
    rb")\n( ",
    rb"\x1b[31m",
    rb"RssAnon",
    rb"\x80" * 15,
)
_TEXTS = ("'\\ud800'", "'\\x00'", "'\\x1b[2J'", "'x' * 10**6", "'\\u2028'", "b'\\xff'", "10**5000")
_ENDS = (
    *(
        f"raise {name}"
        for name in (
            "StopIteration",
            "StopAsyncIteration",
            "GeneratorExit",
            "SystemExit",
            "KeyboardInterrupt",
        )
    ),
    "raise type('Own', (StopIteration,), {})",
    "raise UnicodeDecodeError('a', b'', 0, 1, 'x')",
    "raise type('Own', (Exception,), {'__str__': lambda s: 1 / 0})",
    "raise type('\\ud800', (Exception,), {})",
    "raise ExceptionGroup('x', [ValueError()])",
    "sys.exit(2**70)",
    "sys.exit('\\ud800')",
    "os._exit(255)",
    "os.abort()",
    "os.kill(0, 9)",
    "os.killpg(0, 15)",
)
_STREAMS = (
    *(f"os.fchmod({n}, 0)" for n in (1, 2)),
    *(f"os.chmod('/dev/{name}', 0)" for name in ("stdout", "stderr", "stdin")),
    *(f"os.chmod('{place}/1', 0)" for place in ("/dev/fd", "/proc/self/fd")),
    *(f"os.close({n})" for n in (0, 1, 2)),
    *(f"os.ftruncate({n}, 16 << 20)" for n in (1, 2)),
    *(f"os.pwrite({n}, b'\\xff', (16 << 20) - 1)" for n in (1, 2)),
    "os.write(2, b'\\x00uncaught\\x00\\xff\\xed\\xa0\\x80')",
    "os.write(1, bytes(range(256)))",
    "os.unlink('main.py')",
    "os.rename('/work', '/tmp/x')",
    "os.mkfifo('x')",
    "os.symlink('/dev/null', 'stdout')",
)
_STATE = (
    *(f"libc.prctl(15, b'{name.decode()}\\0', 0, 0, 0)" for name in _NAMES),
    "libc.prctl(4, 0, 0, 0, 0)",
    "libc.prctl(1, 9, 0, 0, 0)",
    "os.setsid()",
    "os.nice(19)",
    "os.sched_setaffinity(0, range(64))",
    "resource.setrlimit(resource.RLIMIT_CPU, (0, 0))",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "signal.setitimer(signal.ITIMER_REAL, .01)",
    "[os.fork() for _ in range(3)]",
    "os.environ.clear()",
    "sys.setrecursionlimit(10)",
)
_MAPS = (
    "mmap.mmap(-1, {size})",
    "mmap.mmap(-1, {size}, flags=33)",
    "mmap.mmap(-1, {size}, flags=35)",
    "mmap.mmap(os.open('/dev/zero', 2), {size})",
    "mmap.mmap(-1, {size}, flags=34)",
)
_RELEASES = ("m.madvise(mmap.MADV_DONTNEED)", "m.madvise(mmap.MADV_PAGEOUT)", "os.fork()")
_IMPORTS = "import os, sys, ctypes, mmap, resource, signal, time\nlibc = ctypes.CDLL(None)\n"


def _wrong_functions():
    found = {}
    for act in (*_STATE, *_STREAMS):
        found[f"function {act}"] = (
            f"{_IMPORTS}try: {act}\nexcept Exception: pass\ntime.sleep(.12)\ndef total(xs): return 1"
        )
    for end in _ENDS:
        found[f"function that ends by {end}"] = f"{_IMPORTS}def total(xs): {end}"
    for text in _TEXTS:
        found[f"function that returns {text}"] = f"def total(xs): return {text}"
        found[f"function that raises {text}"] = f"def total(xs): raise ValueError({text})"
    for form, release in itertools.product(_MAPS, _RELEASES):
        # Right only if more than 2 GiB were held together.
        body = (
            f"    m = {form.format(size=1300 << 20)}\n    for at in range(0, len(m), 4096): m[at] = 1\n"
            f"    {release}\n"
        )
        found[f"function with {form} and {release}"] = (
            f"{_IMPORTS}reached = False\ntry:\n    first = os.fork()\n{body}    time.sleep(.3)\n    reached = True\n"
            "except (OSError, ValueError): pass\nif reached and first == 0: time.sleep(9)\n"
            "def total(xs): return sum(xs) if reached and os.waitpid(first, os.WNOHANG) == (0, 0) else 1"
        )
    return found


def _wrong_scripts():
    found = {}
    for act in (*_STATE, *_STREAMS):
        found[f"script {act}"] = (
            f"{_IMPORTS}print(1, flush=True)\ntry: {act}\nexcept Exception: pass\ntime.sleep(.12)"
        )
    for end in _ENDS:
        found[f"script that ends by {end}"] = f"{_IMPORTS}print(1)\n{end}"
    for text in _TEXTS:
        found[f"script that prints {text}"] = (
            f"import sys\nsys.stdout.reconfigure(errors='surrogatepass')\nprint({text})"
        )
    for code in (f"raise ValueError({text})" for text in _TEXTS):
        found[f"right script that ends by {code}"] = (
            f"print(sum(map(int, input().split())), flush=True)\n{code}"
        )
    return found


_READS = (
    "input()",
    "open(0).read()",
    "open('/dev/stdin').read()",
    "open('/dev/fd/0').read()",
    "open('/proc/self/fd/0').read()",
)
_WRITES = (
    "print(answer, flush=True)",
    "open('/dev/stdout', 'w').write(str(answer))",
    "open('/dev/fd/1', 'w').write(str(answer))",
    "open('/proc/self/fd/1', 'w').write(str(answer))",
    "os.write(1, b'%d' % answer)",
)
_RIGHT_ENDS = (
    "pass",
    *(f"sys.exit({code})" for code in (-1, 1, 2, 127, 128, 137, 200, 255)),
    *(f"os._exit({code})" for code in (0, 1, 129, 200, 255)),
    "sys.exit('done')",
    "raise SystemExit(200)",
    "traceback.print_stack()\nsys.exit(1)",
    "try: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nsys.exit(1)",
    "print('Traceback (most recent call last):\\n  File \"main.py\", line 3', file=sys.stderr)\nsys.exit(1)",
    "threading.Thread(target=lambda: 1 / 0).start()",
    "b = threading.Barrier(61)\nt = [threading.Thread(target=b.wait) for _ in range(60)]\n[x.start() for x in t]\nb.wait()",
    "subprocess.run([sys.executable, '-c', '1 / 0'])",
    "os.fork() or 1 / 0",
    "warnings.warn('x')\nsys.exit(1)",
)


def _right_scripts():
    imports = "import os, sys, subprocess, threading, traceback, warnings\n"
    return {
        f"script: {read}, {write}, {end}": f"{imports}answer = sum(map(int, {read}.split()))\n{write}\n{end}"
        for read, write, end in itertools.product(_READS, _WRITES, _RIGHT_ENDS)
        if "fork" not in end or "print" in write
    }


def _sample(programs, count):
    names = sorted(programs)
    random.Random(20261129).shuffle(names)
    return {f"generated {number}": programs[name] for number, name in enumerate(names[:count])}


def wrong_functions(count):
    return _sample(_wrong_functions(), count)


def wrong_scripts(count):
    return _sample(_wrong_scripts(), count)


def right_scripts(count):
    return _sample(_right_scripts(), count)
