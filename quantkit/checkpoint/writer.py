"""CheckpointWriter: an output that may be killed at any moment and goes on where it was, to the
same bytes.

OUT.partial/ holds the shards at their final size from the start; every tensor has its place
(layout.py). A unit, a handful of tensors such as one expert, is written in place, then entered in
the journal; a unit that is not there, or whose bytes are not those of its entry, is simply written
again. Index, config and other files come last, and OUT.partial is renamed to OUT: OUT exists only
complete. Units are hashed and written behind the back of who makes them, in their order: memory is
one unit, and up to 512 MiB of units that wait. Several processes may write disjoint units of one
output, each with its own `rank`; one of
them finishes. Two runs cannot: each rank holds a lock from beginning to end.

Files are made with mode 0666 less the umask, as any program's are.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from quantkit.checkpoint.background_writer import BackgroundWriter
from quantkit.checkpoint.header import TensorInfo, TensorSpec, bytes_of, read_at, write_at
from quantkit.checkpoint.host_memory import host_memory
from quantkit.checkpoint.journal import Journal, JournalEntry, Journals, lock_path
from quantkit.checkpoint.layout import Layout, Shard, plan_layout
from quantkit.checkpoint.lock import check_free
from quantkit.checkpoint.manifest import MANIFEST, list_files
from quantkit.checkpoint.output_dir import absolute, check_apart, partial_of
from quantkit.checkpoint.output_swap import remove_leftovers, replace_directory
from quantkit.checkpoint.source_guard import Digests, Watch
from quantkit.checkpoint.unfinished import (
    STATE,
    check_files,
    check_partial,
    check_run,
    check_target,
    note_files,
)
from quantkit.common.errors import Interrupted, QuantkitError
from quantkit.common.sizes import format_bytes

_INDEX = "model.safetensors.index.json"
_CHUNK = 16 * 2**20
_READ_WRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
WAITING = 512 * 2**20
"""Bytes of units that may wait to be written."""
_PINNED = 128 * 2**20
"""Bytes of the largest tensor of a device for which page-locked memory is kept."""
_HASHERS = max(1, min(4, (os.cpu_count() or 1) // 16))
"""Threads that hash units and what they are made from. One is behind a GPU."""
_SYNC_SECONDS = 5.0  # how much work a power failure may cost


class CheckpointWriter:
    """Writes the tensors of `specs` to `out`, unit by unit.

    fingerprint: what determines the output (source, recipe, version); an unfinished output with
    another one is refused.
    overwrite: `out` may exist, if quantkit made it, and is replaced when this output is complete;
    an unfinished output with another fingerprint is discarded. inputs: files and directories that
    must not be written to. watch: tells when the source changes. Raises QuantkitError before
    anything is written if `out` may not be made or the disk is too small.
    """

    def __init__(
        self,
        out: Path,
        specs: Sequence[TensorSpec],
        *,
        fingerprint: Mapping[str, str],
        overwrite: bool,
        shard_bytes: int = 5_000_000_000,
        rank: int = 0,
        inputs: Iterable[Path] = (),
        watch: Watch | None = None,
    ) -> None:
        self.out = absolute(out)
        self.partial = partial_of(self.out)
        self.layout: Layout = plan_layout(specs, shard_bytes)
        self._inputs, self._watch = tuple(inputs), watch
        self._state = self.partial / STATE
        self._checked: set[str] = set()
        self._unsynced: set[str] = set()
        self._synced_at = time.monotonic()
        self._run = {**fingerprint, "layout": self.layout.digest}
        prepare(self.out, self._inputs, rank)
        with _told(self.out):
            check_target(self.out, self._run, overwrite)
            check_partial(self.partial)
            if not self.partial.exists():  # nothing is left of a run that has no room
                _check_disk(self.partial.parent, sum(shard.size for shard in self.layout.shards))
            self._state.mkdir(parents=True, exist_ok=True)
            with _locked(self._state / "setup.lock"):
                check_target(
                    self.out, self._run, overwrite
                )  # again: another run may have finished meanwhile
                check_files(self.partial)
                check_run(self.partial, self._run, rank, discard=overwrite)
                self._create_shards()
                self._journal = Journal(self._state, rank, self._run)
            # All at once: units are read here and written elsewhere at the same time.
            self._descriptors = {
                shard.name: os.open(self.partial / shard.name, _READ_WRITE)
                for shard in self.layout.shards
            }
            self._journals = Journals(self._state)
            self._entries = self._journals.more()
        self._background = BackgroundWriter(WAITING)
        self._hashing = ThreadPoolExecutor(_HASHERS, "source hash")
        self._waiting: set[str] = set()

    def done(self, unit: str) -> bool:
        """Whether the unit was written, by this or an earlier run, and its bytes are still what was
        written."""
        self._written(unit)
        entry = self._entries.get(unit)
        if entry is None:
            return False
        if unit not in self._checked:
            if self._hash_stored(entry) != entry.sha256:
                del self._entries[unit]
                return False
            self._checked.add(unit)
        return True

    def note(self, unit: str) -> dict[str, Any]:
        """The facts that were given with a finished unit."""
        self._written(unit)
        return self._entries[unit].facts

    def reread(self) -> None:
        """Learn what other ranks have written since."""
        self.settle()
        self._entries |= self._journals.more()

    def read(self, unit: str) -> dict[str, Tensor]:
        """The tensors of a finished unit, as they were written."""
        self._written(unit)
        tensors = {}
        for name in self._entries[unit].tensors:
            info = self.layout.tensors[name]
            tensors[name] = torch.empty(info.shape, dtype=info.dtype)
            read_at(self._descriptors[info.shard], bytes_of(tensors[name]), info.offset)
        return tensors

    @property
    def state_dir(self) -> Path:
        """Where a run may keep what it needs to go on after a kill; gone when the output is
        complete."""
        return self._state

    def write(
        self, unit: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Have a unit's tensors, as they are now, written in their places and the unit entered in
        the journal; from then on no kill of this process undoes it. Raises QuantkitError where this
        or an earlier unit could not be written, at the latest from `settle`."""
        for name, tensor in tensors.items():
            info = self.layout.tensors[name]
            assert tensor.dtype == info.dtype, f"{name} is {tensor.dtype}, planned {info.dtype}"
            assert tuple(tensor.shape) == info.shape, (
                f"{name} is {tuple(tensor.shape)}, planned {info.shape}"
            )
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        # What waits must not change when its maker goes on; what is too large to wait is not held
        # twice.
        held = {
            name: _on_host(tensor.detach(), nbytes <= WAITING) for name, tensor in tensors.items()
        }
        self._waiting.add(unit)
        own = self._hashing.submit(_digest, held)
        source = (
            self._hashing.submit(self._watch.digests, unit) if self._watch is not None else None
        )
        self._background.hand_over(
            lambda: self._write(unit, held, dict(facts or {}), own, source), nbytes
        )

    def afterwards(self, job: Callable[[], None]) -> None:
        """Have `job` done when all units so far are written. Raises as `write` does."""

        def told() -> None:
            with _told(self.out):
                job()

        self._background.hand_over(told, 0)

    def settle(self) -> None:
        """Returns when all units are written."""
        self._background.settle()
        self._waiting.clear()

    def _written(self, unit: str) -> None:
        if unit in self._waiting:
            self.settle()

    def _write(
        self,
        unit: str,
        held: dict[str, Tensor],
        facts: dict[str, Any],
        own: Future[str],
        source: Future[Digests] | None,
    ) -> None:
        with _told(self.out):
            for name, tensor in held.items():
                write_at(
                    self._descriptors[self.layout.tensors[name].shard],
                    bytes_of(tensor),
                    self.layout.tensors[name].offset,
                )
            entry = JournalEntry(
                unit, tuple(sorted(held)), own.result(), facts, source.result() if source else {}
            )
            self._journal.append(entry)
            self._unsynced |= {self.layout.tensors[name].shard for name in held}
            if time.monotonic() - self._synced_at > _SYNC_SECONDS:
                self._sync()
        self._entries[unit] = entry
        self._checked.add(unit)

    def finish(
        self,
        config: Mapping[str, Any],
        extra: Mapping[str, bytes],
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        """Write index, config.json, `extra` files and the manifest, and turn OUT.partial into OUT.
        Every planned tensor must be written.

        With several processes: one calls this, when all have written their units and closed.
        """
        self.reread()
        self.check_source()
        written = {name for entry in self._entries.values() for name in entry.tensors}
        assert written == self.layout.tensors.keys(), (
            f"never written: {sorted(self.layout.tensors.keys() - written)[:5]}"
        )
        index = {
            "metadata": {"total_size": self.layout.total_size},
            "weight_map": {
                name: self.layout.tensors[name].shard for name in sorted(self.layout.tensors)
            },
        }
        files = {_INDEX: _json(index), "config.json": _json(config), **extra}
        files[MANIFEST] = self._manifest(files, manifest or {})
        with _told(self.out):
            note_files(self.partial, files)
            for name, content in files.items():
                assert Path(name).name == name, name
                _write_file(self.partial / name, content)
            check_apart(self.out, self._inputs)
            self._flush()
            replace_directory(self.partial, self.out, STATE)
        self.close()

    def check_source(self) -> None:
        """Raise QuantkitError naming a shard of the source that is no longer what finished units
        were made from."""
        if self._watch is not None:
            self._watch.check(
                self._state / "source.json",
                {unit: entry.source for unit, entry in self._entries.items()},
            )

    def finished(self, units: Collection[str]) -> str:
        """How many of `units` are written, by this and other processes, in words; empty if none
        is."""
        number = len(Journals(self._state).more().keys() & set(units))
        return f"{number} of {len(units)} units are done" if number else ""

    @contextmanager
    def keeping(self, units: Collection[str]) -> Iterator[None]:
        """Where the block is interrupted, close and raise Interrupted: of these units, what is kept
        and where."""
        try:
            yield
        except KeyboardInterrupt as stop:
            self.close()
            kept = (
                f"{self.finished(units) or 'no unit is done'}, kept in {self.partial}"
                if self._state.exists()
                else f"{self.out} is complete"
            )
            raise Interrupted(kept) from stop

    def _manifest(self, files: Mapping[str, bytes], more: Mapping[str, Any]) -> bytes:
        listed = list_files({shard.name: shard.size for shard in self.layout.shards}, files)
        sources = {
            unit: entry.source for unit, entry in sorted(self._entries.items()) if entry.source
        }
        return (
            json.dumps(
                {"run": self._run, "files": listed, "sources": sources, **more}, indent=1
            ).encode()
            + b"\n"
        )

    def _flush(self) -> None:
        self._background.close()
        if self._unsynced:
            self._sync()

    def close(self) -> None:
        """Flush to disk and release files and lock; what was written stays, for another run to go
        on with."""
        try:
            self._flush()
        finally:
            self._hashing.shutdown(cancel_futures=True)
            self._journal.close()
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _sync(self) -> None:
        for shard in self._unsynced:
            os.fsync(self._descriptors[shard])
        self._journal.sync()
        self._unsynced.clear()
        self._synced_at = time.monotonic()

    def _create_shards(self) -> None:
        missing = [
            shard for shard in self.layout.shards if not _intact(self.partial / shard.name, shard)
        ]
        _check_disk(self.partial.parent, sum(shard.size for shard in missing))
        note_files(self.partial, (shard.name for shard in self.layout.shards))
        for shard in missing:
            fresh = self.partial / f"{shard.name}.new"
            with _created(fresh) as file:
                _allocate(file.fileno(), shard.size)
                file.write(shard.header)
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(self.partial / shard.name)

    def _hash_stored(self, entry: JournalEntry) -> str:
        digest = hashlib.sha256()
        for name in sorted(entry.tensors):
            for chunk in _stored_chunks(
                self._descriptors[self.layout.tensors[name].shard], self.layout.tensors[name]
            ):
                digest.update(chunk)
        return digest.hexdigest()


def prepare(out: Path, inputs: Iterable[Path] = (), rank: int = 0) -> None:
    """Raise QuantkitError where `out` is not apart from the inputs, or another process writes it;
    clear up what a kill left to do."""
    out = absolute(out)
    with _told(out):
        check_apart(out, inputs)
        for directory in (partial_of(out), out):
            check_free(lock_path(directory / STATE, rank), out)
        if rank == 0:
            remove_leftovers(partial_of(out), out, STATE)


def _on_host(tensor: Tensor, copy: bool) -> Tensor:
    """Contiguous; of a device's, in memory that such tensors take turns in. copy: also of what is
    on the host."""
    if tensor.device.type == "cpu" or tensor.nbytes > _PINNED:
        return tensor.to("cpu", copy=copy).contiguous()
    return host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the tensors' bytes in order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def _stored_chunks(descriptor: int, info: TensorInfo) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_CHUNK, info.nbytes)))
    for start in range(0, info.nbytes, _CHUNK):
        chunk = buffer[: min(_CHUNK, info.nbytes - start)]
        yield chunk[: read_at(descriptor, chunk, info.offset + start)]


def _check_disk(folder: Path, needed: int) -> None:
    """folder: may not be there yet."""
    free = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
    if needed > free:
        fault = f"{folder} has {format_bytes(free)} free and the output needs {format_bytes(needed)} more"
        raise QuantkitError(fault, f"free {format_bytes(needed - free)}, or choose another --out")


def _intact(path: Path, shard: Shard) -> bool:
    if not path.exists() or path.stat().st_size != shard.size:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.header)) == shard.header


def _allocate(descriptor: int, format_bytes: int) -> None:
    """Reserve the space now, so that the disk does not fill in the middle; a file system that
    cannot gets a sparse file."""
    try:
        os.posix_fallocate(descriptor, 0, format_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, format_bytes)


def _write_file(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with _created(fresh) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def _created(path: Path) -> IO[bytes]:
    """A new file, in place of what had the name: never written through a link."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Setting up is one process at a time. The lock goes with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _told(out: Path) -> Iterator[None]:
    """Faults of the file system as one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuantkitError(
                f"the disk is full while writing {out}",
                "free some space and run the same command: it goes on",
            ) from error
        raise QuantkitError(
            f"cannot write {out}: {error.strerror}",
            "mend that and run the same command: it goes on",
        ) from error
    except SafetensorError as error:  # what its writer makes of an OSError
        raise QuantkitError(
            f"cannot write {out}: {error}", "mend that and run the same command: it goes on"
        ) from error
