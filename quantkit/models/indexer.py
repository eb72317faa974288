"""The indexer of sparse attention (sparse.py, pooled_index.py): its tensors, and the inputs of the
selection."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from quantkit_kernels import IndexNorm, float32_linear
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.context import Context
from quantkit.models.pooled_index import IndexPooling, PooledInputs
from quantkit.models.rope import Rope
from quantkit.models.sparse import IndexerInputs
from quantkit.models.table import Parameter, Role, ScaleGroup
from quantkit.models.weights import Weights

_BIAS, _GATE = "index_kpool_compress_ape", "index_kpool_compress_gate"
"""What an indexer with a key for several tokens has in addition."""
POOLED_READERS = ("wk", "weights_proj", _GATE)
"""Its linears that read the layer's input."""


@dataclass(frozen=True)
class IndexerSizes:
    """topk: tokens selected for each token. centred: keys use a LayerNorm with bias instead of an
    RMSNorm. eps: of that norm. last_rotated: the last channels are rotated, not the first."""

    heads: int
    head_dim: int
    topk: int
    centred: bool = True
    eps: float = 1e-6
    last_rotated: bool = False


def indexer_parameters(
    sizes: IndexerSizes, prefix: str, hidden: int, q_lora: int, layer: int, *, mtp: bool = False
) -> list[Parameter]:
    """Every tensor of one layer's indexer at `prefix`, replicated on every rank."""

    def row(name: str, *shape: int, role: Role) -> Parameter:
        return Parameter(f"{prefix}.{name}", shape, role, layer=layer, mtp=mtp, block="attention")

    return [
        row("wq_b.weight", sizes.heads * sizes.head_dim, q_lora, role="indexer"),
        row("wk.weight", sizes.head_dim, hidden, role="indexer"),
        row("k_norm.weight", sizes.head_dim, role="norm"),
        *([row("k_norm.bias", sizes.head_dim, role="bias")] if sizes.centred else []),
        row("weights_proj.weight", sizes.heads, hidden, role="indexer_gate"),
    ]


def with_indexer(
    groups: list[ScaleGroup], prefix: str, readers: Sequence[str] = ("wk", "weights_proj")
) -> list[ScaleGroup]:
    """The scale groups of a layer of latent attention, its norm's and the queries' latent's first,
    with the indexer's linears added as consumers. readers: of the layer's input, by name."""
    first, queries, *others = groups
    first = replace(first, consumers=(*first.consumers, *(f"{prefix}.{name}" for name in readers)))
    return [first, replace(queries, consumers=(*queries.consumers, f"{prefix}.wq_b")), *others]


def pooled_indexer_parameters(
    sizes: IndexerSizes, rate: int, prefix: str, hidden: int, q_lora: int, layer: int, *, mtp: bool
) -> list[Parameter]:
    """As `indexer_parameters`, of an indexer with a key for `rate` tokens."""
    rows = indexer_parameters(sizes, prefix, hidden, q_lora, layer, mtp=mtp)
    bias = replace(rows[-1], name=f"{prefix}.{_BIAS}", shape=(rate, sizes.head_dim))
    gate = replace(bias, name=f"{prefix}.{_GATE}", shape=(sizes.head_dim, hidden))
    return [*rows, bias, gate]


class Indexer:
    """rope: of the rotated channels of queries and keys, which come first here."""

    def __init__(
        self, sizes: IndexerSizes, layer: int, prefix: str, rope: Rope, weights: Weights
    ) -> None:
        self.sizes, self.layer, self.rope = sizes, layer, rope

        def ordered(channels: Tensor, heads: int = 1) -> Tensor:
            if not sizes.last_rotated:
                return channels
            return channels.unflatten(0, (heads, -1)).roll(rope.dim, dims=1).flatten(0, 1)

        self.wq_b = ordered(weights.dequantized(f"{prefix}.wq_b"), sizes.heads)
        self.wk = ordered(weights.dequantized(f"{prefix}.wk"))
        gain = ordered(weights.tensor(f"{prefix}.k_norm.weight").float())
        centred = sizes.centred
        shift = ordered(weights.tensor(f"{prefix}.k_norm.bias").float()) if centred else None
        self.norm = IndexNorm(gain, shift, sizes.eps)
        self.gate = weights.tensor(f"{prefix}.weights_proj.weight").float()

    def __call__(self, x: Tensor, q_a: Tensor, context: Context) -> None:
        """Make the context select tokens. x [T, H]: the layer's normed input; q_a [T, q_lora]: the
        normed low-rank queries."""
        heads, dim = self.sizes.heads, self.sizes.head_dim
        inputs = IndexerInputs(
            F.linear(q_a, self.wq_b).unflatten(-1, (heads, dim)),
            F.linear(x, self.wk),
            float32_linear(x, self.gate) * (heads * dim) ** -0.5,
        )
        context.select(self.layer, inputs, self.norm, self.rope, self.sizes.topk)


class PooledIndexer:
    """Of an indexer with a key for several tokens. Nothing is rotated."""

    def __init__(self, sizes: IndexerSizes, layer: int, prefix: str, weights: Weights) -> None:
        self.sizes, self.layer = sizes, layer
        self.wq_b = weights.dequantized(f"{prefix}.wq_b")
        self.wk = weights.dequantized(f"{prefix}.wk")
        self.gain, self.shift = (
            weights.tensor(f"{prefix}.k_norm.{name}").float() for name in ("weight", "bias")
        )
        factor = (sizes.heads * sizes.head_dim) ** -0.5  # every constant factor of the scores
        heads = weights.tensor(f"{prefix}.weights_proj.weight").float() * factor
        self.gates = torch.cat((heads, weights.tensor(f"{prefix}.{_GATE}").float()))
        self.pooling = IndexPooling(weights.tensor(f"{prefix}.{_BIAS}").float(), sizes.topk)

    def __call__(self, x: Tensor, q_a: Tensor, context: Context) -> None:
        """As `Indexer`."""
        heads, dim = self.sizes.heads, self.sizes.head_dim
        eps = self.sizes.eps
        normed = F.layer_norm(F.linear(x, self.wk).float(), (dim,), self.gain, self.shift, eps)
        scores, shares = float32_linear(x, self.gates).split([heads, dim], dim=-1)
        inputs = PooledInputs(
            F.linear(q_a, self.wq_b).unflatten(-1, (heads, dim)),
            torch.cat((normed, shares), dim=-1).to(x.dtype),
            scores,
        )
        context.select_pooled(self.layer, inputs, self.pooling)
