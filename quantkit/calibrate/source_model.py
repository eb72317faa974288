"""The source model in calibration: work units, parameters in float32, layers and experts.

A unit is read, solved and written together, and can be found finished after a restart: one routed
expert, one sublayer of a decoder layer without its experts, or one large table.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint, check_finite
from quantkit.grids.base import Weight, dequantize
from quantkit.models.architecture import Architecture, ModelConfig
from quantkit.models.table import GatedMlp, Parameter, ScaleGroup, routed_experts


def attend_unit(layer: int) -> str:
    return f"layers.{layer}.attend"


def feed_forward_unit(layer: int) -> str:
    return f"layers.{layer}.feed_forward"


def expert_unit(layer: int, expert: int) -> str:
    return f"layers.{layer}.experts.{expert}"


def units_of(rows: Sequence[Parameter], groups: Iterable[ScaleGroup]) -> dict[str, list[Parameter]]:
    """Every parameter in exactly one unit, in the order of the table. `groups` are those of all
    layers. A norm belongs to the sublayer that reads it, because folding changes both together."""
    attention = {row.module for row in rows if row.block == "attention"}
    attention |= {group.producer for group in groups if attention.issuperset(group.consumers)}
    units: dict[str, list[Parameter]] = {}
    for row in rows:
        units.setdefault(_unit_of(row, attention), []).append(row)
    return units


def _unit_of(row: Parameter, attention: set[str]) -> str:
    if row.layer is None or row.role in ("embedding", "head"):
        return row.module
    if row.expert is not None:
        return expert_unit(row.layer, row.expert)
    if row.block == "attention" or row.module in attention:
        return attend_unit(row.layer)
    return feed_forward_unit(row.layer)


class ParameterReader:
    """Reads parameters of a checkpoint onto one device: decoded, float32, refused if not finite."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.holds = device.type != "cpu"
        """Whether stored tensors stay on the compute device: an accelerator has the memory, and is
        far from the page cache."""
        self._held: dict[str, Tensor] = {}
        self._kept: dict[str, Weight | None] = {}
        """Tensors named by `keep`, None until read."""

    def stored_bytes(self, row: Parameter) -> int:
        return sum(self.checkpoint.tensors[name].nbytes for name in self.parts(row))

    def dtype(self, row: Parameter) -> torch.dtype:
        """Dtype of the unquantized parameter: its own 16- or 32-bit type, BF16 for a packed
        source."""
        parts = self.parts(row)
        return self.checkpoint.tensors[parts[0]].dtype if parts == (row.name,) else torch.bfloat16

    def unquantized(self, row: Parameter) -> Tensor:
        """The parameter as it is stored unquantized, on the CPU."""
        parts = self.parts(row)
        value = (
            self.checkpoint.read(row.name)
            if parts == (row.name,)
            else dequantize(self.checkpoint.weight(row.module), torch.bfloat16)
        )
        check_finite(row.name, value)
        return value.to(self.dtype(row))

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
        """On the device; packed bytes are transferred, not float32."""
        packed = row.module in self.checkpoint.linears
        return (
            self.checkpoint.weight(row.module, self.device)
            if packed
            else self.checkpoint.read(row.name, self.device)
        )

    def keep(self, rows: Iterable[Parameter]) -> None:
        """On accelerators, cache these stored tensors from their first read on and drop others:
        those of a sublayer are read six times."""
        self._kept = dict.fromkeys(row.name for row in rows) if self.holds else {}

    def gain(self, row: Parameter) -> Tensor:
        """The factor of a norm, float32 on the device."""
        return self.dequantized(row) + row.gain_offset

    def will_read(self, rows: Iterable[Parameter]) -> None:
        """Prefetch parameters from disk."""
        for row in rows:
            for name in self.parts(row):
                self.checkpoint.prefetch(name, self.device)

    def blocks(self, row: Parameter, count: int) -> Iterator[Tensor]:
        """A matrix, `count` rows at a time, float32 on the device. Accelerators cache an unpacked
        one as stored: it is read twice a layer."""
        if self.holds and row.module not in self.checkpoint.linears:
            if row.name not in self._held:
                self._held[row.name] = self.checkpoint.read(row.name, self.device)
            yield from (rows.float() for rows in self._held[row.name].split(count))
            return
        for start in range(0, row.shape[0], count):
            stop = min(start + count, row.shape[0])
            weight, first = self.checkpoint.weight_slice(row.module, "N", start, stop, self.device)
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


@dataclass(frozen=True)
class SourceModel:
    """rows: the architecture's table, resolved. quantized: modules to quantize; frozen: modules
    that the output holds packed as in the source. weights: reads the tensors."""

    weights: ParameterReader
    architecture: Architecture[ModelConfig]
    config: ModelConfig
    rows: Sequence[Parameter]
    quantized: set[str]
    frozen: set[str]

    @cached_property
    def layers(self) -> list[int]:
        """Decoder layers."""
        return sorted({row.layer for row in self.rows if row.layer is not None and not row.mtp})

    @cached_property
    def mtp_layers(self) -> list[int]:
        """MTP layers, numbered after the decoder layers."""
        return sorted({row.layer for row in self.rows if row.layer is not None and row.mtp})

    @cached_property
    def groups(self) -> dict[int, list[ScaleGroup]]:
        """Scale groups of every layer; no scale passes through a rotation of inputs."""
        rotation = self.weights.checkpoint.input_rotation
        return {
            layer: [
                group
                for group in self.architecture.scale_groups(self.config, layer)
                if group.producer_is_norm or not any(map(rotation, group.consumers))
            ]
            for layer in [*self.layers, *self.mtp_layers]
        }

    @cached_property
    def units(self) -> dict[str, list[Parameter]]:
        """Work units, see `units_of`."""
        return units_of(self.rows, [group for groups in self.groups.values() for group in groups])

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {row.name: row for row in self.rows}

    def sublayer_rows(self, unit: str, layer: int) -> tuple[list[Parameter], list[Parameter]]:
        """The sublayer's own parameters without routed experts, and those it runs with: a decoder
        layer is built whole."""
        rows = [row for row in self.units[unit] if row.role != "mtp_proj"]
        own = {row.name for row in rows}
        inner = [
            row
            for row in self.layer_rows(layer)
            if row.expert is None and row.role not in ("embedding", "head", "mtp_proj")
        ]
        return rows, [row for row in inner if row.name in own or row.role != "linear"]

    def layer_rows(self, layer: int) -> list[Parameter]:
        """Parameters of one layer."""
        return [row for row in self.rows if row.layer == layer]

    def experts(self, layer: int) -> dict[int, GatedMlp]:
        """Routed experts of one layer by number; empty if it has none."""
        return routed_experts(self.rows, layer)
