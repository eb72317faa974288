"""Whether ranks can share a model, from its table and headers, before any of them is started."""

from collections.abc import Iterable

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import UsageError
from quantkit.executor.ranks.expert_parallel import check_experts
from quantkit.executor.weights.weights import share_range
from quantkit.models.architecture import CompressedCache, KeyValueCache, ModelConfig
from quantkit.models.table import Parameter

_KEY_HEADS = "num_key_value_heads"


def check_shares(
    checkpoint: Checkpoint, config: ModelConfig, rows: Iterable[Parameter], tp: int, dp: int
) -> None:
    """Raises UsageError where `tp` ranks cannot cut the linears evenly, or `dp` ranks cannot share
    out the routed experts. rows: the model's table, as the checkpoint spells it."""
    rows = list(rows)
    _check_counts(config, tp)
    check_experts(rows, dp)
    if dp > 1 and isinstance(config.cache, CompressedCache):
        raise UsageError("compressed attention was never run with --dp", "use --tp")
    for row in rows if tp > 1 else ():
        if row.split == "column":
            for size in row.segments or (row.shape[row.output_axis],):
                share_range(size, "output features", row.module, 0, tp, row.key_heads)
        elif row.split == "row" and len(row.shape) > 1:
            width = share_range(row.shape[1], "input features", row.module, 0, tp)[1]
            linear = checkpoint.linears.get(row.module)
            if linear is not None and linear.grid is not None:
                linear.grid.check_inputs(row.module, width)


def _check_counts(config: ModelConfig, tp: int) -> None:
    kept = config.cache.kv_heads if isinstance(config.cache, KeyValueCache) else 0
    counts = config.tp_units | ({_KEY_HEADS: kept} if kept else {})
    if (uneven := _uneven(counts, tp)) is not None:
        even = [
            str(size)
            for size in range(1, config.num_attention_heads + 1)
            if _uneven(counts, size) is None
        ]
        reason = f"the model has {uneven} = {counts[uneven]}, which {tp} ranks cannot share evenly"
        raise UsageError(
            reason,
            f"use --tp {', '.join(even[:-1])} or {even[-1]}" if even[1:] else "leave --tp out",
        )


def _uneven(counts: dict[str, int], tp: int) -> str | None:
    """The first that `tp` ranks cannot share evenly. Of key heads several ranks may hold the same
    one."""
    return next(
        (
            name
            for name, count in counts.items()
            if count % tp and not (name == _KEY_HEADS and tp % count == 0)
        ),
        None,
    )
