"""The other ranks' processes: rank 0 starts them on this machine, watches them, and stops with a name when one dies.

    python -m quantkit.executor.rank_processes '{"model_path": ..., "tp": 4, ...}'      is one of them, with RANK and WORLD_SIZE set

A process ends on its own when the one that started it is gone.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import torch
from torch.distributed import TCPStore

from quantkit.errors import QuantkitError

_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
"""Where the libraries read which interface to listen on; one that is already set stays."""

_WATCH_SECONDS = 0.2
_GRACE_SECONDS = 4.0
"""What the main thread has to notice by itself, through a failed collective, that a rank died: on some devices it waits for ever."""


class RankProcesses:
    """Processes of ranks 1 .. size - 1. They meet in a store at a loopback address, and their libraries' own connections stay there too."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        self._store = _loopback_store()
        # The last tells torch that the store is there: by itself rank 0 would open one on every interface.
        meeting = {"MASTER_ADDR": self._store.host, "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update(meeting)
        for name in _INTERFACES:
            os.environ.setdefault(name, _loopback_interface())
        threads = max(torch.get_num_threads() // size, 1)
        torch.set_num_threads(threads)
        command = [sys.executable, "-m", "quantkit.executor.rank_processes", json.dumps(options)]
        self._processes = {}
        for rank in range(1, size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": str(threads)}
            environment = {**os.environ, **place}
            self._processes[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._dead = ""
        self._told = threading.Event()
        self._stopping = False
        atexit.register(self.stop)
        threading.Thread(target=self._watch, name="quantkit-ranks", daemon=True).start()

    def why_lost(self) -> str:
        """Which rank died; asked by the main thread when a collective failed."""
        self._told.set()
        until = time.monotonic() + 2
        while not self._dead and time.monotonic() < until:
            time.sleep(_WATCH_SECONDS / 4)
        return self._dead or "the ranks lost each other"

    def stop(self) -> None:
        """End those that still run: they were told to, or there is nobody left to tell them."""
        self._stopping = True
        for process in self._processes.values():
            try:
                process.wait(2 if not self._dead else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self) -> None:
        while not self._dead:
            time.sleep(_WATCH_SECONDS)
            for rank, process in self._processes.items():
                if process.poll() is not None and not self._stopping:
                    self._dead = f"rank {rank} of {len(self._processes) + 1} died ({_how(process.returncode)})"
                    break
            if self._stopping:
                return
        if not self._told.wait(_GRACE_SECONDS) and not self._stopping:
            sys.stderr.write(f"quantkit: {self._dead}\n")
            for process in self._processes.values():
                process.kill()
            os._exit(1)


def _loopback_store() -> TCPStore:
    """Where the ranks meet: torch takes over a socket that listens on the loopback address alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _loopback_interface() -> str:
    """Its name: lo, or lo0 on a Mac."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    from quantkit.executor.engine import Engine

    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for rank 0, which tells the others
    try:
        Engine.load(**json.loads(sys.argv[1]))
    except QuantkitError as fault:
        sys.stderr.write(f"quantkit: rank {os.environ['RANK']}: {fault}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
