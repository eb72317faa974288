"""The indexer of sparse attention (sparse.py): its tensors, and the inputs of the selection."""

from dataclasses import dataclass, replace

from quantkit_kernels import IndexNorm, float32_linear
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.context import Context
from quantkit.models.rope import Rope
from quantkit.models.sparse import IndexerInputs
from quantkit.models.table import Parameter, Role, ScaleGroup
from quantkit.models.weights import Weights

_EPS = 1e-6
"""Of the norm of keys."""


@dataclass(frozen=True)
class IndexerSizes:
    """topk: tokens selected for each token. centred: keys use a LayerNorm with bias instead of an
    RMSNorm."""

    heads: int
    head_dim: int
    topk: int
    centred: bool = True


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


def with_indexer(groups: list[ScaleGroup], prefix: str) -> list[ScaleGroup]:
    """The scale groups of a layer of latent attention, its norm's and the queries' latent's first,
    with the indexer's linears added as consumers."""
    first, queries, *others = groups
    first = replace(first, consumers=(*first.consumers, f"{prefix}.wk", f"{prefix}.weights_proj"))
    return [first, replace(queries, consumers=(*queries.consumers, f"{prefix}.wq_b")), *others]


class Indexer:
    """rope: rotates the first channels of queries and keys."""

    def __init__(
        self, sizes: IndexerSizes, layer: int, prefix: str, rope: Rope, weights: Weights
    ) -> None:
        self.sizes, self.layer, self.rope = sizes, layer, rope
        self.wq_b = weights.dequantized(f"{prefix}.wq_b")
        self.wk = weights.dequantized(f"{prefix}.wk")
        shift = weights.tensor(f"{prefix}.k_norm.bias").float() if sizes.centred else None
        self.norm = IndexNorm(weights.tensor(f"{prefix}.k_norm.weight").float(), shift, _EPS)
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
