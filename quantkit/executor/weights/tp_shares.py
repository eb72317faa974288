"""How ranks share a model, from its table and headers, before any of them is started: whether they
can, and what the steps of one multiply, by size (for the plans of `quantkit kernels --tune`)."""

from collections.abc import Iterable, Iterator

import torch
from quantkit_kernels.sizes import ExpertsSize, LinearSize, Products
from quantkit_kernels.weights import kind

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import UsageError
from quantkit.executor.ranks.expert_parallel import check_experts
from quantkit.executor.weights.weights import operand, share_range
from quantkit.models.architecture import CompressedCache, KeyValueCache, ModelConfig
from quantkit.models.stored_parameters import Model, read_model
from quantkit.models.table import Parameter, routed_experts

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


def products(checkpoint: Checkpoint, tp: int = 1) -> Products:
    """Of the linears and quantized routed experts, cut for `tp` tensor-parallel ranks, each size
    once. Raises QuantkitError where ranks cannot share one evenly."""
    model = read_model(checkpoint)
    return Products(
        tuple(dict.fromkeys(_linears(checkpoint, model.rows, tp))),
        tuple(dict.fromkeys(_experts(checkpoint, model, tp))),
    )


def _linears(checkpoint: Checkpoint, rows: list[Parameter], tp: int) -> Iterator[LinearSize]:
    """Siblings on one grid that read the same input are one product."""
    together: dict[tuple[int | None, str, str], list[tuple[int, int]]] = {}
    for row in rows:
        if row.role == "linear" and row.expert is None:
            own = row.layer, row.fused or row.name, _kind(checkpoint, row.module)
            together.setdefault(own, []).append(_share(row, tp))
    for (_, _, found), sizes in together.items():
        yield LinearSize(found, sum(n for n, _ in sizes), sizes[0][1])


def _experts(checkpoint: Checkpoint, model: Model, tp: int) -> Iterator[ExpertsSize]:
    for layer in sorted(
        {row.layer for row in model.rows if row.layer is not None and row.expert is not None}
    ):
        experts = routed_experts(model.rows, layer)
        first = experts[min(experts)]
        if (found := _kind(checkpoint, first.gate.module)) != "dense":
            assert model.config.routing is not None, "experts that nothing chooses"
            intermediate, hidden = _share(first.gate, tp)
            yield ExpertsSize(
                found, hidden, intermediate, len(experts), model.config.routing.num_experts_per_tok
            )


def _kind(checkpoint: Checkpoint, module: str) -> str:
    """Of the operator that takes the linear, by its first rows."""
    if module not in checkpoint.linears:
        return "dense"
    stored, (weight, _) = checkpoint.linears[module], checkpoint.weight_slice(module, "N", 0, 1)
    in_groups = stored.grid is not None and stored.grid.group_size is not None
    return kind(
        operand(weight, torch.bfloat16, checkpoint.activation_bits(module), in_groups=in_groups)
    )


def _share(row: Parameter, tp: int) -> tuple[int, int]:
    """N and K of one rank."""
    n, k = row.shape
    if row.split == "column":
        n = share_range(n, "output features", row.module, 0, tp, row.key_heads)[1]
    elif row.split == "row":
        k = share_range(k, "input features", row.module, 0, tp)[1]
    return n, k
