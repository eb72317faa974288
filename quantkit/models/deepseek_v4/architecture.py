"""DeepSeek-V4: compressed attention with a short window, hyper-connections, hash routing by token
id in the first layers.

Names are those of the published checkpoints; transformers writes some differently
(checkpoint/tensor_aliases.py). As in transformers, queries and keys of the indexer are neither
multiplied by a Hadamard matrix nor rounded. The MTP layer (mtp.*), whose forward transformers
lacks, follows the release's own code. Symbols: T tokens, H hidden_size, n streams (hc_mult), D
head_dim.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from quantkit_kernels import (
    HeadNorm,
    Rotation,
    float32_linear,
    rms_norm,
    rotate_heads,
    rotate_queries,
    route_chosen,
)
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.errors import QuantkitError
from quantkit.models import hyper_connections, mtp
from quantkit.models.compressed_attention import (
    CompressedAttention,
    CompressedInputs,
    Pooling,
)
from quantkit.models.context import Context, Positions
from quantkit.models.deepseek_v4.config import Config
from quantkit.models.dspark import stage_groups
from quantkit.models.hyper_connections import (
    hyper_connection_parameters,
    merge_parameters,
)
from quantkit.models.mlp import MoeMlp, moe_parameters, moe_scale_groups
from quantkit.models.table import Parameter, Projection, Role, ScaleGroup, Split
from quantkit.models.weights import Weights

_TABLE = "gate.tid2eid"


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint in the order of a forward pass, MTP layers last."""
    return stack_parameters(config, lambda layer: layer_parameters(config, layer))


def stack_parameters(
    config: Config, rows_of: Callable[[int], Iterable[Parameter]]
) -> list[Parameter]:
    """As `parameters`, with the rows of a layer."""
    h, vocab = config.hidden_size, config.vocab_size
    rows = [Parameter("embed.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += rows_of(layer)
    rows += merge_parameters(config.streams)
    rows += [
        Parameter("norm.weight", (h,), "norm"),
        Parameter("head.weight", (vocab, h), "head", "gathered"),
    ]
    for layer in mtp.mtp_layers(config):
        rows += hyper_connections.mtp_parameters(
            config.streams, config.prefix(layer), layer, rows_of(layer)
        )
    return rows


def layer_parameters(config: Config, layer: int) -> list[Parameter]:
    """Every tensor of a layer."""
    config = config.of_layer(layer)
    return block_parameters(
        config, layer, attention_parameters(config, layer), expert_parameters(config, layer)
    )


def block_parameters(
    config: Config, layer: int, attention: Iterable[Parameter], experts: Iterable[Parameter]
) -> list[Parameter]:
    """A layer's rows around those of its attention and its experts."""
    h, p = config.hidden_size, config.prefix(layer)
    return [
        *hyper_connection_parameters(config.streams, f"{p}.hc_attn", layer, "attention"),
        Parameter(f"{p}.attn_norm.weight", (h,), "norm", layer=layer),
        *attention,
        *hyper_connection_parameters(config.streams, f"{p}.hc_ffn", layer, "router"),
        Parameter(f"{p}.ffn_norm.weight", (h,), "norm", layer=layer),
        *experts,
    ]


def attention_parameters(config: Config, layer: int) -> Iterator[Parameter]:
    """Every tensor of a layer's attention."""
    h, d, a = config.hidden_size, config.head_dim, f"{config.prefix(layer)}.attn"
    heads, groups = config.num_attention_heads, config.o_groups

    def row(name: str, shape: tuple[int, ...], role: Role, split: Split = "replicate") -> Parameter:
        return Parameter(f"{a}.{name}", shape, role, split, layer, block="attention")

    def linear(
        name: str, projection: Projection, shape: tuple[int, int], split: Split = "replicate"
    ) -> Parameter:
        fused = f"{a}.fused_wqa_wkv" if projection in ("q_a", "kv_a") else None
        return Parameter(
            f"{a}.{name}.weight",
            shape,
            "linear",
            split,
            layer,
            fused=fused,
            block="attention",
            projection=projection,
        )

    yield linear("wq_a", "q_a", (config.q_lora_rank, h))
    yield row("q_norm.weight", (config.q_lora_rank,), "norm")
    yield linear("wq_b", "q_b", (heads * d, config.q_lora_rank), "column")
    yield linear("wkv", "kv_a", (d, h))
    yield row("kv_norm.weight", (d,), "norm")
    yield row("attn_sink", (heads,), "bias", "column")
    rate, selects = config.entry_rates[layer]
    if rate:
        yield from _compressor_parameters(f"{a}.compressor", h, d, rate, selects, layer)
    if selects:
        queries = config.index_n_heads * config.index_head_dim
        yield row("indexer.wq_b.weight", (queries, config.q_lora_rank), "indexer")
        yield row("indexer.weights_proj.weight", (config.index_n_heads, h), "indexer_gate")
        yield from _compressor_parameters(
            f"{a}.indexer.compressor", h, config.index_head_dim, rate, selects, layer
        )
    yield row(
        "wo_a.weight", (groups * config.o_lora_rank, heads * d // groups), "indexer", "column"
    )
    yield linear("wo_b", "o", (h, groups * config.o_lora_rank), "row")


def _compressor_parameters(
    prefix: str, hidden: int, dim: int, rate: int, overlap: bool, layer: int
) -> list[Parameter]:
    width = 2 * dim if overlap else dim
    shapes: dict[str, tuple[tuple[int, ...], Role]] = {
        "wkv.weight": ((width, hidden), "indexer"),
        "wgate.weight": ((width, hidden), "indexer"),
        "ape": ((rate, width), "indexer_gate"),
        "norm.weight": ((dim,), "norm"),
    }
    return [
        Parameter(f"{prefix}.{name}", shape, role, layer=layer, block="attention")
        for name, (shape, role) in shapes.items()
    ]


def expert_parameters(config: Config, layer: int) -> list[Parameter]:
    """Router and experts of a layer."""
    width = config.moe_intermediate_size
    experts = config.n_routed_experts
    names = config.names_of(layer)
    prefix = f"{config.prefix(layer)}.ffn"
    router, *others = moe_parameters(
        prefix, config.hidden_size, width, layer, experts, shared_width=width, names=names
    )
    if layer not in config.hashed:
        return [router, *others]
    table = replace(
        router,
        name=f"{prefix}.{_TABLE}",
        role="router_table",
        shape=(config.vocab_size, config.num_experts_per_tok),
    )
    return [router, table, *others]


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The norms before both sublayers and of the queries' latent, to all their readers; no scale
    passes through clamped gates."""
    config = config.of_layer(layer)
    rate, selects = config.entry_rates[layer]
    readers = ["compressor.wkv", "compressor.wgate"] if rate else []
    if selects:
        readers += [f"indexer.{one}" for one in ("weights_proj", *readers)]
    return block_groups(config, layer, readers, ["indexer.wq_b"] if selects else [])


def block_groups(
    config: Config, layer: int, readers: list[str], queries: list[str]
) -> list[ScaleGroup]:
    """readers, queries: modules within the attention that read its input, and the queries' latent,
    after the projections."""
    p = config.prefix(layer)
    a = f"{p}.attn"
    of_input = tuple(f"{a}.{one}" for one in ("wq_a", "wkv", *readers))
    of_latent = tuple(f"{a}.{one}" for one in ("wq_b", *queries))
    mixture, *_ = moe_scale_groups(
        f"{p}.ffn", f"{p}.ffn_norm", config.n_routed_experts, config.mixture
    )
    groups = [
        ScaleGroup(f"{a}.qkv_a", f"{p}.attn_norm", True, of_input, of_input[0]),
        ScaleGroup(f"{a}.q_b", f"{a}.q_norm", True, of_latent, of_latent[0]),
        mixture,
    ]
    return stage_groups(config, layer, groups)


class Attention:
    """A rank has its share of the heads and of the output groups."""

    norms_heads = True

    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        a = f"{config.prefix(layer)}.attn"
        self.config, self.layer = config, layer
        self.rope = config.ropes[1 if config.reads_entries(layer) else 0]
        self.qkv_a = weights.fused_linear((f"{a}.wq_a", f"{a}.wkv"))
        self.q_b = weights.linear(f"{a}.wq_b")
        self.o_b = weights.linear(f"{a}.wo_b")
        self.gains = weights.tensor(f"{a}.q_norm.weight"), weights.tensor(f"{a}.kv_norm.weight")
        self.o_a = weights.dequantized(f"{a}.wo_a")
        self.raw: Tensor | None = None
        self.index_q: Tensor | None = None
        self.index_gate: Tensor | None = None
        sinks = weights.tensor(f"{a}.attn_sink").float()
        plain = CompressedAttention(config.sliding_window, config.head_dim**-0.5, sinks)
        self.attention = self.with_entries(plain, a, weights)

    def with_entries(
        self, plain: CompressedAttention, prefix: str, weights: Weights
    ) -> CompressedAttention:
        """The attention of a window with the entries that the layer reads."""
        rate, selects = self.config.entry_rates[self.layer]
        compressors = [f"{prefix}.compressor"] if rate else []
        compressors += [f"{prefix}.indexer.compressor"] if selects else []
        pools = [self._pooling(one, rate, selects, weights) for one in compressors]
        self.read_raw(compressors, weights)
        if selects:
            self.read_indexer(f"{prefix}.indexer", weights)
        own, index = (*pools, None, None)[:2]
        topk = self.config.index_topk if selects else 0
        return replace(plain, pooling=own, index_pooling=index, topk=topk)

    def read_raw(self, compressors: list[str], weights: Weights) -> None:
        """The linears of values and weights of what is pooled."""
        names = [f"{one}.{name}" for one in compressors for name in ("wkv", "wgate")]
        self.raw = torch.cat([weights.dequantized(name) for name in names]) if names else None

    def read_indexer(self, prefix: str, weights: Weights) -> None:
        """The indexer's queries, and the weights of its heads with every constant factor."""
        self.index_q = weights.dequantized(f"{prefix}.wq_b")
        factor = (self.config.index_n_heads * self.config.index_head_dim) ** -0.5
        gate = weights.tensor(f"{prefix}.weights_proj.weight")
        self.index_gate = gate.float() * factor

    def _pooling(self, prefix: str, rate: int, overlaps: bool, weights: Weights) -> Pooling:
        bias = weights.tensor(f"{prefix}.ape").float()
        gain = weights.tensor(f"{prefix}.norm.weight")
        return Pooling(rate, overlaps, bias, gain, self.config.rms_norm_eps, self.rope)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        rotation = context.rotation(self.rope)
        inputs = self._inputs(x, rotation)
        attended = context.attend_compressed(self.layer, inputs, self.attention)
        back = rotate_heads(attended, rotation, back=True).flatten(1)
        groups = back.unflatten(-1, (-1, self.o_a.shape[1])).transpose(0, 1)
        low = groups @ self.o_a.unflatten(0, (-1, self.config.o_lora_rank)).mT
        return self.o_b(low.transpose(0, 1).flatten(1))

    def _inputs(self, x: Tensor, rotation: Rotation) -> CompressedInputs:
        c, eps = self.config, self.config.rms_norm_eps
        low, kv = self.qkv_a(x).split([c.q_lora_rank, c.head_dim], dim=-1)
        q_a = rms_norm(low, self.gains[0], eps)
        q = self.q_b(q_a).unflatten(-1, (-1, c.head_dim))
        norm = HeadNorm(None, eps) if self.norms_heads else None
        q, kv = rotate_queries(q, kv, rotation, norm, HeadNorm(self.gains[1], eps))
        raw = self.raw_of(x)
        index_q, counts = x.new_zeros(len(x), 0, c.index_head_dim), x.new_zeros(len(x), 0)
        if self.index_q is not None and self.index_gate is not None:
            queries = F.linear(q_a, self.index_q).unflatten(-1, (c.index_n_heads, -1))
            index_q = rotate_heads(queries, rotation)
            counts = float32_linear(x, self.index_gate)
        return CompressedInputs(q, kv, raw, index_q, counts)

    def window_keys(self, x: Tensor, at: Positions) -> Tensor:
        """Keys [T, D] of tokens with inputs x [T, H], for a window of this attention."""
        c = self.config
        kv = self.qkv_a(x)[:, c.q_lora_rank :]
        norm = HeadNorm(self.gains[1], c.rms_norm_eps)
        return rotate_heads(kv[:, None], at.rotation(self.rope), norm)[:, 0]

    def raw_of(self, x: Tensor) -> Tensor:
        """As `CompressedInputs.raw`."""
        return x[:, :0] if self.raw is None else F.linear(x, self.raw)


class MixtureV4(MoeMlp):
    """Experts routed by scores (square root of softplus, or sigmoid), in the first layers by a
    table of token ids."""

    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        prefix = f"{config.prefix(layer)}.ffn"
        super().__init__(config.routing, prefix, weights, config.names_of(layer))
        self.table = weights.tensor(f"{prefix}.{_TABLE}").long() if layer in config.hashed else None
        if self.table is not None and not bool(
            ((self.table >= 0) & (self.table < config.n_routed_experts)).all()
        ):
            raise QuantkitError(
                f"{prefix}.{_TABLE} names experts outside 0..{config.n_routed_experts - 1}",
                "download the shard again",
            )

    def of_tokens(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """x [T, H] of tokens with ids [T] -> [T, H], partial over ranks."""
        if self.table is None:
            chosen, weights = self.choose(x)
        else:
            chosen = self.table[token_ids]
            weights = route_chosen(float32_linear(x, self.router), chosen, self.routing)
        routed = self.experts(x, chosen, weights)
        assert self.shared is not None, (
            "it has a gate of its own, so it is never fused with the routed ones"
        )
        return routed + self.shared(x)


class DecoderLayer(hyper_connections.HyperConnectionLayer):
    mlp: MixtureV4

    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        config = config.of_layer(layer)
        p = config.prefix(layer)
        attention = Attention(config, layer, weights)
        mixture = MixtureV4(config, layer, weights)
        names = hyper_connections.LayerNames("hc_attn", "hc_ffn", "attn_norm", "ffn_norm")
        super().__init__(p, config.streams, weights, attention, mixture, names)

    def mlp_with_ids(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        return self.all_reduce(self.mlp.of_tokens(normed, token_ids))


class Model(hyper_connections.HyperConnectionModel):
    layer_class = DecoderLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights, "head", embedding="embed", norm="norm")


class MtpLayer(hyper_connections.MtpLayer):
    layer_class = DecoderLayer
