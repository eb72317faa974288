"""The model that is calibrated, as its table tells it: units of work, layers, experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.calibrate.units import units_of
from quantkit.models.architecture import Architecture, ModelConfig
from quantkit.models.table import GatedMlp, Parameter, ScaleGroup, routed_experts


@dataclass(frozen=True)
class SourceModel:
    """rows: the architecture's table, resolved. quantized: modules that are rounded; frozen: those
    that the output holds packed as the
    source does. weights: where tensors are read."""

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
        """MTP layers, which come after them."""
        return sorted({row.layer for row in self.rows if row.layer is not None and row.mtp})

    @cached_property
    def groups(self) -> dict[int, list[ScaleGroup]]:
        """Scale groups of every layer."""
        return {
            layer: self.architecture.scale_groups(self.config, layer)
            for layer in [*self.layers, *self.mtp_layers]
        }

    @cached_property
    def units(self) -> dict[str, list[Parameter]]:
        """Units of work, see `units_of`."""
        return units_of(self.rows, [group for groups in self.groups.values() for group in groups])

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {row.name: row for row in self.rows}

    def sublayer_rows(self, unit: str, layer: int) -> tuple[list[Parameter], list[Parameter]]:
        """Of a sublayer: its own parameters but the routed experts', and those that it runs with: a
        decoder layer is built whole."""
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
        """Routed experts of one layer by number; empty without."""
        return routed_experts(self.rows, layer)
