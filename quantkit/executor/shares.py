"""Whether ranks can share a model, told from its table and headers, before any of them is started."""

from collections.abc import Iterable

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import UsageFault
from quantkit.executor.expert_parallel import check_experts
from quantkit.executor.split import check_inputs, share_range
from quantkit.models.architecture import CompressedCache, KeyValueCache, ModelConfig
from quantkit.models.table import Parameter


def check_shares(checkpoint: Checkpoint, config: ModelConfig, rows: Iterable[Parameter], tp: int, dp: int) -> None:
    """Raises UsageFault where `tp` ranks cannot cut the linears evenly, or `dp` ranks cannot share out the routed experts. rows: the
    model's table, as the checkpoint spells it."""
    rows = list(rows)
    _check_counts(config, tp)
    check_experts(rows, dp)
    if dp > 1 and isinstance(config.cache, CompressedCache):
        raise UsageFault("compressed attention was never run with --dp", "use --tp")
    for row in rows if tp > 1 else ():
        if row.split == "column":
            for size in row.segments or row.shape[:1]:
                share_range(size, "output features", row.module, 0, tp, row.key_heads)
        elif row.split == "row" and len(row.shape) > 1:
            width = share_range(row.shape[1], "input features", row.module, 0, tp)[1]
            linear = checkpoint.linears.get(row.module)
            check_inputs(row.module, None if linear is None else linear.grid, width)


def _check_counts(config: ModelConfig, tp: int) -> None:
    kept = config.cache.kv_heads if isinstance(config.cache, KeyValueCache) else 0
    counts = config.never_cut | ({"num_key_value_heads": kept} if kept else {})
    uneven = {name: count for name, count in counts.items() if not _comes_out(count, tp, copies=name == "num_key_value_heads")}
    for name, count in uneven.items():
        even = [str(size) for size in range(1, config.num_attention_heads + 1) if _all_come_out(counts, size)]
        told = f"the model has {name} = {count}, which {tp} ranks cannot share evenly"
        raise UsageFault(told, f"use --tp {', '.join(even[:-1])} or {even[-1]}" if even[1:] else "leave --tp out")


def _all_come_out(counts: dict[str, int], tp: int) -> bool:
    return all(_comes_out(count, tp, copies=name == "num_key_value_heads") for name, count in counts.items())


def _comes_out(count: int, tp: int, *, copies: bool) -> bool:
    """copies: whether several ranks may hold the same one."""
    return count % tp == 0 or (copies and tp % count == 0)
