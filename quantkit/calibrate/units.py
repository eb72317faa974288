"""The units of work: what is read, decided and written together, and can be found finished after a
restart.

One expert is a unit, and so are each sublayer of a decoder layer without its experts, and each
large table.
"""

from collections.abc import Iterable, Sequence

from quantkit.models.table import Parameter, ScaleGroup


def attend_unit(layer: int) -> str:
    return f"layers.{layer}.attend"


def feed_forward_unit(layer: int) -> str:
    return f"layers.{layer}.feed_forward"


def expert_unit(layer: int, expert: int) -> str:
    return f"layers.{layer}.experts.{expert}"


def units_of(rows: Sequence[Parameter], groups: Iterable[ScaleGroup]) -> dict[str, list[Parameter]]:
    """Every parameter in exactly one unit, in the order of the table. `groups` are those of all
    layers.

    A norm goes with the sublayer that reads it, because folding changes both together.
    """
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
