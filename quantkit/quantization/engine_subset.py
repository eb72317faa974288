"""A format as one engine wants it: fewer modules quantized, and the engine's own keys in the config
block."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.header import TensorSpec
from quantkit.engines.choice import FormatChoice, MixtureChoice
from quantkit.grids.schemes import Grid
from quantkit.models.table import Parameter


def narrowed(
    target: Format, choice: FormatChoice | MixtureChoice, rows: Iterable[Parameter]
) -> Format:
    """`target`, quantizing only the rows that `choice` allows."""
    return cast(Format, _Narrowed(target, choice, rows))


class _Narrowed:
    def __init__(
        self, target: Format, choice: FormatChoice | MixtureChoice, rows: Iterable[Parameter]
    ) -> None:
        self._target, self._keys = target, choice.quantization_config
        self._allowed = {row.module for row in rows if choice.quantizes(row)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return module in self._allowed and self._target.quantizes(module, role, mtp=mtp)

    def config_block(
        self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]
    ) -> dict[str, Any]:
        block = self._target.config_block(grid, quantized, plain)
        return {**block, **self._keys} if block else block
