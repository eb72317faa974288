"""Sets up the isolation, then becomes the process that runs inside it.

Run by path as `python -I -S -B launcher.py`. The request is one JSON object on stdin (process.py).
The pipe `started` gets "ready" and is closed before anything untrusted runs, or gets the error
message.

With isolate, three processes are between the caller and the program:
  launcher  waits for the child in the new namespaces, whose id maps it wrote
  init      process 1 of the pid namespace; mounts the new root, then waits
  program   drops all privileges, sets its limits and its system call filter, executes
"""

import json
import os
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import isolation
import seccomp


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    started = request["started"]
    isolation.die_with_parent()
    if os.getppid() != request["caller"]:
        os._exit(1)
    os.umask(0o022)
    try:
        if request["isolate"]:
            own_id = isolation.enter_namespaces(started)
            isolation.become_init(started)
            isolation.mount_root(
                request["root"], request["views"], request["links"], request["disk_mib"]
            )
            child = os.fork()
            if child:
                os.close(started)
                isolation.exit_with_child(child, request["ended"])
            os.setsid()  # not in the group of the processes outside, which killpg(0) would reach
            isolation.drop_privileges(own_id)
        else:
            os.chdir(request["root"])
        execute(request)
    except Exception as error:
        os.write(started, f"{type(error).__name__}: {error}".encode(errors="replace")[:2000])
        os._exit(1)


def execute(request: dict[str, Any]) -> NoReturn:
    for name, text in request["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    os.dup2(request["input"], 0)
    os.close(request["input"])
    for name in ("started", "ended"):
        os.set_inheritable(request[name], False)
    os.sched_setaffinity(0, request["cpus"])
    isolation.set_limits(request["limits"])
    if request["isolate"] or seccomp.supported():
        seccomp.install()
    os.write(request["started"], b"ready")
    os.execve(request["command"][0], request["command"], request["environment"])


if __name__ == "__main__":
    main()
