"""Sparse attention as DeepSeek-V3.2 has it (its paper, section 2.1): an indexer scores the tokens before a token, and latent attention
reads those that score highest.

score(t, s) = sum over the indexer's heads h of w[t, h] relu(q[t, h] . k[s]), in float32, in plain torch on every device. What is chosen
is gathered and read by the operators of latent attention that read a cache. Symbols: T tokens, S tokens seen, D index_head_dim.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from quantkit_kernels import Latents, PagedLatents, Rotation, mla_decode
from quantkit_kernels.codes import CodedLatents
from quantkit_kernels.latents import by_slot, parts_of
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.rope import Rope
from quantkit.models.table import Parameter
from quantkit.models.weights import Weights

if TYPE_CHECKING:
    from quantkit.models.context import Context

_EPS = 1e-6
"""Of the norm of keys."""
_SCORES = 1 << 25
"""Products of heads and keys that are held at once, float32."""
_GATHERED = 1 << 17
"""Cached tokens that are gathered at once, over all rows."""


@dataclass(frozen=True)
class IndexerSizes:
    """topk: tokens that are chosen for each."""

    heads: int
    head_dim: int
    topk: int


class IndexInputs(NamedTuple):
    """What a layer's tokens bring to the choice. queries [T, heads, D] and keys [T, D], turned; weights float32 [T, heads], every constant
    factor in them."""

    queries: Tensor
    keys: Tensor
    weights: Tensor


class Selected(NamedTuple):
    """What each of T tokens attends to. slots int64 [T, k]: places in a cache whose blocks lie one after the other; counts int32 [T]: how
    many of them count, the first ones."""

    slots: Tensor
    counts: Tensor


def indexer_parameters(sizes: IndexerSizes, prefix: str, hidden: int, q_lora: int, layer: int, *, mtp: bool = False) -> list[Parameter]:
    """Every tensor of one layer's indexer at `prefix`. Every rank holds it whole."""

    def row(name: str, *shape: int, role: str) -> Parameter:
        return Parameter(f"{prefix}.{name}", shape, role, layer=layer, mtp=mtp, block="attention")  # type: ignore[arg-type]

    return [
        row("wq_b.weight", sizes.heads * sizes.head_dim, q_lora, role="indexer"),
        row("wk.weight", sizes.head_dim, hidden, role="indexer"),
        row("k_norm.weight", sizes.head_dim, role="norm"),
        row("k_norm.bias", sizes.head_dim, role="bias"),
        row("weights_proj.weight", sizes.heads, hidden, role="indexer_gate"),
    ]


class Indexer:
    """rope: how its queries and keys are turned, in their first channels."""

    def __init__(self, sizes: IndexerSizes, layer: int, prefix: str, rope: Rope, weights: Weights) -> None:
        self.sizes, self.layer, self.rope = sizes, layer, rope
        self.wq_b, self.wk = weights.dequantized(f"{prefix}.wq_b"), weights.dequantized(f"{prefix}.wk")
        self.gain, self.shift = weights.tensor(f"{prefix}.k_norm.weight"), weights.tensor(f"{prefix}.k_norm.bias")
        self.gate = weights.tensor(f"{prefix}.weights_proj.weight").float()

    def __call__(self, x: Tensor, q_a: Tensor, context: "Context") -> None:
        """Have the context choose. x [T, H]: the layer's normed input; q_a [T, q_lora]: the normed low-rank queries."""
        heads, dim = self.sizes.heads, self.sizes.head_dim
        queries = F.linear(q_a, self.wq_b).unflatten(-1, (heads, dim))
        normed = F.layer_norm(F.linear(x, self.wk).float(), (dim,), self.gain.float(), self.shift.float(), _EPS)
        keys = self._turned(normed.to(x.dtype)[:, None], context)[:, 0]
        weights = F.linear(x.float(), self.gate) * (heads * dim) ** -0.5
        context.select(self.layer, IndexInputs(self._turned(queries, context), keys, weights), self.sizes.topk)

    def _turned(self, x: Tensor, context: "Context") -> Tensor:
        return torch.cat((context.rotate(self.rope, x[..., : self.rope.dim].contiguous()), x[..., self.rope.dim :]), dim=-1)


def choose(inputs: IndexInputs, positions: Tensor, topk: int, keys: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The positions of the tokens with the largest scores among 0 .. each token's own, int64 [T, k], the largest first, and how many each
    has, int32 [T]; k is `topk`, or S where that is less.

    keys: of one sequence [S, D]; with a table [T, n] the blocks [num_blocks, size, D] of many, a row of it for each token, S = n size.
    """
    seen = len(keys) if table is None else table.shape[1] * keys.shape[1]
    found, count = [], min(topk, seen)
    step = max(1, _SCORES // (seen * inputs.queries.shape[1]))
    places = torch.arange(seen, device=positions.device)
    for first in range(0, len(positions), step):
        part = slice(first, first + step)
        own = keys if table is None else keys[table[part]].flatten(1, 2)
        products = (inputs.queries[part].float() @ own.float().mT).relu_()
        scores = (inputs.weights[part, None] @ products)[:, 0]
        found.append(scores.masked_fill_(places > positions[part, None], -torch.inf).topk(count, dim=-1).indices)
    return torch.cat(found), (positions + 1).clamp(max=count).int()


def joined(parts: list[tuple[Tensor, Tensor]]) -> Selected:
    """What was chosen for the tokens of several sequences, one after the other: slots [T, k] and counts [T] of each."""
    width = max(slots.shape[1] for slots, _ in parts)
    slots = torch.cat([F.pad(slots, (0, width - slots.shape[1])) for slots, _ in parts])
    return Selected(slots, torch.cat([counts for _, counts in parts]))


def attend_selected(q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, selected: Selected, scale: float) -> Tensor:
    """As `mla_decode`, each token over the cached latents that were chosen for it: q [T, heads, N + R] -> [T, heads, V]."""
    size = parts_of(cache)[0].shape[1]
    blocks = -(-selected.slots.shape[1] // size)
    slots = F.pad(selected.slots, (0, blocks * size - selected.slots.shape[1]))
    step, out = max(1, _GATHERED // (blocks * size)), []
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        rows = slots[part]
        table = torch.arange(len(rows) * blocks, dtype=torch.int32, device=q.device).view(-1, blocks)
        pages = PagedLatents(_gathered(cache, rows, size), table, selected.counts[part])
        turned = Rotation(rotation.cos[part], rotation.sin[part], rotation.interleaved)
        out.append(mla_decode(q[part], kv_b, turned, pages, scale=scale))
    return torch.cat(out)


def _gathered(cache: Latents, slots: Tensor, size: int) -> Latents:
    """The tokens at `slots` [rows, k] as a cache of blocks of `size`."""
    flat = by_slot(cache)
    picked = [part[slots].flatten(0, 1).unflatten(0, (-1, size)) for part in parts_of(flat)]
    if isinstance(cache, Tensor):
        return picked[0]
    return CodedLatents(*picked) if isinstance(cache, CodedLatents) else (picked[0], picked[1])
