"""GLM-5.3-Flash: four residual streams; Kimi Delta Attention with a lower bound of its decay in
three of four layers, in the others GLM-5's sparse latent attention without rotary embedding, whose
indexer has a key for several tokens; clamped experts.

The text model is computed, the vision tower is copied. A layer that shares an indexer attends to
the tokens that the last one with an indexer selected. transformers drops the MTP layer: it has one
residual stream and reads the main model's normed output, as in vLLM, and it shares the embedding
and the head. Symbols: T tokens, H hidden_size, n streams.
"""

from collections.abc import Iterable

from quantkit.models import decoder, deepseek_v3, deepseek_v32, hyper_connections, mtp
from quantkit.models.glm5_next.config import PREFIX, Config
from quantkit.models.hyper_connections import LayerNames, with_hyper_connections
from quantkit.models.indexer import (
    POOLED_READERS,
    PooledIndexer,
    pooled_indexer_parameters,
    with_indexer,
)
from quantkit.models.kimi_delta import attention_of, delta_parameters, delta_scale_groups
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights

_NAMES = LayerNames("hc_attn", "hc_ffn", "input_layernorm", "post_attention_layernorm")


def _rename(name: str) -> str:
    return f"{PREFIX}{name.removeprefix('model.')}" if name.startswith("model.") else name


def parameters(config: Config) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""

    def attention(layer: int) -> Iterable[Parameter]:
        a, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        if (net := config.delta(layer)) is not None:
            return delta_parameters(net, a, hidden, layer, (net.value_heads,))
        rows = [*deepseek_v3.attention_parameters(config, layer)]
        if config.has_indexer(layer):
            rows += pooled_indexer_parameters(
                config.indexer,
                config.index_kpool,
                f"{a}.indexer",
                hidden,
                config.q_lora_rank,
                layer,
                mtp=layer >= config.num_hidden_layers,
            )
        return rows

    rows = [
        row
        for row in deepseek_v3.stack_parameters(config, attention)
        if not (row.mtp and row.role in ("embedding", "head"))
    ]
    rows = with_hyper_connections(rows, config.streams, _NAMES, config.is_moe)
    return rename_rows(rows, _rename)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer, producers before their consumers' own groups; no scale
    passes through clamped gates."""
    p = f"model.layers.{layer}"
    if (net := config.delta(layer)) is not None:
        groups = delta_scale_groups(net, f"{p}.self_attn", f"{p}.input_layernorm")
    else:
        groups = deepseek_v3.attention_scale_groups(config, layer)
        if config.has_indexer(layer):
            groups = with_indexer(groups, f"{p}.self_attn.indexer", POOLED_READERS)
    groups += deepseek_v3.feed_forward_scale_groups(config, layer)
    return rename_groups(groups, _rename)


class Attention(deepseek_v32.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        self.norms = self.norms._replace(eps=config.rms_norm_eps)

    def indexer_of(self, config: Config, layer: int, weights: Weights) -> PooledIndexer:
        prefix = f"model.layers.{layer}.self_attn.indexer"
        return PooledIndexer(config.indexer, layer, prefix, weights)


class StreamsLayer(hyper_connections.HyperConnectionLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p, weights = f"model.layers.{layer}", RenamedWeights(weights, _rename)
        mlp = deepseek_v3.mlp_of(config, layer, weights)
        attention = attention_of(Attention, config, layer, weights)
        super().__init__(p, config.streams, weights, attention, mlp, _NAMES)


class MtpBlock(deepseek_v3.DecoderLayer):
    """An MTP layer's block, with one residual stream."""

    attention_class = Attention


def layer_of(config: Config, layer: int, weights: Weights) -> decoder.DecoderLayer:
    """A layer by number; MTP layers follow the others."""
    if layer < config.num_hidden_layers:
        return StreamsLayer(config, layer, weights)
    return MtpBlock(config, layer, RenamedWeights(weights, _rename))


DecoderLayer = layer_of


class Model(hyper_connections.HyperConnectionModel):
    layer_class = StreamsLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        embedding, norm = (f"{PREFIX}{name}" for name in ("embed_tokens", "norm"))
        super().__init__(config, weights, embedding=embedding, norm=norm)


class MtpLayer(mtp.MtpLayer):
    layer_class = MtpBlock
    shares_embedding = True

    def __init__(self, config: Config, weights: Weights, index: int = 0) -> None:
        super().__init__(config, RenamedWeights(weights, _rename), index)
