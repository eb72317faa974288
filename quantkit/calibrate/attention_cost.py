"""What an error in the outputs of a linear inside attention costs, in closed form, by what one
costs in the residual stream behind it.

With M [H, H] the cost in the stream and O_h [H, V] the columns of o that head h writes through, an
error e in the head's values costs e^T O_h^T M O_h e: all tokens' weights are but factors. One in
its scores moves the head's output between values, which costs as much as the spread of these
values, s_h = tr(O_h^T M O_h cov(v_h)), times the squared score: so an error in what keys are made
of is weighed by the second moment of the queries, and the other way round. Where a norm is between,
its gain is in both. Moments are those of the
calibration tokens: W H W^T for a linear W over an input of Hessian H.

Left out: that keys and queries of grouped heads are rotated, and scores of the rotated part of
latent attention are alike in all channels; that the mean of the keys costs nothing; what a norm's
division does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.scale import FoldedTensors, Scaled, ScaledInput
from quantkit.models.table import Parameter, Projection
from quantkit.quant.gptq import Curvature
from quantkit.quant.tensor_cores import tensor_core_products


def attention_costs(scaled: Scaled, folded: FoldedTensors) -> dict[str, Curvature]:
    """By module: [P, n, n] of P heads of n rows, or [1, N, N], for `compensate_both`. Nothing for a
    sublayer whose cost is not known, or that is no attention with heads of one size."""
    sublayer = scaled.sublayer
    if sublayer.outputs is None or not sublayer.heads:
        return {}
    rows = _by_projection(sublayer.needed)
    if (
        "o" not in rows
        or rows["o"].module not in sublayer.ends
        or rows["o"].shape[1] % sublayer.heads
    ):
        return {}
    costs: dict[str, Tensor] = {}
    if {"kv_a", "kv_b", "q_b"} <= rows.keys():
        latent = _Latent.of(scaled, folded, rows, sublayer.outputs)
        costs = (
            {}
            if latent is None
            else {rows[own].module: cost for own, cost in latent.costs().items() if own in rows}
        )
    elif "v" in rows and rows["v"].module in sublayer.quantized:
        width = rows["o"].shape[1] // sublayer.heads
        groups, left = divmod(rows["v"].shape[0], width)
        if not left and groups and not sublayer.heads % groups:
            values = _value_costs(sublayer.outputs, folded[rows["o"].name], sublayer.heads)
            costs = {rows["v"].module: values.unflatten(0, (groups, -1)).sum(1)}
    damping = sublayer.solvers.recipe.output_damping
    return {
        module: Curvature.of(cost, damping)
        for module, cost in costs.items()
        if module in sublayer.quantized
    }


def _by_projection(rows: list[Parameter]) -> dict[Projection, Parameter]:
    """The attention's linears; nothing where two are the same projection."""
    own = [
        row
        for row in rows
        if row.block == "attention"
        and row.projection is not None
        and row.role in ("linear", "kv_b")
    ]
    found = {row.projection: row for row in own if row.projection is not None}
    return found if len(found) == len(own) else {}


@tensor_core_products()
def _value_costs(outputs: Curvature, o: Tensor, heads: int) -> Tensor:
    """O_h^T M O_h of every head, [heads, V, V], for o [H, heads * V]."""
    seen = (
        outputs.factor.t() @ own.index_select(0, outputs.order) for own in o.chunk(heads, dim=1)
    )
    return torch.stack([own.t() @ own for own in seen])


def _moments(w: Tensor, curvature: Curvature) -> Tensor:
    """Second moments of the outputs of w [..., N, K], [..., N, N], from the curvature of its
    input."""
    seen = w.index_select(-1, curvature.order) @ curvature.factor
    return seen @ seen.mT


@dataclass(frozen=True)
class _Latent:
    """Latent attention: h heads of N channels of scores without rotation, R with it, and V values;
    L latents, Q of the queries' own.

    values [h, V, V]: what an error in each head's values costs. kv_b [h, N + V, L], q_b [h, N + R,
    Q]: with the gains of the norms before
    them. size []: mean square of what the latents' norm divides. latents [L, L]: second moments
    after the division; rotated []: mean square of the rotated keys' channels; queries [h, N + R, N
    + R]: second moments.
    """

    values: Tensor
    kv_b: Tensor
    q_b: Tensor
    size: Tensor
    latents: Tensor
    rotated: Tensor
    queries: Tensor

    @classmethod
    def of(
        cls,
        scaled: Scaled,
        folded: FoldedTensors,
        rows: Mapping[Projection, Parameter],
        outputs: Curvature,
    ) -> "_Latent | None":
        """None where the shapes are others', or q_b or kv_a is not rounded, so that nobody saw what
        it reads."""
        heads, count = scaled.sublayer.heads, rows["kv_b"].shape[1]
        values = rows["o"].shape[1] // heads
        asks, tells = (_input_of(scaled, rows[projection].module) for projection in ("q_b", "kv_a"))
        wide = rows["kv_b"].shape[0] - heads * values
        if (
            asks is None
            or tells is None
            or wide <= 0
            or wide % heads
            or rows["q_b"].shape[0] % heads
            or rows["kv_a"].shape[0] <= count
        ):
            return None
        q_b, kv_a = folded[rows["q_b"].name], folded[rows["kv_a"].name]
        queries = _moments(q_b.unflatten(0, (heads, -1)), asks.curvature)
        made, rotated = (_moments(own, tells.curvature) for own in (kv_a[:count], kv_a[count:]))
        size = made.diagonal().mean().clamp(min=1e-30)
        return cls(
            values=_value_costs(outputs, folded[rows["o"].name], heads),
            kv_b=(folded[rows["kv_b"].name] * _gain_before(scaled, folded, rows["kv_b"])).unflatten(
                0, (heads, -1)
            ),
            q_b=(q_b * _gain_before(scaled, folded, rows["q_b"])).unflatten(0, (heads, -1)),
            size=size,
            latents=made / size,
            rotated=rotated.diagonal().mean(),
            queries=queries,
        )

    def costs(self) -> dict[Projection, Tensor]:
        """Of q_a, q_b and kv_a, [P, n, n]."""
        plain = self.kv_b.shape[1] - self.values.shape[1]
        keys, values = self.kv_b[:, :plain], self.kv_b[:, plain:]
        costly = self.values @ values
        spread = (costly @ self.latents * values).sum((1, 2))
        score = (spread / self.q_b.shape[1])[
            :, None, None
        ]  # scores are divided by the root of their channels
        q_b = torch.diag_embed((score[:, 0] * self.rotated).expand(self.q_b.shape[:2]))
        q_b[:, :plain, :plain] = score * (keys @ self.latents @ keys.mT)
        latents = values.flatten(0, 1).t() @ costly.flatten(0, 1)
        latents += keys.flatten(0, 1).t() @ (
            score * self.queries[:, :plain, :plain] @ keys
        ).flatten(0, 1)
        rotated = (score * self.queries[:, plain:, plain:]).diagonal(dim1=1, dim2=2).sum(0)
        q_a = self.q_b.flatten(0, 1).t() @ (q_b @ self.q_b).flatten(0, 1)
        kv_a = torch.block_diag(
            latents / self.size, torch.diag(rotated.mean().expand(len(rotated)))
        )
        return {"q_a": q_a[None], "q_b": q_b, "kv_a": kv_a[None]}


def _input_of(scaled: Scaled, module: str) -> ScaledInput | None:
    """What a module reads, if it was observed to be rounded."""
    return next(
        (scaled.inputs.get(first) for first, modules in scaled.sites.items() if module in modules),
        None,
    )


def _gain_before(scaled: Scaled, folded: FoldedTensors, row: Parameter) -> Tensor:
    """Of the norm whose output a linear reads, [K]; ones where the table knows of none."""
    sublayer = scaled.sublayer
    norm = next(
        (
            group.producer
            for group in sublayer.groups
            if group.producer_is_norm and row.module in group.consumers
        ),
        None,
    )
    gain = next((own for own in sublayer.needed if own.module == norm and own.role == "norm"), None)
    return (
        torch.ones(row.shape[1], device=folded.source.device)
        if gain is None
        else folded[gain.name] + gain.gain_offset
    )
