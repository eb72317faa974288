"""A system call filter: denies calls that a program never needs and that allowed escapes from
isolation or limits before.

Everything else is allowed. A denied call returns EPERM; a call newer than the list returns ENOSYS,
and clone3 too, whose flags a filter cannot read (the C library then uses clone). Sockets are of the
Unix family only; memory is not mapped shared without a file. Numbers: Linux 6.x, x86-64 and AArch64.
"""

import ctypes
import errno
import os
import re
import struct

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
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
DENIED = re.findall(r"(\w+) (\d+|-) (\d+|-)(?:,|\n)", _DENIED)
# The calls whose arguments are looked at: clone, mmap, socket, socketpair.
_LOOKED_AT = {"x86_64": (56, 9, 41, 53), "aarch64": (220, 222, 198, 199)}
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
_CODES = {"load": 0x20, "equal": 0x15, "at_least": 0x35, "bits": 0x45, "and": 0x54, "return": 0x06}
# An operation, its operand, and the lines to skip if it is true and if not. Offsets in struct
# seccomp_data: 0 the number, 4 the architecture, 16 and 40 the low words of arguments 1 and 4.
_FILTER = f"""
load 4, equal {{audit}} 1 0, return {_KILL}
load 0, at_least 463 0 1, return {_ENOSYS}
equal 435 0 1, return {_ENOSYS}
{{denied}}
equal {{clone}} 0 4, load 16, bits {0x7E020000} 0 1, return {_EPERM}, return {_ALLOW}
equal {{mmap}} 0 5, load 40, and {0x21}, equal {0x21} 0 1, return {_EPERM}, return {_ALLOW}
equal {{socket}} 0 4, load 16, equal 1 1 0, return {_EPERM}, return {_ALLOW}
equal {{pair}} 0 4, load 16, equal 1 1 0, return {_EPERM}, return {_ALLOW}
return {_ALLOW}"""
# 32-bit calls end the program. 463 is after the last known call, and the x32 numbers begin at 2^30;
# 435 is clone3. 0x7E020000: clone flags NEWNS NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET. 0x21: a
# shared map without a file, whose pages stay when no process shows them any more. 1: AF_UNIX.


def supported() -> bool:
    return os.uname().machine in AUDIT


def program(machine: str) -> bytes:
    """The filter as an array of struct sock_filter."""
    column = 1 + list(AUDIT).index(machine)
    numbers = [call[column] for call in DENIED if call[column] != "-"]
    text = _FILTER.format(
        audit=AUDIT[machine],
        denied="\n".join(f"equal {number} 0 1, return {_EPERM}" for number in numbers),
        **dict(zip(("clone", "mmap", "socket", "pair"), _LOOKED_AT[machine])),
    )
    steps = [step.split() for step in re.split(", |\n", text.strip())]
    return b"".join(
        struct.pack("=HBBI", _CODES[name], *map(int, skipped or (0, 0)), int(operand))
        for name, operand, *skipped in steps
    )


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
    zero = ctypes.c_ulong(0)
    for option, argument, pointer in (
        (PR_SET_NO_NEW_PRIVS, 1, None),
        (PR_SET_SECCOMP, MODE_FILTER, header),
    ):
        if libc.prctl(option, ctypes.c_ulong(argument), pointer, zero, zero):
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp: {os.strerror(number)}")
