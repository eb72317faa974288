"""Whether a source is still what it was while it is read, and when a run goes on.

Samples of the contents tell one source from another (`Checkpoint.fingerprint`), and miss a small
change. So every unit of an output is entered in the journal with the hash of the bytes that it was
made from. Where the time, the size or the inode of a shard is another one, the units that were made
from it are held against it: a shard that was downloaded again is the same, one that was edited is
named.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.header import TensorInfo, read_at
from quantkit.checkpoint.manifest import MANIFEST
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError

Stamp = list[int]
"""Size, inode, time of the last change of the content, and of anything about the file, in ns."""
Digests = dict[str, str]
"""sha256 by shard."""
_CHUNK = 2**20


class Watch:
    """Watches the shards of a checkpoint from now on.

    units: the tensors that each unit of an output is made from, by the unit's name. ahead: units on
    which others depend before they are written, such as the embedding.
    """

    def __init__(
        self, checkpoint: Checkpoint, units: Mapping[str, Iterable[str]], ahead: Iterable[str] = ()
    ) -> None:
        self.path = checkpoint.path
        self._ahead = tuple(ahead)
        self._parts = {
            unit: _by_shard(checkpoint.stored(name) for name in names)
            for unit, names in units.items()
        }
        self._stamps = self._stamped({info.shard for info in checkpoint.tensors.values()})

    def follow(self, checkpoint: Checkpoint, units: Mapping[str, Iterable[str]]) -> None:
        """The units are made from other tensors of the same shards."""
        self._parts = {
            unit: _by_shard(checkpoint.stored(name) for name in names)
            for unit, names in units.items()
        }

    def digests(self, unit: str) -> Digests:
        """sha256 of the bytes that the unit is made from. Raises QuantkitError where their shard
        changed since the watch began."""
        parts = self._parts[unit]
        digests = {shard: self._hash(shard, infos) for shard, infos in parts.items()}
        for shard, now in self._stamped(parts).items():
            before = self._stamps[shard]
            if before[:3] != now[:3]:
                how = "became shorter" if now[0] < before[0] else "changed"
                raise QuantkitError(
                    f"{self.path / shard} {how} while it was read",
                    "restore that file and run again",
                )
        return digests

    def check(self, record: Path, made: Mapping[str, Digests]) -> None:
        """`compare` the shards that changed since the last check, which `record` tells of, and tell
        of this one there."""
        before = json.loads(record.read_text()) if record.exists() else {"stamps": {}, "ahead": {}}
        stamps = self._stamped(self._stamps)
        self.compare(
            {shard for shard, stamp in stamps.items() if before["stamps"].get(shard) != stamp},
            {**before["ahead"], **made},
        )
        now = {
            "stamps": stamps,
            "ahead": before["ahead"] or {unit: self.digests(unit) for unit in self._ahead},
        }
        if before != now:
            fresh = record.with_suffix(".new")
            fresh.write_text(json.dumps(now))
            fresh.rename(record)

    def compare(self, shards: Collection[str], made: Mapping[str, Digests]) -> None:
        """Raise QuantkitError naming one of `shards` that is not what the units in `made` were made
        from. Reads those shards."""
        for unit, digests in made.items():
            for shard in sorted(digests.keys() & shards):
                if self._hash(shard, self._parts[unit][shard]) != digests[shard]:
                    raise QuantkitError(
                        f"{self.path / shard} was changed after {unit} was made from it",
                        "restore that file, or give --overwrite to start anew",
                    )

    def compare_with(self, out: Path, manifest: Mapping[str, Any]) -> None:
        """`compare` the shards about which anything changed since the complete output `out` was
        written."""
        written = (out / MANIFEST).stat().st_mtime_ns
        changed = {
            shard
            for shard, stamp in self._stamped(self._stamps).items()
            if max(stamp[2:]) >= written
        }
        self.compare(changed, manifest["sources"])

    def _stamped(self, shards: Iterable[str]) -> dict[str, Stamp]:
        return stamped(self.path, shards)

    def _hash(self, shard: str, infos: Iterable[TensorInfo]) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        with (self.path / shard).open("rb", buffering=0) as file:
            for info in infos:
                for start in range(0, info.extent, _CHUNK):
                    chunk = buffer[: min(_CHUNK, info.extent - start)]
                    digest.update(chunk[: read_at(file.fileno(), chunk, info.offset + start)])
        return digest.hexdigest()


def stamped(path: Path, shards: Iterable[str]) -> dict[str, Stamp]:
    """What tells that a shard of the folder `path` was written to. Raises QuantkitError where one
    is missing."""
    stamps = {}
    for shard in sorted(shards):
        try:
            found = (path / shard).stat()
        except OSError as error:
            raise QuantkitError(
                f"shard {shard} is missing from {path}", "restore that file and run again"
            ) from error
        stamps[shard] = [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
    return stamps


def _by_shard(infos: Iterable[TensorInfo]) -> dict[str, list[TensorInfo]]:
    parts: dict[str, list[TensorInfo]] = {}
    for info in sorted(infos, key=lambda info: info.name):
        parts.setdefault(info.shard, []).append(info)
    return parts
