"""The source's tensors as calibration wants them: decoded, in float32 on the device, refused if not
finite."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint, check_finite
from quantkit.grids.weights import Weight, dequantize
from quantkit.models.table import Parameter


class ParameterReader:
    """Reads parameters of one checkpoint onto one device."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.holds = device.type != "cpu"
        """Whether stored tensors stay where they are computed with: an accelerator's memory has
        room, and is far from the disk's cache."""
        self._held: dict[str, Tensor] = {}
        self._kept: dict[str, Weight | None] = {}
        """Of what `keep` named, by tensor name, what was read already."""

    def stored_bytes(self, row: Parameter) -> int:
        return sum(self.checkpoint.tensors[name].nbytes for name in self.parts(row))

    def dtype(self, row: Parameter) -> torch.dtype:
        """What the parameter is stored as when it is left unquantized: its own 16 or 32 bit type,
        BF16 for a packed source."""
        parts = self.parts(row)
        return self.checkpoint.tensors[parts[0]].dtype if parts == (row.name,) else torch.bfloat16

    def plain(self, row: Parameter) -> Tensor:
        """The parameter as it is stored unquantized, on the CPU."""
        parts = self.parts(row)
        value = (
            self.checkpoint.read(row.name)
            if parts == (row.name,)
            else dequantize(self.checkpoint.weight(row.module), torch.bfloat16)
        )
        check_finite(row.name, value)
        return value

    def dequantized(self, row: Parameter) -> Tensor:
        """float32 on the device."""
        kept = self._kept.get(row.name)
        if kept is not None:
            return dequantize(kept)
        stored = self._stored(row)
        value = dequantize(stored)
        check_finite(row.name, value)
        if row.name in self._kept and value is not stored:  # else a caller may change it
            self._kept[row.name] = stored
        return value

    def _stored(self, row: Parameter) -> Weight:
        """On the device: packed bytes travel, not float32."""
        packed = row.module in self.checkpoint.linears
        return (
            self.checkpoint.weight(row.module, self.device)
            if packed
            else self.checkpoint.read(row.name, self.device)
        )

    def keep(self, rows: Iterable[Parameter]) -> None:
        """Hold these where that is done, from when they are read on, as they are stored, and let go
        of others: those of a sublayer are asked for six times."""
        self._kept = dict.fromkeys(row.name for row in rows) if self.holds else {}

    def gain(self, row: Parameter) -> Tensor:
        """What a norm multiplies by, float32 on the device."""
        return self.dequantized(row) + row.gain_offset

    def will_read(self, rows: Iterable[Parameter]) -> None:
        """Parameters that are asked for next, to be brought from the disk meanwhile."""
        for row in rows:
            for name in self.parts(row):
                self.checkpoint.will_read(name, self.device)

    def blocks(self, row: Parameter, count: int) -> Iterator[Tensor]:
        """A matrix, `count` rows at a time, float32 on the device. An accelerator keeps it as it is
        stored, if not packed: it is asked for twice a layer."""
        if self.holds and row.module not in self.checkpoint.linears:
            if row.name not in self._held:
                self._held[row.name] = self.checkpoint.read(row.name, self.device)
            yield from (rows.float() for rows in self._held[row.name].split(count))
            return
        for start in range(0, row.shape[0], count):
            stop = min(start + count, row.shape[0])
            weight, first = self.checkpoint.share(row.module, "N", start, stop, self.device)
            yield dequantize(weight)[start - first : stop - first]

    def dequantized_all(self, rows: Iterable[Parameter]) -> dict[str, Tensor]:
        return {row.name: self.dequantized(row) for row in rows}

    def parts(self, row: Parameter) -> tuple[str, ...]:
        """Names of the stored tensors that hold the parameter."""
        return (
            self.checkpoint.parts(row.module)
            if row.module in self.checkpoint.linears
            else (row.name,)
        )
