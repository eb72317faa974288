"""CheckpointWriter: an output that can be killed at any moment and resumes to the same bytes.

OUT.partial/ holds the shards at their final size from the start, and every tensor has a fixed place
(header.py). A work unit, a few tensors such as one expert, is written in place and then entered in
the journal. A unit without an entry, or whose bytes do not match its entry, is written again.
Index, config and other files come last, and OUT.partial is renamed to OUT, so OUT only exists when
complete. Units are hashed and written by background threads, in order: memory is one unit plus at
most 512 MiB of queued ones. Several processes may write disjoint units of one output, each with
its own `rank`, and one of them finishes. Two runs cannot write the same output: each rank holds a
lock throughout.

Files have mode 0666 minus the umask.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from quantkit.checkpoint.header import (
    Layout,
    Shard,
    TensorInfo,
    TensorSpec,
    bytes_of,
    plan_layout,
    read_at,
    write_at,
)
from quantkit.checkpoint.journal import (
    Journal,
    JournalEntry,
    JournalReader,
    check_unlocked,
    lock_path,
)
from quantkit.checkpoint.output_dir import (
    MANIFEST,
    STATE,
    absolute,
    check_disjoint,
    check_disk,
    check_files,
    check_partial,
    check_run,
    check_target,
    file_entries,
    partial_path,
    register_files,
    remove_leftovers,
    replace_directory,
)
from quantkit.checkpoint.shards import Content, StoredTensor, digest_of, on_host, parts_of
from quantkit.checkpoint.source_guard import Digests, SourceGuard
from quantkit.common.atomic_write import new_file
from quantkit.common.errors import Interrupted, QuantkitError

_INDEX = "model.safetensors.index.json"
_CHUNK = 16 * 2**20
_READ_WRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
MAX_QUEUED = 512 * 2**20
"""Bytes of units that may be queued."""
_HASHERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Threads that hash units and their sources. One thread hashes 1.2 GB/s, and a MoE layer of R1, which a
GPU quantizes in ten seconds, is 17 GB with its source."""
_SYNC_SECONDS = 5.0  # work that a power failure may cost


class BackgroundWriter:
    """Runs jobs on its own thread.

    capacity: bytes that may be queued; a larger job waits until the queue is empty. An exception
    raised by a job is raised by the next call, and no further job runs.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._jobs = capacity, deque[tuple[Future[None], int]]()
        self._pool = ThreadPoolExecutor(1, "background-writer")
        self._failure: BaseException | None = None
        self._failure_raised = False

    def submit(self, job: Callable[[], None], nbytes: int) -> None:
        """Queue a job; blocks while the queue is full, and until the job has run where `nbytes`
        exceeds the capacity."""
        while self._jobs and sum(size for _, size in self._jobs) + nbytes > self._capacity:
            self._jobs.popleft()[0].result()
        self._check()
        self._jobs.append((self._pool.submit(self._run, job), nbytes))
        if nbytes > self._capacity:
            self.wait()

    def wait(self) -> None:
        """Block until every queued job has run."""
        while self._jobs:
            self._jobs.popleft()[0].result()
        self._check()

    def close(self) -> None:
        """Wait for all jobs and end the thread. A failure is raised only once."""
        try:
            if not self._failure_raised:
                self.wait()
        finally:
            self._pool.shutdown()

    def _check(self) -> None:
        if self._failure is not None:
            self._failure_raised = True
            raise self._failure

    def _run(self, job: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                job()
        except BaseException as failure:
            self._failure = failure


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes the tensors of `specs` to `out`, unit by unit.

    fingerprint: what determines the output (source, recipe, version); an unfinished output with
    another one is refused. overwrite: `out` may exist if quantkit wrote it, and is replaced when
    this output is complete; an unfinished output with another fingerprint is discarded. inputs:
    files and directories that must not be written to. guard: detects changes of the source. Raises
    QuantkitError before anything is written where `out` is not allowed or the disk is too small.
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
        guard: SourceGuard | None = None,
    ) -> None:
        self.out = absolute(out)
        self.partial = partial_path(self.out)
        self.layout: Layout = plan_layout(specs, shard_bytes)
        self._inputs, self._guard = tuple(inputs), guard
        self._state = self.partial / STATE
        self._verified: set[str] = set()
        self._unsynced: set[str] = set()
        self._synced_at = time.monotonic()
        self._run = {**fingerprint, "layout": self.layout.digest}
        prepare(self.out, self._inputs, rank)
        with _os_errors(self.out):
            check_target(self.out, self._run, overwrite)
            check_partial(self.partial)
            if not self.partial.exists():  # before a run without enough room creates anything
                check_disk(self.partial.parent, sum(shard.size for shard in self.layout.shards))
            self._state.mkdir(parents=True, exist_ok=True)
            with _locked(self._state / "setup.lock"):
                # Again: another run may have finished meanwhile.
                check_target(self.out, self._run, overwrite)
                check_files(self.partial)
                check_run(self.partial, self._run, rank, discard=overwrite)
                self._create_shards()
                self._journal = Journal(self._state, rank, self._run)
            # Opened here: units are read by this thread while the background thread writes others.
            self._descriptors = {
                shard.name: os.open(self.partial / shard.name, _READ_WRITE)
                for shard in self.layout.shards
            }
            self._journals = JournalReader(self._state)
            self._entries = self._journals.read_new()
        self._background = BackgroundWriter(MAX_QUEUED)
        self._hashing = ThreadPoolExecutor(_HASHERS, "source hash")
        self._queued: set[str] = set()

    def is_done(self, unit: str) -> bool:
        """Whether the unit was written, by this or an earlier run, and its stored bytes are still
        intact."""
        self._wait_for(unit)
        entry = self._entries.get(unit)
        if entry is None:
            return False
        if unit not in self._verified:
            if self._hash_stored(entry) != entry.sha256:
                del self._entries[unit]
                return False
            self._verified.add(unit)
        return True

    def facts(self, unit: str) -> dict[str, Any]:
        """The facts that were passed with a finished unit."""
        self._wait_for(unit)
        return self._entries[unit].facts

    def refresh(self) -> None:
        """Read which units other ranks have written meanwhile. Their bytes, of this run, are not
        verified again."""
        self.wait()
        new = self._journals.read_new()
        self._entries |= new
        self._verified |= new.keys()

    def read(self, unit: str) -> dict[str, Tensor]:
        """The tensors of a finished unit, as stored."""
        self._wait_for(unit)
        tensors = {}
        for name in self._entries[unit].tensors:
            info = self.layout.tensors[name]
            tensors[name] = torch.empty(info.shape, dtype=info.dtype)
            read_at(self._descriptors[info.shard], bytes_of(tensors[name]), info.offset)
        return tensors

    @property
    def state_dir(self) -> Path:
        """Directory for a run's own resume state; removed when the output is complete."""
        return self._state

    def write(
        self, unit: str, tensors: Mapping[str, Content], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Queue a unit's tensors, with their current values, to be written and entered in the
        journal; from then on killing this process does not lose it. Raises QuantkitError where this
        or an earlier unit could not be written, at the latest from `wait`."""
        for name, tensor in tensors.items():
            info = self.layout.tensors[name]
            assert tensor.dtype == info.dtype, f"{name} is {tensor.dtype}, planned {info.dtype}"
            assert tuple(tensor.shape) == info.shape, (
                f"{name} is {tuple(tensor.shape)}, planned {info.shape}"
            )
        nbytes = sum(tensor.nbytes for tensor in tensors.values() if isinstance(tensor, Tensor))
        # Queued tensors are copied, because the caller may change its own; a unit too large to be
        # queued is written before this returns and needs no copy.
        host_tensors = {
            name: tensor
            if isinstance(tensor, StoredTensor)
            else on_host(tensor.detach(), nbytes <= MAX_QUEUED)
            for name, tensor in tensors.items()
        }
        self._queued.add(unit)
        digest = self._hashing.submit(digest_of, host_tensors)
        source = (
            self._hashing.submit(self._guard.digests, unit) if self._guard is not None else None
        )
        self._background.submit(
            lambda: self._write(unit, host_tensors, dict(facts or {}), digest, source), nbytes
        )

    def run_after(self, job: Callable[[], None]) -> None:
        """Run `job` on the background thread when all units so far are written. Raises as `write`
        does."""

        def guarded() -> None:
            with _os_errors(self.out):
                job()

        self._background.submit(guarded, 0)

    def wait(self) -> None:
        """Block until all units are written."""
        self._background.wait()
        self._queued.clear()

    def _wait_for(self, unit: str) -> None:
        if unit in self._queued:
            self.wait()

    def _write(
        self,
        unit: str,
        host_tensors: dict[str, Content],
        facts: dict[str, Any],
        digest: Future[str],
        source: Future[Digests] | None,
    ) -> None:
        with _os_errors(self.out):
            for name, tensor in host_tensors.items():
                info = self.layout.tensors[name]
                offset, file = info.offset, self._descriptors[info.shard]
                for part in parts_of(tensor):
                    write_at(file, part, offset)
                    offset += len(part)
            entry = JournalEntry(
                unit,
                tuple(sorted(host_tensors)),
                digest.result(),
                facts,
                source.result() if source else {},
            )
            self._journal.append(entry)
            self._unsynced |= {self.layout.tensors[name].shard for name in host_tensors}
            if time.monotonic() - self._synced_at > _SYNC_SECONDS:
                self._sync()
        self._entries[unit] = entry
        self._verified.add(unit)

    def finish(
        self,
        config: Mapping[str, Any],
        extra: Mapping[str, bytes],
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        """Write index, config.json, `extra` files and the manifest, and rename OUT.partial to OUT.
        Every planned tensor must be written.

        With several processes, one calls this after all have written their units and closed.
        """
        self.refresh()
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
        with _os_errors(self.out):
            register_files(self.partial, files)
            for name, content in files.items():
                assert Path(name).name == name, name
                with new_file(self.partial / name) as file:
                    file.write(content)
            check_disjoint(self.out, self._inputs)
            self._flush()
            replace_directory(self.partial, self.out, STATE)
        self.close()

    def check_source(self) -> None:
        """Raise QuantkitError naming a source shard that differs from what finished units were
        computed from."""
        if self._guard is not None:
            self._guard.check(
                self._state / "source.json",
                {unit: entry.source for unit, entry in self._entries.items()},
            )

    def progress(self, units: Collection[str]) -> str:
        """How many of `units` are written, by this and other processes, as a text; empty if none
        is."""
        number = len(JournalReader(self._state).read_new().keys() & set(units))
        return f"{number} of {len(units)} units are done" if number else ""

    @contextmanager
    def report_interrupt(self, units: Collection[str]) -> Iterator[None]:
        """On KeyboardInterrupt in the block: close, and raise Interrupted with how many of `units`
        are done and where they are kept."""
        try:
            yield
        except KeyboardInterrupt as stop:
            self.close()
            raise Interrupted(
                f"{self.progress(units) or 'no unit is done'}, kept in {self.partial}"
                if self._state.exists()
                else f"{self.out} is complete"
            ) from stop

    def _manifest(self, files: Mapping[str, bytes], more: Mapping[str, Any]) -> bytes:
        listed = file_entries({shard.name: shard.size for shard in self.layout.shards}, files)
        sources = {
            unit: entry.source for unit, entry in sorted(self._entries.items()) if entry.source
        }
        manifest = {"run": self._run, "files": listed, "sources": sources, **more}
        return json.dumps(manifest, indent=1).encode() + b"\n"

    def _flush(self) -> None:
        self._background.close()
        if self._unsynced:
            self._sync()

    def close(self) -> None:
        """Flush to disk and release files and lock; what was written stays for another run to
        resume."""
        try:
            self._flush()
        finally:
            self._hashing.shutdown(cancel_futures=True)
            self._journal.close()
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _sync(self) -> None:
        for shard in self._unsynced:
            os.fsync(self._descriptors[shard])
        self._journal.sync()
        self._unsynced.clear()
        self._synced_at = time.monotonic()

    def _create_shards(self) -> None:
        missing = [
            shard
            for shard in self.layout.shards
            if not _is_intact(self.partial / shard.name, shard)
        ]
        check_disk(self.partial.parent, sum(shard.size for shard in missing))
        register_files(self.partial, (shard.name for shard in self.layout.shards))
        for shard in missing:
            with new_file(self.partial / shard.name) as file:
                _allocate(file.fileno(), shard.size)
                file.write(shard.header)

    def _hash_stored(self, entry: JournalEntry) -> str:
        digest = hashlib.sha256()
        for name in sorted(entry.tensors):
            for chunk in _stored_chunks(
                self._descriptors[self.layout.tensors[name].shard], self.layout.tensors[name]
            ):
                digest.update(chunk)
        return digest.hexdigest()


def prepare(out: Path, inputs: Iterable[Path] = (), rank: int = 0) -> None:
    """Raise QuantkitError where `out` overlaps an input, or another process writes it; finish the
    cleanup of a run that was killed at its end."""
    out = absolute(out)
    with _os_errors(out):
        check_disjoint(out, inputs)
        for directory in (partial_path(out), out):
            check_unlocked(lock_path(directory / STATE, rank), out)
        if rank == 0:
            remove_leftovers(partial_path(out), out, STATE)


def _stored_chunks(descriptor: int, info: TensorInfo) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_CHUNK, info.nbytes)))
    for start in range(0, info.nbytes, _CHUNK):
        chunk = buffer[: min(_CHUNK, info.nbytes - start)]
        yield chunk[: read_at(descriptor, chunk, info.offset + start)]


def _is_intact(path: Path, shard: Shard) -> bool:
    if not path.exists() or path.stat().st_size != shard.size:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.header)) == shard.header


def _allocate(descriptor: int, nbytes: int) -> None:
    """Reserve the space now, so that the disk does not fill up midway; a file system that cannot
    reserve gets a sparse file."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, nbytes)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Serializes setup between processes. The lock is released when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _os_errors(out: Path) -> Iterator[None]:
    """Turn file system errors into a one-line QuantkitError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuantkitError(
                f"the disk is full while writing {out}",
                "free some space and run the same command: it resumes",
            ) from error
        raise QuantkitError(
            f"cannot write {out}: {error.strerror}",
            "fix that and run the same command: it resumes",
        ) from error
    except SafetensorError as error:  # safetensors wraps OSError
        raise QuantkitError(
            f"cannot write {out}: {error}", "fix that and run the same command: it resumes"
        ) from error
