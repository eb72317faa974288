"""Child side of sandbox.py: builds the walls, runs one untrusted program, reports through a pipe.

Run by path as `python -I -S -B sandbox_runner.py`, standard library only. The request is one JSON object on stdin:
  {"isolate": bool, "limits": {...}, "paths": [...], "packages": [...], "work": DIR, "report_fd": N, "kind": "tests"|"script"|"call", ...}
The report is one JSON object on report_fd. Exit codes mean nothing: a program that ends early simply reports nothing.

With isolate, three processes stand between the caller and the program:
  gate     starts in a fresh user namespace (with it: mount, pid, net, ipc, uts) once its parent has written the id maps
  init     process 1 of the pid namespace: mounts a new root (a small tmpfs with read-only views of the interpreter and system libraries),
           then waits; when it ends, the kernel kills whatever the program left behind
  program  drops every capability, sets its limits, runs
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH, PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 2, 1, 24, 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
NOBODY = 65534


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()), f"mount {target}")


# ---------------------------------------------------------------------------------------------------------------- the walls


def in_new_user_namespace() -> None:
    """Fork a child into new namespaces and become it; the parent writes its id maps, waits for it and passes its end on."""
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    uid, gid = os.geteuid(), os.getegid()
    child = os.fork()
    if child:
        os.close(ready_write)
        os.close(mapped_read)
        if os.read(ready_read, 1):
            # Root can map a second, unprivileged id for the program, so that neither file access nor process limits treat it as root.
            extra = f"\n1 {NOBODY} 1" if uid == 0 else ""
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1{extra}"), ("gid_map", f"0 {gid} 1{extra}")):
                if name == "setgroups" and uid == 0:
                    continue
                with open(f"/proc/{child}/{name}", "w") as file:
                    file.write(text)
            os.write(mapped_write, b"1")
        os.waitpid(child, 0)
        os._exit(0)
    os.close(ready_read)
    os.close(mapped_write)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    check(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS), "unshare")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # new credentials cleared it
    os.write(ready_write, b"1")
    if os.read(mapped_read, 1) != b"1":
        raise OSError("id maps refused")
    os.close(ready_write)
    os.close(mapped_read)


def become_init(report_fd: int) -> None:
    """Fork process 1 of the pid namespace and become it."""
    child = os.fork()
    if child:
        os.close(report_fd)
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def new_root(work: str, paths: list, packages: list, size_mib: int) -> None:
    """Replace / by a tmpfs holding read-only views of `paths`, `packages` under /packages, four devices, and a writable /work."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", work, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mib}m,nr_inodes=8192,mode=755")
    for path in paths:
        if os.path.islink(path):
            os.symlink(os.readlink(path), work + path)
        elif os.path.exists(path):
            read_only_view(path, work + path)
    for path in packages:
        read_only_view(path, f"{work}/packages/{os.path.basename(path)}")
    os.makedirs(work + "/dev")
    for name in ("null", "zero", "random", "urandom"):
        open(f"{work}/dev/{name}", "w").close()
        mount(f"/dev/{name}", f"{work}/dev/{name}", "", MS_BIND)
    for name in ("work", "tmp"):
        os.mkdir(f"{work}/{name}")
        os.chmod(f"{work}/{name}", 0o777)
    os.chdir(work)
    number = SYS_PIVOT_ROOT[os.uname().machine]
    check(libc.syscall(number, b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount old root")
    os.chdir("/work")


def read_only_view(path: str, target: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(path, target, "", MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    if libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, ctypes.sizeof(attributes)):
        flags = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | 8)  # a remount must keep locked flags (8: noexec)
        mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | flags)


def drop_privileges() -> None:
    """Become the mapped unprivileged id where there is one; lose every capability and the ways to regain one."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    with contextlib.suppress(OSError):  # where a single id is mapped, it is the caller's own, which is not root outside
        os.setgroups([])
        os.setresgid(1, 1, 1)
        os.setresuid(1, 1, 1)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def set_limits(limits: dict) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


# -------------------------------------------------------------------------------------------------------------- the program


def run_tests(request: dict) -> dict:
    """Define the candidate, then run tests that see fresh builtins: patching or shadowing them changes the candidate's own view only."""
    import builtins

    trusted = dict(vars(builtins))
    space = {"__name__": "candidate", "__builtins__": builtins}
    exec(compile(request["program"], "<candidate>", "exec"), space)
    judge = {name: value for name, value in space.items() if name not in trusted or name == request["entry_point"]}
    judge["__name__"], judge["__builtins__"] = "tests", trusted
    exec(compile(request["tests"], "<tests>", "exec"), judge)
    return {"verdict": request["nonce"]}


def run_script(request: dict) -> dict:
    """A whole program with stdin and stdout; ending by sys.exit is a normal end."""
    with contextlib.suppress(SystemExit):
        exec(compile(request["program"], "<candidate>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    return {"verdict": request["nonce"]}


def run_call(request: dict) -> dict:
    """Call one function (of class Solution where there is one); the caller compares the result."""
    space: dict = {"__name__": "candidate"}
    exec(compile(request["program"], "<candidate>", "exec"), space)
    owner = space["Solution"]() if "Solution" in space else None
    function = getattr(owner, request["entry_point"]) if owner is not None else space[request["entry_point"]]
    return {"verdict": request["nonce"], "result": function(*request["arguments"])}


KINDS = {"tests": run_tests, "script": run_script, "call": run_call}


def program(request: dict) -> None:
    """Run and report. Everything needed for the report is bound before the candidate can touch it."""
    report_fd, dumps, write, leave = request["report_fd"], json.dumps, os.write, os._exit
    run = KINDS[request["kind"]]
    sys.path[:0] = ["/packages"] if request["isolate"] else sorted({os.path.dirname(path) for path in request["packages"]})
    with open("stdin", "w+b") as file:
        file.write(request.get("stdin", "").encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
    set_limits(request["limits"])
    try:
        report = dumps(run(request))
    except SystemExit as end:
        report = dumps({"error": f"SystemExit: {end.code}"})
    except BaseException as error:
        report = dumps({"error": f"{type(error).__name__}: {error}"[:2000]})
    view = memoryview(report.encode() + b"\n")
    while view:
        view = view[write(report_fd, view) :]
    leave(0)


def report_fault(report_fd: int, error: Exception) -> None:
    os.write(report_fd, json.dumps({"fault": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    os._exit(0)


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    report_fd = request["report_fd"]
    os.umask(0o022)
    try:
        if request["isolate"]:
            in_new_user_namespace()
            become_init(report_fd)
            new_root(request["work"], request["paths"], request["packages"], request["disk_mib"])
    except (OSError, KeyError) as error:
        report_fault(report_fd, error)
    if not request["isolate"]:
        os.chdir(request["work"])
        program(request)
    child = os.fork()
    if child:
        os.close(report_fd)
        os.waitpid(child, 0)
        os._exit(0)  # the end of process 1 ends every process of the namespace
    try:
        drop_privileges()
    except OSError as error:
        report_fault(report_fd, error)
    program(request)


if __name__ == "__main__":
    main()
