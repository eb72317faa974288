# ruff: noqa: E501
"""Attacks on the walls around a program: what it must not see, and more than it may take.

Each body defines REACHED; made a program by `wall`, it answers rightly where that is true.
"""

from textwrap import dedent, indent


def wall(body):
    """A program that is right if `body` runs to its end with REACHED true, and wrong if it raises."""
    return f"""import os, sys, ctypes, errno, socket, time
libc = ctypes.CDLL(None, use_errno=True)
REACHED = False
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments])
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
try:
{indent(dedent(body), "    ")}
except (OSError, MemoryError, ValueError, AttributeError): pass
def total(xs): return sum(xs) if REACHED else None
"""


WALLS = {
    "passwd": "REACHED = bool(open('/etc/passwd').read())",
    "root-listed": "REACHED = bool(set(os.listdir('/')) & {'home', 'root', 'etc', 'var', 'proc', 'sys', 'mnt', 'srv'} - {'root', 'etc'})",
    "home": "REACHED = os.path.basename(SECRET) in os.listdir(HOME)",
    "secret": "REACHED = open(SECRET).read() == 'hunter2'",
    "environment": "REACHED = 'hunter2' in str(dict(os.environ))",
    "environment-of-others": """
import glob
for name in glob.glob('/proc/[0-9]*/environ'):
    try: REACHED |= b'hunter2' in open(name, 'rb').read()
    except OSError: pass
""",
    "processes": "REACHED = os.path.exists(f'/proc/{CALLER}')",
    "kill-caller": "os.kill(CALLER, 0)\nREACHED = True",
    "kill-all": "os.kill(-1, 9)\nREACHED = True",
    "loopback": "socket.create_connection(('127.0.0.1', PORT), timeout=1)\nREACHED = True",
    "loopback-6": "socket.create_connection(('::1', PORT), timeout=1)\nREACHED = True",
    "inet-socket": "socket.socket(socket.AF_INET)\nREACHED = True",
    "datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))\nREACHED = True",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)\nREACHED = True",
    "netlink": "socket.socket(16, socket.SOCK_RAW)\nREACHED = True",
    "packet": "socket.socket(17, socket.SOCK_RAW)\nREACHED = True",
    "kernel-crypto": "socket.socket(38, socket.SOCK_SEQPACKET)\nREACHED = True",
    "socket-pair-of-another-family": "socket.socketpair(30, socket.SOCK_STREAM)\nREACHED = True",
    "session-keyring": "call({'x86_64': 250, 'aarch64': 219}[os.uname().machine], 0, -3, 0)\nREACHED = True",
    "add-key": "call({'x86_64': 248, 'aarch64': 217}[os.uname().machine], b'user', b'k', b'v', 1, -3)\nREACHED = True",
    "request-key": "call({'x86_64': 249, 'aarch64': 218}[os.uname().machine], b'user', b'k', 0, -3)\nREACHED = True",
    "io-uring": "call(425, 4, b'\\0' * 120)\nREACHED = True",
    "io-uring-disabled-differently": "call(427, -1, 0, 0, 0)\nREACHED = True",
    "user-namespace": "if libc.unshare(0x10000000) == 0: REACHED = True",
    "mount-namespace": "if libc.unshare(0x20000) == 0: REACHED = True",
    "clone-user-namespace": "pid = call({'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0)\n"
    "if pid == 0: os._exit(0)\nREACHED = True",
    "clone3": "import struct\npid = call(435, struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)\nif pid == 0: os._exit(0)\nREACHED = True",
    "ptrace": "if libc.ptrace(0, 0, 0, 0) == 0: REACHED = True",
    "memory-of-init": "REACHED = bool(open('/proc/1/mem', 'rb'))",
    "process-memory": "call({'x86_64': 310, 'aarch64': 270}[os.uname().machine], os.getpid(), b'\\0' * 16, 0, b'\\0' * 16, 0, 0)\nREACHED = True",
    "descriptor-of-another": "call(438, os.pidfd_open(os.getppid()), 0, 0)\nREACHED = True",
    "bpf": "call({'x86_64': 321, 'aarch64': 280}[os.uname().machine], 0, b'\\1\\0\\0\\0\\4\\0\\0\\0\\4\\0\\0\\0\\1\\0\\0\\0' + b'\\0' * 100, 116)\n"
    "REACHED = True",
    "perf": "call({'x86_64': 298, 'aarch64': 241}[os.uname().machine], b'\\0' * 128, 0, -1, -1, 0)\nREACHED = True",
    "userfaultfd": "call({'x86_64': 323, 'aarch64': 282}[os.uname().machine], 1)\nREACHED = True",
    "mount": "os.mkdir('m')\nif libc.mount(b'none', b'm', b'tmpfs', 0, 0) == 0: REACHED = True",
    "new-mount-calls": "call(430, b'tmpfs', 0)\nREACHED = True",
    "unmount": "if libc.umount2(b'/usr', 2) == 0: REACHED = True",
    "chroot": "os.chroot('/work')\nREACHED = True",
    "device-node": "os.mknod('disk', 0o60666, os.makedev(254, 0))\nREACHED = True",
    "disk": "REACHED = any(bool(open('/dev/' + n, 'rb')) for n in ('vda', 'sda', 'nvme0n1', 'mem', 'kmsg') if os.path.exists('/dev/' + n))",
    "root-again": "os.setuid(0)\nREACHED = os.getuid() == 0 and os.access('/usr', os.W_OK)",
    "capabilities": "import struct\nif libc.capset(struct.pack('II', 0x20080522, 0), struct.pack('6I', *[0xffffffff] * 6)) == 0: REACHED = True",
    "write-interpreter": "import shutil\nfor place in ('/usr', '/lib', '/bin', '/packages', '/sandbox', os.path.dirname(os.__file__)):\n"
    "    try:\n        open(place + '/x', 'w')\n        REACHED = True\n    except OSError: pass",
    "chmod-interpreter": "os.chmod(sys.executable, 0o4777)\nREACHED = True",
    "handles": "call({'x86_64': 303, 'aarch64': 264}[os.uname().machine], -100, b'/usr', b'\\x80\\0\\0\\0' + b'\\0' * 140, b'\\0' * 8, 0)\nREACHED = True",
    "personality": "call({'x86_64': 135, 'aarch64': 92}[os.uname().machine], 0x0040000)\nREACHED = True",
    "host-name": "socket.sethostname('mine')\nREACHED = True",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 0)\nREACHED = True",
    "kernel-log": "call({'x86_64': 103, 'aarch64': 116}[os.uname().machine], 3, b'\\0' * 4096, 4096)\nREACHED = True",
    "higher-limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\nREACHED = True",
    "more-priority": "os.nice(-10)\nREACHED = True",
    "x32": "if os.uname().machine == 'x86_64':\n    call(0x40000000 + 39)\n    REACHED = True",
    "32-bit": """
import mmap
if os.uname().machine == 'x86_64':
    pid = os.fork()
    if pid == 0:
        page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
        page.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80
        got = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        os._exit(0 if got > 0 else 1)
    REACHED = os.waitpid(pid, 0)[1] == 0
""",
    "setuid-programs": "import subprocess\nREACHED = any(subprocess.run([p, '-c', 'true'], stdin=-3, capture_output=True, timeout=2).returncode == 0"
    " for p in ('/bin/su', '/usr/bin/sudo') if os.path.exists(p))",
    "newest-calls": "call(463, 0, 0, 0, 0)\nREACHED = True",
}

RESOURCES = {
    "memory": "held = [bytearray(64 << 20) for _ in range(40)]\nfor h in held: h[::4096] = bytes(len(h[::4096]))\nREACHED = True",
    "memory-of-many": """
done, tell = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        held = bytearray(600 << 20)
        held[::4096] = b'x' * len(held[::4096])
        os.write(tell, b'x')
        time.sleep(20)
        os._exit(0)
for _ in range(5): os.read(done, 1)
time.sleep(0.3)
REACHED = True
""",
    "shared-memory-sysv": "for _ in range(4):\n    n = call({'x86_64': 29, 'aarch64': 194}[os.uname().machine], 0, 1 << 30, 0o1600)\nREACHED = True",
    "message-queues-sysv": "call({'x86_64': 68, 'aarch64': 186}[os.uname().machine], 0, 0o1600)\nREACHED = True",
    "message-queues": "call({'x86_64': 240, 'aarch64': 180}[os.uname().machine], b'q', 0o102, 0o600, 0)\nREACHED = True",
    "memfd": "fd = os.memfd_create('x')\nREACHED = True",
    "memfd-secret": "call(447, 0)\nREACHED = True",
    "shared-mappings": """
import mmap
done, tell = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        held = mmap.mmap(-1, 700 << 20)
        for at in range(0, len(held), 4096): held[at] = 1
        os.write(tell, b'x')
        time.sleep(20)
        os._exit(0)
for _ in range(4): os.read(done, 1)
time.sleep(0.3)
REACHED = True
""",
    "scratch": "total = 0\nfor n, place in enumerate(['/work', '/tmp', '/dev/shm'] * 5):\n"
    "    with open(f'{place}/{n}', 'wb') as f: total += f.write(bytes(15 << 20))\nREACHED = total > 100 << 20",
    "inodes": "for n in range(20000): open(f'f{n}', 'w').close()\nREACHED = True",
    "large-file": "os.ftruncate(os.open('big', 66), 1 << 34)\nREACHED = True",
    "many processes": "for _ in range(200):\n    if os.fork() == 0:\n        time.sleep(20)\n        os._exit(0)\ntime.sleep(1)\nREACHED = True",
    "threads": "import threading\nfor _ in range(500):\n    try: threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
    "    except RuntimeError: raise OSError\nREACHED = True",
    "descriptors": "held = [os.open('/dev/null', 0) for _ in range(1000)]\nREACHED = True",
}
