"""Linears that must be on one grid, because engines make one operator of them: fused siblings, and
all routed experts of a layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from quantkit.models.table import Parameter


@dataclass(frozen=True)
class Choice:
    """name: of the fused module, of the only linear, or layers.N.experts."""

    name: str
    rows: tuple[Parameter, ...]

    @property
    def layer(self) -> int | None:
        return self.rows[0].layer

    @property
    def of_experts(self) -> bool:
        return self.rows[0].expert is not None

    @cached_property
    def modules(self) -> tuple[str, ...]:
        return tuple(row.module for row in self.rows)


def choices_of(rows: Iterable[Parameter]) -> list[Choice]:
    """rows: linears that may be rounded, in the order of the table."""
    found: dict[str, list[Parameter]] = {}
    for row in rows:
        name = f"layers.{row.layer}.experts" if row.expert is not None else row.fused or row.module
        found.setdefault(name, []).append(row)
    return [Choice(name, tuple(own)) for name, own in found.items()]
