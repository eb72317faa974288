"""Checkpoints whose description says, module by module, which format and grid a linear is on. Read
only.

A `Declared` is made for one checkpoint (`Format.of_checkpoint`). The description decides, because
tensors alone do not: int32 words hold four codes or eight, zero points are stored with or without
their minus one. Tensors that are not what is described are refused.
"""

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    Format,
    Grids,
    Ignored,
    Json,
    Parts,
    Shape,
    Specs,
    Tensors,
    Unquantized,
)
from quantkit.checkpoint.header import TensorSpec
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, Weight, grid_label
from quantkit.grids.names import CacheCodes


@dataclass(frozen=True)
class DeclaredFormat:
    """The format that a linear is stored in, and its grid there, None where the format has only
    one."""

    format: Format
    grid: Grid | None


Placed = Callable[[str], DeclaredFormat | None]
"""A module's placement; None: it is described as unquantized."""


class Description(Format):
    """A description that no linear is stored by: what it says becomes a `Declared`."""

    members: ClassVar[tuple[Format, ...]]

    @abstractmethod
    def placed(self, config: Json, side: Json) -> Placed:
        """What a checkpoint's description says. Raises QuantkitError where it is not read."""

    def of_checkpoint(self, config: Json, side: Json) -> Format:
        return Declared(self, self.placed(config, side), self.members)

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        raise AssertionError(f"{module} is stored as one of the members")

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        raise AssertionError(f"{module} is stored as one of the members")

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        return None


class Declared(Format):
    """origin: the format that describes it. members: every format that a linear of it may be in."""

    marker_dtype = torch.uint8

    def __init__(self, origin: Format, placed: Placed, members: Iterable[Format]) -> None:
        self.origin, self.placed, self.members = origin, placed, tuple(members)
        self.name, self.variant = origin.name, origin.variant  # type: ignore[misc]
        suffixes = dict.fromkeys(suffix for one in self.members for suffix in one.own_suffixes)
        self.own_suffixes = tuple(suffixes)  # type: ignore[misc]

    def cache_codes(self, side: Json) -> CacheCodes | None:
        return self.origin.cache_codes(side)

    def member(self, module: str) -> Format:
        return self._placement(module).format

    def _placement(self, module: str) -> DeclaredFormat:
        found = self.placed(module)
        if found is None:
            raise QuantkitError(
                f"{module} is described as unquantized, and its tensors are quantized",
                "correct the description",
            )
        return found

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        return next(
            (
                module
                for one in self.members
                if (module := one.quantized_module(tensor)) is not None
            ),
            None,
        )

    def main_tensor(self, module: str, names: Container[str]) -> str:
        found = self.placed(module)
        members = self.members if found is None else (found.format, *self.members)
        own = [one.main_tensor(module, names) for one in members]
        return next((name for name in own if name in names), own[0])

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        placement = self._placement(module)
        return placement.format.parts(module, shape, placement.grid if grid is None else grid)

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        placement = self._placement(module)
        main = tensors.get(placement.format.main_tensor(module, tensors))
        if main is None or placement.format.quantized_module(main) != module:
            raise _other(
                module, placement, f"{self.main_tensor(module, tensors)} is of another format"
            )
        shape, own = placement.format.stored(module, tensors, placement.grid)
        parts = {module + part.suffix: part for part in placement.format.parts(module, shape, own)}
        for name in (module + suffix for suffix in self.own_suffixes):
            part, tensor = parts.get(name), tensors.get(name)
            if tensor is None:
                continue
            if part is None:
                raise _other(module, placement, f"there is {name}")
            if part.shape not in ((), (1,)) and tensor.shape != part.shape:
                raise _other(
                    module, placement, f"{name} is {list(tensor.shape)}, not {list(part.shape)}"
                )
        return shape, own

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        return self.member(module).pack(module, weight)

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        return self.member(module).unpack(module, tensors)

    def detect(self, config: Json, side: Json) -> bool:
        return self.origin.detect(config, side)

    def declared_grids(self, config: Json) -> Callable[[str], Grid | None]:
        def declared(module: str) -> Grid | None:
            found = self.placed(module)
            return None if found is None else found.grid

        return declared

    def ignored(self, config: Json, side: Json) -> Ignored:
        return lambda module: self.placed(module) is None

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        return (
            self.origin.config_block(grid, quantized, unquantized)
            if self.origin.writes_mixtures
            else {}
        )


def _other(module: str, placement: DeclaredFormat, seen: str) -> QuantkitError:
    label = placement.format.variant if placement.grid is None else grid_label(placement.grid)
    return QuantkitError(
        f"{module} is described as {label}, and its tensors are not: {seen}",
        "correct the description",
    )
