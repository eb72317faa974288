"""Namespaces, a private root file system, and dropping all privileges. Linux only."""

import ctypes
import errno
import os
import resource
import signal
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NEW_NAMESPACES = 0x7C020000  # CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MNT_DETACH, PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 2, 1, 24, 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
ONE_ID, TWO_IDS = b"one id", b"two ids"
NO_NAMESPACES = "no user namespaces"
NOBODY, PROGRAM = (
    65534,
    1,
)  # the program's user id outside, where a second id can be mapped, and inside


class NoNamespaces(Exception):
    """The system, or the container that this runs in, gives no user namespaces."""


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    check(
        libc.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
        ),
        f"mount {target}",
    )


def exit_with_child(child: int, ended: int | None = None) -> None:
    """Wait for a child, write its exit code, or -n after signal n, to the pipe `ended`, and exit."""
    _, status = os.waitpid(child, 0)
    if ended is not None:
        os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def enter_namespaces(close: int) -> bool:
    """Fork a child into new namespaces and continue as it; the parent writes its id maps, closes
    `close`, and waits.

    Returns whether the program has its own user id there.
    """
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    child = os.fork()
    if child:
        os.close(ready_write)
        os.close(mapped_read)
        if os.read(ready_read, 1):
            os.write(mapped_write, map_ids(child))
        os.close(close)
        os.close(mapped_write)
        exit_with_child(child)
    os.close(ready_read)
    os.close(mapped_write)
    die_with_parent()
    if libc.unshare(NEW_NAMESPACES) != 0:
        number = ctypes.get_errno()
        # The kernel's words for a limit of namespaces are those for a full disk.
        limit = "none may be made, or no more (/proc/sys/user)"
        cause = limit if number == errno.ENOSPC else os.strerror(number)
        raise NoNamespaces(f"{NO_NAMESPACES}: {cause}")
    die_with_parent()  # new credentials reset it
    os.write(ready_write, b"1")
    answer = os.read(mapped_read, 500)
    if answer not in (ONE_ID, TWO_IDS):
        raise OSError(f"id maps refused: {answer.decode()}")
    os.close(ready_write)
    os.close(mapped_read)
    return answer == TWO_IDS


def map_ids(child: int) -> bytes:
    """As root, map a second, unprivileged id for the program if possible; else one id, which is
    not root's inside either. Returns ONE_ID, TWO_IDS or an error message."""
    second = f"\n{PROGRAM} {NOBODY} 1"
    problem = ""
    for ids in (second, "") if os.geteuid() == 0 else ("",):
        try:
            if not ids:
                write(
                    f"/proc/{child}/setgroups", "deny"
                )  # required for mapping a group without root
            first = 0 if ids else PROGRAM
            write(f"/proc/{child}/gid_map", f"{first} {os.getegid()} 1{ids}")
            write(f"/proc/{child}/uid_map", f"{first} {os.geteuid()} 1{ids}")
            return TWO_IDS if ids else ONE_ID
        except OSError as error:
            problem = str(error)
    return problem.encode()


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def become_init(close: int) -> None:
    """Fork process 1 of the pid namespace and continue as it. When it ends, the kernel kills all
    remaining processes."""
    child = os.fork()
    if child:
        os.close(close)
        exit_with_child(child)
    die_with_parent()


def mount_root(root: str, views: list[list[Any]], links: list[list[str]], size_mib: int) -> None:
    """Replace / by a read-only tmpfs with views of some host files; /work, /tmp and /dev/shm are
    writable, `size_mib` in total.

    views: (source, path in the new root, writable). links: (path in the new root, target).
    """
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.makedirs(root + "/dev")
    for source, target, writable in views:
        if os.path.islink(source) and not writable:
            os.symlink(os.readlink(source), root + target)
        elif os.path.exists(source):
            bind(source, root + target, writable)
    for path, target in links:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    # Not zero: shared maps of it are memory that no process shows.
    for name in ("null", "random", "urandom"):
        bind(f"/dev/{name}", f"{root}/dev/{name}", True)
    os.mkdir(f"{root}/scratch")
    mount(
        "tmpfs",
        f"{root}/scratch",
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"size={size_mib}m,nr_inodes=8192,mode=755",
    )
    for name in ("work", "tmp", "dev/shm"):
        place = f"{root}/scratch/{os.path.basename(name)}"
        os.mkdir(place)
        os.chmod(place, 0o1777)
        bind(place, f"{root}/{name}", True)
    mount("", root, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount old root")
    os.chdir("/work")


def bind(source: str, target: str, writable: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, "", MS_BIND | MS_REC)
    if writable:
        return
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    if libc.syscall(
        SYS_MOUNT_SETATTR,
        AT_FDCWD,
        target.encode(),
        AT_RECURSIVE,
        attributes,
        ctypes.sizeof(attributes),
    ):
        flags = os.statvfs(target).f_flag & (
            MS_NOSUID | MS_NODEV | MS_NOEXEC
        )  # a remount must keep locked flags
        mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | flags)


def drop_privileges(own_id: bool) -> None:
    """Switch to the mapped unprivileged id if there is one; drop every capability for good."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if own_id:
        os.setgroups([])
        os.setresgid(PROGRAM, PROGRAM, PROGRAM)
        os.setresuid(PROGRAM, PROGRAM, PROGRAM)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def set_limits(limits: dict[str, int]) -> None:
    """Set hard limits, never above the present ones. STACK keeps its hard limit: recursive
    programs raise it."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, hard if name == "STACK" else value))
