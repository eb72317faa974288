"""Detects changes of the source checkpoint during a run and before a resumed run continues.

`Checkpoint.fingerprint` samples the contents and misses small changes. So the journal records, for
every work unit, the hash of the bytes it was computed from. If a shard's time, size or inode
changed, the units computed from it are verified: a shard that was downloaded again matches, one
that was edited is reported.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.header import TensorInfo, read_at
from quantkit.checkpoint.output_dir import MANIFEST
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.atomic_write import new_file
from quantkit.common.errors import QuantkitError

Stamp = list[int]
"""Size, inode, and the times of the last content and metadata change in ns."""
Digests = dict[str, str]
"""sha256 by shard."""
_CHUNK = 2**20


class SourceGuard:
    """Guards the shards of a checkpoint from its construction on.

    units: the source tensors of each work unit, by unit name. early_units: units that others depend
    on before they are written, such as the embedding.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        units: Mapping[str, Iterable[str]],
        early_units: Iterable[str] = (),
    ) -> None:
        self.path = checkpoint.path
        self._early_units = tuple(early_units)
        self.set_units(checkpoint, units)
        self._stamps = self._stat({info.shard for info in checkpoint.tensors.values()})

    def set_units(self, checkpoint: Checkpoint, units: Mapping[str, Iterable[str]]) -> None:
        """Replace the source tensors of the units, within the same shards."""
        self._parts = {
            unit: _by_shard(info for name in names for info in checkpoint.stored(name))
            for unit, names in units.items()
        }

    def digests(self, unit: str) -> Digests:
        """sha256 of the bytes that the unit is computed from. Raises QuantkitError where a shard
        changed since the guard was created."""
        parts = self._parts[unit]
        digests = {shard: self._hash(shard, infos) for shard, infos in parts.items()}
        for shard, now in self._stat(parts).items():
            before = self._stamps[shard]
            if before[:3] != now[:3]:
                how = "became shorter" if now[0] < before[0] else "changed"
                raise QuantkitError(
                    f"{self.path / shard} {how} while it was read",
                    "restore that file and run again",
                )
        return digests

    def check(self, record: Path, unit_digests: Mapping[str, Digests]) -> None:
        """`verify` the shards that changed since the last check recorded in `record`, then update
        `record`."""
        before = json.loads(record.read_text()) if record.exists() else {"stamps": {}, "ahead": {}}
        stamps = self._stat(self._stamps)
        self.verify(
            {shard for shard, stamp in stamps.items() if before["stamps"].get(shard) != stamp},
            {**before["ahead"], **unit_digests},
        )
        now = {
            "stamps": stamps,
            "ahead": before["ahead"] or {unit: self.digests(unit) for unit in self._early_units},
        }
        if before != now:
            with new_file(record) as file:
                file.write(json.dumps(now).encode())

    def verify(self, shards: Collection[str], unit_digests: Mapping[str, Digests]) -> None:
        """Hash `shards` again. Raises QuantkitError naming one that differs from what the units in
        `unit_digests` were computed from."""
        for unit, digests in unit_digests.items():
            for shard in sorted(digests.keys() & shards):
                if self._hash(shard, self._parts[unit][shard]) != digests[shard]:
                    raise QuantkitError(
                        f"{self.path / shard} was changed after {unit} was made from it",
                        "restore that file, or give --overwrite to start anew",
                    )

    def verify_output(self, out: Path, manifest: Mapping[str, Any]) -> None:
        """`verify` the shards that were touched since the complete output `out` was written."""
        written = (out / MANIFEST).stat().st_mtime_ns
        changed = {
            shard for shard, stamp in self._stat(self._stamps).items() if max(stamp[2:]) >= written
        }
        self.verify(changed, manifest["sources"])

    def _stat(self, shards: Iterable[str]) -> dict[str, Stamp]:
        return file_stamps(self.path, shards)

    def _hash(self, shard: str, infos: Iterable[TensorInfo]) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        with (self.path / shard).open("rb", buffering=0) as file:
            for info in infos:
                for start in range(0, info.extent, _CHUNK):
                    chunk = buffer[: min(_CHUNK, info.extent - start)]
                    digest.update(chunk[: read_at(file.fileno(), chunk, info.offset + start)])
        return digest.hexdigest()


def file_stamps(path: Path, shards: Iterable[str]) -> dict[str, Stamp]:
    """Stamps that change when a shard of the folder `path` is written to. Raises QuantkitError
    where one is missing."""
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
