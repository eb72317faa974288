"""Tensor and data parallelism: the ranks' collectives, and messages between them.

On the GPUs of one host small tensors go through memory that the ranks open to each other,
everything else through the device's library. Messages are JSON over TCP, for every decode step
waits for one and a process group's broadcast takes longer; each connection begins with a key that
only the ranks know.
"""

import json
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from quantkit_kernels import UnsummedPairs, accelerator, add_rms_norm
from torch import Tensor

from quantkit.common.devices import HostCopy, find_device, set_current_device
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.executor.options import EngineOptions
from quantkit.executor.ranks.quantized_all_reduce import CodedSums, codes_of_sums
from quantkit.executor.ranks.rank_processes import RankProcesses, environment_rank, launch

_LENGTH_BYTES = 8
_CONNECT_SECONDS = 60

SPIN_SECONDS = 0.05
"""Longer than a decode step: while tokens are made, no rank is put to sleep between two
messages."""


class Channel:
    """exchange: a JSON value of each rank, in the order of ranks; every rank calls it. OSError
    where another rank is gone.

    spins: whether to look for a message again and again before sleeping, which takes a core and
    saves waking up.
    """

    def __init__(
        self, rank: int, size: int, exchange: Callable[[Any], list[Any]], *, spins: bool = False
    ) -> None:
        self._spins = spins
        self._rank, host = rank, os.environ["MASTER_ADDR"]
        if rank:
            port, key = exchange(None)[0]
            connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            connection.sendall(bytes.fromhex(key))
            self._connections = [connection]
        else:
            key = secrets.token_hex(16)
            with socket.create_server((host, 0)) as server:
                server.settimeout(_CONNECT_SECONDS)
                exchange((server.getsockname()[1], key))
                self._connections = _accept(server, size - 1, bytes.fromhex(key))
        for connection in self._connections:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        """From rank 0 to all ranks, from another rank to rank 0."""
        text = json.dumps(message).encode()
        for connection in self._connections:
            connection.sendall(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def receive(self) -> Any:
        """The next message of rank 0; waits for it."""
        if self._spins:
            _spin(self._connections[0])
        return _decoded(self._connections[0])

    def collect(self, message: Any) -> list[Any]:
        """A message of each rank, on rank 0 in the order of ranks; nothing on the others."""
        if self._rank:
            self.send([self._rank, message])
            return []
        messages = dict(map(_decoded, self._connections))  # they connected in any order
        return [message, *(messages[rank] for rank in sorted(messages))]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _accept(server: socket.socket, count: int, key: bytes) -> list[socket.socket]:
    """`count` connections that know the key; others are closed."""
    known: list[socket.socket] = []
    while len(known) < count:
        connection, _ = server.accept()
        connection.settimeout(_CONNECT_SECONDS)
        try:
            matches = secrets.compare_digest(_read(connection, len(key)), key)
        except OSError:
            matches = False
        if matches:
            known.append(connection)
        else:
            connection.close()
    return known


def _spin(connection: socket.socket) -> None:
    """Until something can be read, or SPIN_SECONDS have passed."""
    until = time.monotonic() + SPIN_SECONDS
    while time.monotonic() < until:
        try:
            connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return
        except BlockingIOError:  # nothing has come yet
            continue


def _decoded(connection: socket.socket) -> Any:
    """The next message; waits for it."""
    return json.loads(_read(connection, int.from_bytes(_read(connection, _LENGTH_BYTES), "little")))


def _read(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = connection.recv(min(count - len(content), 1 << 20))
        if not part:
            raise ConnectionError("the other rank closed the connection")
        content += part
    return bytes(content)


_VALUE_BYTES = 1 << 10
"""Bytes of a value that `gather` carries."""

_SHARED_WORD, _SHARED_INTEGERS = 4, 2
"""Tokens that `share` sends are so many, or a multiple, and integers that `first` sends: 16
bytes."""

_FOREVER = timedelta(days=365)
"""An idle server's ranks wait for the next request this long."""


class Parallel:
    """This process's place among `size` ranks. `ranks` are the processes of the others, where this
    one started them."""

    def __init__(self, rank: int, size: int, ranks: RankProcesses | None = None) -> None:
        self.rank, self.size, self._ranks = rank, size, ranks
        self._control: dist.ProcessGroup | None = None
        self._channel: Channel | None = None
        self.peers: Any = None
        """The quantkit_kernels.cuda.collectives.Peers of this rank, where all ranks have one."""
        self.coded_sums: CodedSums | None = None
        """How sums of prompts are exchanged in 8 bits, where that was requested."""

    def connect(self, device: torch.device) -> None:
        """Meet the other ranks, at MASTER_ADDR:MASTER_PORT where others started this one.

        Messages go over gloo and TCP, tensors over the device's own library.
        """
        set_current_device(device)
        if device.type == "npu":
            # Collectives of a few kilobytes on the vector cores, without the scheduler's round
            # trip; read when the ranks first meet.
            os.environ.setdefault("HCCL_OP_EXPANSION_MODE", "AIV")
        with self._ranks.meeting() if self._ranks is not None else nullcontext():
            self._meet(device)

    def _meet(self, device: torch.device) -> None:
        backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device.type]
        self._guard(
            lambda: dist.init_process_group(
                backend, rank=self.rank, world_size=self.size, timeout=_FOREVER
            )
        )
        if self.size > 1:
            self._control = dist.new_group(backend="gloo", timeout=_FOREVER)
            self._guard(lambda: self._open_channel(device))
            if device.type == "cuda":
                self._open_peers(device)

    def _open_channel(self, device: torch.device) -> None:
        # Ranks on a CPU compute with all its cores: none is left to wait on.
        self._channel = Channel(self.rank, self.size, self.gather, spins=device.type != "cpu")

    def _open_peers(self, device: torch.device) -> None:
        from quantkit_kernels.cuda.collectives import Peers

        try:
            self.peers = Peers(self.rank, self.size, device, self.gather)
        except RuntimeError as fault:
            if self.rank == 0:
                warnings.warn(
                    f"small collectives go through NCCL, which is slower: {fault}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, the same on each; x may be overwritten. On a CPU in float32, whatever x
        is; in 8 bits where `coded_sums` takes it."""
        if self.size == 1:
            return x
        if self.peers is not None and self.peers.adds(x):
            summed: Tensor = self.peers.all_reduce(x)
            return summed
        coded = self.coded_sums
        if coded is not None and coded.takes(x):
            decoded: Tensor = self._guard(lambda: coded.all_reduce(x))
            return decoded
        wide = x.float() if x.device.type == "cpu" else x.contiguous()
        self._guard(lambda: dist.all_reduce(wide))
        return wide.to(x.dtype)

    def add_rms_norm(
        self, x: Tensor | UnsummedPairs, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`quantkit_kernels.add_rms_norm` of `all_reduce(x)`: in one launch where the ranks' memory
        takes x, or what adds up to it."""
        if isinstance(x, UnsummedPairs) and not (
            self.peers is not None and self.peers.norms_pairs(x, gain)
        ):
            x = x.summed()
        if isinstance(x, UnsummedPairs) or (self.peers is not None and self.peers.norms(x, gain)):
            normed, total = self.peers.add_rms_norm(x, residual, gain, eps)
            return normed, total
        return add_rms_norm(self.all_reduce(x), residual, gain, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of each rank -> [..., size * n], ranks in order."""
        if self.size == 1:
            return x
        if self.peers is not None and self.peers.gathers(x):
            gathered: Tensor = self.peers.all_gather(x)
            return gathered
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(parts, x.contiguous()))
        return torch.cat(parts, dim=-1)

    def gather_rows(self, x: Tensor) -> Tensor:
        """[T, n] of each rank, all as many -> [size * T, n], ranks in order."""
        return self.all_gather(x.reshape(1, -1)).view(-1, x.shape[1])

    def scatter_sum(self, x: Tensor) -> Tensor:
        """[size * T, n] of each rank -> of their sum this rank's [T, n], added in float32 in the
        order of ranks."""
        if self.peers is not None and self.peers.scatters(x):
            summed: Tensor = self.peers.scatter_sum(x)
            return summed
        received = torch.empty_like(x)
        self._guard(lambda: dist.all_to_all_single(received, x.contiguous()))
        return received.view(self.size, -1, x.shape[1]).sum(dim=0, dtype=torch.float32).to(x.dtype)

    def share(self, token_ids: Tensor, counts: list[int]) -> list[list[int]]:
        """Each rank's token ids [counts[rank]] on every rank; all wait for their devices."""
        padded = token_ids.new_zeros(
            1, -(-max(counts) // _SHARED_WORD) * _SHARED_WORD, dtype=torch.int32
        )
        padded[0, : len(token_ids)] = token_ids
        # As float32, which collectives of every kind carry; bits are not touched.
        rows = (
            self.all_gather(padded.view(torch.float32))
            .view(torch.int32)
            .view(self.size, -1)
            .tolist()
        )
        return [row[:count] for row, count in zip(rows, counts)]

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        found = torch.tensor([value])
        if self.size > 1:
            self._guard(lambda: dist.all_reduce(found, dist.ReduceOp.MIN, group=self._control))
        return int(found)

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, of less than 1000 bytes, in the order of ranks."""
        text = json.dumps(value).encode()
        assert len(text) < _VALUE_BYTES, value
        padded = torch.frombuffer(bytearray(text.ljust(_VALUE_BYTES)), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._guard(lambda: dist.all_gather(parts, padded, group=self._control))
        return [json.loads(bytes(part.tolist())) for part in parts]

    def first(self, x: Tensor) -> Tensor:
        """Rank 0's int64 [n] on every rank; no host waits."""
        if self.size == 1:
            return x
        padded = x.reshape(1, -1)
        if len(x) % _SHARED_INTEGERS:
            padded = x.new_zeros(1, -(-len(x) // _SHARED_INTEGERS) * _SHARED_INTEGERS)
            padded[0, : len(x)] = x
        # As float32, which collectives of every kind carry; bits are not touched.
        return self.all_gather(padded.view(torch.float32)).view(torch.int64)[0, : len(x)]

    def agree(self, x: Tensor | HostCopy) -> list[int]:
        """Rank 0's integers [n] on every rank; only rank 0 waits for its device."""
        if self.size == 1 or self.rank == 0:
            values: list[int] = x.tolist()
            if self.size > 1:
                self.broadcast(values)
            return values
        received: list[int] = self.listen()
        return received

    def broadcast(self, message: Any) -> None:
        """From rank 0: a JSON value to all ranks."""
        self._guard(lambda: self._connected.send(message))

    def listen(self) -> Any:
        """The next message of rank 0; waits for it."""
        return self._guard(self._connected.receive)

    def report(self, message: Any) -> list[Any]:
        """A JSON value of each rank, on rank 0 in the order of ranks; nothing on the others."""
        messages: list[Any] = self._guard(lambda: self._connected.collect(message))
        return messages

    @property
    def _connected(self) -> Channel:
        assert self._channel is not None, "connect first"
        return self._channel

    def close(self) -> None:
        """Leave the others; those that were started from here end. Nothing happens where there are
        none."""
        if self.size == 1:
            return
        accelerator.let_go_of_graphs()
        dist.destroy_process_group()
        if self._channel is not None:
            self._channel.close()
        if self._ranks is not None:
            self._ranks.stop()

    def _guard(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except (RuntimeError, OSError) as fault:
            if self._ranks is None:
                raise QuantkitError(
                    "another rank stopped", "see its own message above; start again"
                ) from fault
            raise self._ranks.why_lost() from fault


SINGLE = Parallel(0, 1)
"""No other ranks."""


def join(options: EngineOptions) -> Parallel:
    """This process's place: given by who started it, or rank 0 with ranks started here. Raises
    QuantkitError as `check_ranks`."""
    device, codes = find_device(options.device), check_ranks(options)
    if options.ranks == 1:
        return SINGLE
    rank = environment_rank(options.ranks)
    parallel = Parallel(rank or 0, options.ranks, launch(options) if rank is None else None)
    parallel.connect(device)
    if codes is not None:
        parallel.coded_sums = CodedSums(codes, options.tp, options.answer_rows)
    return parallel


def check_ranks(options: EngineOptions) -> torch.dtype | None:
    """In which codes prompts are added over the ranks, None for the model's 16 bits. Raises
    QuantkitError for options of ranks that cannot be met, whatever the model."""
    device = find_device(options.device)
    codes = codes_of_sums(options.collectives, options.tp, device)
    _check_data_parallel(options, device)
    starts = options.ranks > 1 and environment_rank(options.ranks) is None
    held = (
        torch.get_device_module(device).device_count()
        if starts and device.type != "cpu"
        else options.ranks
    )
    if held < options.ranks:
        reason = f"{options.ranks} ranks need as many devices, and {held} are usable here"
        raise UsageError(
            reason, f"use --tp or --dp {held} at most, or start the ranks with torchrun"
        )
    return codes


def _check_data_parallel(options: EngineOptions, device: torch.device) -> None:
    """Raises QuantkitError for what ranks that each have requests of their own do not do."""
    if options.dp == 1:
        return
    unsupported = {
        "--tp": options.tp > 1,
        "--draft-length": options.draft_length,
        "--draft": options.draft,
        "--count-experts": options.count_experts,
    }
    if found := [name for name, given in unsupported.items() if given]:
        raise UsageError(
            f"--dp {options.dp} does not go with {', '.join(found)}", "give one or the other"
        )
    if device.type == "npu":
        raise UsageError("--dp is for CUDA and CPUs: on NPUs it was never run", "use --tp")
