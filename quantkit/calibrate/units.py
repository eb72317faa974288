"""The units of work: what is read, decided and written together, and can be found finished after a restart.

One expert is a unit, and so are each half of a decoder layer without its experts, and each large table.
"""

from collections.abc import Iterable

from quantkit.models.table import Parameter, ScaleGroup


def attend_unit(layer: int) -> str:
    return f"layers.{layer}.attend"


def feed_forward_unit(layer: int) -> str:
    return f"layers.{layer}.feed_forward"


def expert_unit(layer: int, expert: int) -> str:
    return f"layers.{layer}.experts.{expert}"


def units_of(rows: Iterable[Parameter], groups: Iterable[ScaleGroup]) -> dict[str, list[Parameter]]:
    """Every parameter in exactly one unit, in the order of the table. `groups` are those of all layers.

    A norm goes with the half of the layer that reads it, because folding changes both together.
    """
    attention_norms = {group.producer for group in groups if all(_attention(consumer) for consumer in group.consumers)}
    units: dict[str, list[Parameter]] = {}
    for row in rows:
        units.setdefault(_unit_of(row, attention_norms), []).append(row)
    return units


def _unit_of(row: Parameter, attention_norms: set[str]) -> str:
    if row.layer is None or row.role in ("embedding", "head"):
        return row.module
    if row.expert is not None:
        return expert_unit(row.layer, row.expert)
    if _attention(row.name) or row.module in attention_norms:
        return attend_unit(row.layer)
    return feed_forward_unit(row.layer)


def _attention(name: str) -> bool:
    return ".self_attn." in name
