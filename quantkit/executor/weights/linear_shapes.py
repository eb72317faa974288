"""What a model's steps multiply, by size, as one of its ranks has it: what `quantkit kernels --tune
--model` measures plans for."""

from collections.abc import Iterator

import torch
from quantkit_kernels.sizes import ExpertsSize, LinearSize, Products
from quantkit_kernels.weights import kind

from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.weights import operand, share_range
from quantkit.models.stored_parameters import Model, read_model
from quantkit.models.table import Parameter, routed_experts


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
