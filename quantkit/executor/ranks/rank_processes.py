"""The other ranks' processes: rank 0 starts them on this machine, watches them, and stops with a
name when one dies."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import TCPStore

from quantkit.common.errors import QuantkitError
from quantkit.executor.options import EngineOptions

_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
"""Where the libraries read which interface to listen on; one that is already set stays."""

_WATCH_SECONDS = 0.2
_GRACE_SECONDS = 4.0
"""What the main thread has to notice by itself, through a failed collective, that a rank died: on
some devices it waits for ever."""


def environment_rank(size: int) -> int | None:
    """This process's rank where torchrun, or rank 0 of ours, started it; None otherwise."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    world = int(os.environ["WORLD_SIZE"])
    if world != size:
        raise QuantkitError(
            f"{world} processes were started for {size} ranks", "make --tp or --dp their number"
        )
    return int(os.environ["RANK"])


def launch(options: EngineOptions) -> "RankProcesses":
    """Start the ranks above 0 on this machine, which meet in a store at a loopback address; their
    libraries' connections stay there too.

    Changes this process: the libraries' interfaces in its environment, which they read at a first
    collective, and its share of the threads. The others are stopped when it exits. A thread of it
    watches them, and ends it with exit code 1 where one dies and it does not notice.
    """
    store = _loopback_store()
    os.environ.update({name: os.environ.get(name, _loopback_interface()) for name in _INTERFACES})
    threads = max(torch.get_num_threads() // options.ranks, 1)
    torch.set_num_threads(threads)
    command = [sys.executable, "-m", "quantkit.executor.worker", options.to_json()]
    processes = {}
    for rank in range(1, options.ranks):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(options.ranks),
            "OMP_NUM_THREADS": str(threads),
        }
        environment = {**os.environ, **_meeting(store), **place}
        processes[rank] = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    ranks = RankProcesses(processes, store)
    atexit.register(ranks.stop)
    threading.Thread(target=_watch, args=(ranks,), name="quantkit-ranks", daemon=True).start()
    return ranks


def leave_fault(fault: QuantkitError) -> None:
    """Leave for rank 0 why this rank ends, in the store where they meet."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    store.set(_fault_of(int(os.environ["RANK"])), str(fault))


def _fault_of(rank: int) -> str:
    return f"quantkit-fault-{rank}"


class RankProcesses:
    """The processes of ranks 1 .. size - 1, and the store they meet in, which lives as long as this
    does."""

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]], store: TCPStore) -> None:
        self.processes, self._store = processes, store
        self.dead = ""
        """Which rank died."""
        self.refused = False
        """Whether it said why."""
        self.noticed = threading.Event()
        """The main thread saw a collective fail, and will say why."""
        self.stopping = False

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While it lasts, this process's environment says where the ranks meet; then it says what
        it said before."""
        place = _meeting(self._store)
        before = {name: os.environ.get(name) for name in place}
        os.environ.update(place)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def why_lost(self) -> QuantkitError:
        """Which rank died; asked by the main thread when a collective failed."""
        self.noticed.set()
        until = time.monotonic() + 2
        while not self.dead and time.monotonic() < until:
            time.sleep(_WATCH_SECONDS / 4)
        if self.refused:
            return QuantkitError(self.dead, "start again")
        return QuantkitError(
            self.dead or "the ranks lost each other", "see what it wrote above; start again"
        )

    def find_dead(self) -> None:
        """Look once whether a rank died that was not stopped by us, or left the reason why it is
        about to."""
        for rank, process in self.processes.items():
            ended = process.poll() is not None
            if self.stopping or not (ended or self.noticed.is_set()):
                continue
            which, left = f"rank {rank} of {len(self.processes) + 1}", _fault_of(rank)
            if self._store.check([left]):
                self.refused, self.dead = True, f"{which}: {self._store.get(left).decode()}"
            elif ended:
                self.dead = f"{which} died ({_how(process.returncode)})"
            if self.dead:
                return

    def stop(self) -> None:
        """End those that still run: they were asked to, or rank 0 is gone."""
        self.stopping = True
        for process in self.processes.values():
            try:
                process.wait(2 if not self.dead else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch(ranks: RankProcesses) -> None:
    while not ranks.dead:
        time.sleep(_WATCH_SECONDS)
        ranks.find_dead()
        if ranks.stopping:
            return
    if not ranks.noticed.wait(_GRACE_SECONDS) and not ranks.stopping:
        sys.stderr.write(f"quantkit: {ranks.dead}\n")
        for process in ranks.processes.values():
            process.kill()
        os._exit(1)


def _meeting(store: TCPStore) -> dict[str, str]:
    """What a process must have in its environment to meet the others."""
    # The last flag says that the store exists: by itself rank 0 would open one on every
    # interface.
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _loopback_store() -> TCPStore:
    """Where the ranks meet: torch takes over a socket that listens on the loopback address
    alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _loopback_interface() -> str:
    """Its name: lo, or lo0 on a Mac."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
