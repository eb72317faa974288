"""A system call filter: denies calls that a program never needs and that allowed escapes from
isolation or limits before.

Everything else is allowed. A denied call returns EPERM; a call newer than the list returns ENOSYS,
and clone3 too, whose flags a filter cannot read (the C library then uses clone). Sockets are of the
Unix family only; memory is not mapped shared without a file. Numbers: Linux 6.x, x86-64 and AArch64.
"""

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
AF_UNIX = 1
NEW_NAMESPACES = 0x7E020000  # clone flags: NEWNS NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET
LAST_KNOWN = 462
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN, AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, FOURTH_ARGUMENT = (
    0,
    4,
    16,
    40,
)  # offsets in struct seccomp_data; the low word of an argument comes first

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name, x86-64 number, AArch64 number; - where the architecture has no such call
_DENIED = """
# keys, and other state that belongs to no namespace
add_key 248 217, request_key 249 218, keyctl 250 219, syslog 103 116, acct 163 89, quotactl 179 60
quotactl_fd 443 443, sethostname 170 161, setdomainname 171 162, settimeofday 164 170
clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, reboot 169 142, swapon 167 224
swapoff 168 225, vhangup 153 58, lookup_dcookie 212 18, nfsservctl 180 42, uselib 134 -
_sysctl 156 -, sysfs 139 -, ustat 136 -
# namespaces and mounts
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51
open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432
fspick 433 433, mount_setattr 442 442, mknod 133 -, mknodat 259 33, name_to_handle_at 303 264
open_by_handle_at 304 265, fanotify_init 300 262, fanotify_mark 301 263
# other processes
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272
pidfd_getfd 438 438, process_madvise 440 440, process_mrelease 448 448, move_pages 279 239
migrate_pages 256 238
# large kernel attack surface
bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425
io_uring_enter 426 426, io_uring_register 427 427, init_module 175 105, finit_module 313 273
delete_module 176 106, create_module 174 -, kexec_load 246 104, kexec_file_load 320 294
personality 135 92, iopl 172 -, ioperm 173 -, modify_ldt 154 -
# memory not counted by process limits
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195
semget 64 190, msgget 68 186, mq_open 240 180
# more processors than it was given
sched_setaffinity 203 122
"""
DENIED = [
    entry.split()
    for line in _DENIED.split("\n")
    if line and line[0] != "#"
    for entry in line.split(", ")
]
SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
MMAP = {"x86_64": 9, "aarch64": 222}
SHARED_ANONYMOUS = 0x21  # pages of such a map stay when no process shows them any more


def supported() -> bool:
    return os.uname().machine in AUDIT


def program(machine: str) -> bytes:
    """The filter as an array of struct sock_filter."""
    column = list(AUDIT).index(machine)
    steps: list[bytes] = []

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> None:
        steps.append(struct.pack("=HBBI", code, yes, no, value))

    def answer(action: int) -> None:
        step(RETURN, action)

    step(LOAD, ARCHITECTURE)
    step(JUMP_EQUAL, AUDIT[machine], yes=1)
    answer(KILL)  # 32-bit calls
    step(LOAD, NUMBER)
    step(JUMP_AT_LEAST, LAST_KNOWN + 1, no=1)  # also the x32 numbers, which begin at 2^30
    answer(DENY | errno.ENOSYS)
    step(JUMP_EQUAL, CLONE3, no=1)
    answer(DENY | errno.ENOSYS)
    for _name, *numbers in DENIED:
        if numbers[column] != "-":
            step(JUMP_EQUAL, int(numbers[column]), no=1)
            answer(DENY | errno.EPERM)
    step(JUMP_EQUAL, CLONE[machine], no=4)
    step(LOAD, FIRST_ARGUMENT)
    step(JUMP_BITS, NEW_NAMESPACES, no=1)
    answer(DENY | errno.EPERM)
    answer(ALLOW)
    step(JUMP_EQUAL, MMAP[machine], no=5)
    step(LOAD, FOURTH_ARGUMENT)
    step(AND, SHARED_ANONYMOUS)
    step(JUMP_EQUAL, SHARED_ANONYMOUS, no=1)
    answer(DENY | errno.EPERM)
    answer(ALLOW)
    for number in SOCKETS[machine]:
        step(JUMP_EQUAL, number, no=4)
        step(LOAD, FIRST_ARGUMENT)
        step(JUMP_EQUAL, AF_UNIX, yes=1)
        answer(DENY | errno.EPERM)
        answer(ALLOW)
    answer(ALLOW)
    return b"".join(steps)


def install() -> None:
    """Filter this process and its descendants permanently. Raises OSError where the kernel or
    the architecture has no filters."""
    machine = os.uname().machine
    if machine not in AUDIT:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    code = program(machine)
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: 16-bit count, then an aligned pointer
    header = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(instructions))
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, MODE_FILTER, header, 0, 0),
    ):
        if (
            libc.prctl(
                arguments[0],
                *(a if isinstance(a, bytes) else ctypes.c_ulong(a) for a in arguments[1:]),
            )
            != 0
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp: {os.strerror(number)}")
