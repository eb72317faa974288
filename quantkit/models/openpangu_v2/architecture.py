"""openPangu-2.0: openPangu-Ultra-MoE's latent attention and experts, with hyper-connections.

Each layer's attention sees learned tokens, and in addition a window, the tokens selected by an
indexer, or all tokens; short convolutions are applied to the latents of queries and keys before
their norms, and to the heads' attention output. No library installed here computes the model: this
file follows the vendor's plain torch code, which is public twice, as a transformers model and as a
calibration model; where these differ, it follows what both engines of the vendor have. What public
descriptions do not settle is listed in docs/models.md. The MTP layers have one residual stream and
no indexer. Symbols: T tokens, H hidden_size, n streams, L kv_lora_rank, R qk_rope_head_dim.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor

from quantkit.models import decoder, deepseek_v3, hyper_connections, mtp, pangu_ultra_moe
from quantkit.models.context import Context
from quantkit.models.hyper_connections import LayerNames, with_hyper_connections
from quantkit.models.indexer import Indexer, indexer_parameters, with_indexer
from quantkit.models.latent_window import LatentWindow
from quantkit.models.openpangu_v2.config import Config
from quantkit.models.table import Parameter, ScaleGroup, Split
from quantkit.models.weights import Weights

_NAMES = LayerNames("attn_mhc_module", "mlp_mhc_module", "input_layernorm", "pre_mlp_layernorm")


def parameters(config: Config) -> list[Parameter]:
    """openPangu-Ultra-MoE's rows, with those of the hyper-connections, the convolutions, the
    learned tokens and the indexers."""
    rows: list[Parameter] = []
    own = pangu_ultra_moe.parameters(config)
    for row in with_hyper_connections(own, config.streams, _NAMES, config.is_moe):
        prefix = f"model.layers.{row.layer}"
        rows.append(row)
        if row.projection == "o" and row.layer is not None:
            rows += [replace(one, mtp=row.mtp) for one in _attention_extras(config, row.layer)]
        elif row.name == f"{prefix}.post_mlp_layernorm.weight" and row.layer in config.normed_ends:
            shape = (config.mhc_num_stream * config.hidden_size,)
            rows.append(replace(row, name=f"{prefix}.block_post_layernorm.weight", shape=shape))
    return rows


def _attention_extras(config: Config, layer: int) -> Iterator[Parameter]:
    a = f"model.layers.{layer}.self_attn"
    kernel = config.router_sliding_window
    heads = config.num_attention_heads * config.v_head_dim
    channels = {
        "qa_conv": config.q_lora_rank,
        "compresskv_conv": config.kv_lora_rank,
        "o_conv": heads,
    }
    for name, count in channels.items():
        split: Split = "column" if name == "o_conv" else "replicate"
        yield Parameter(
            f"{a}.{name}.weight", (count, 1, kernel), "state", split, layer, block="attention"
        )
    sinks = {
        "param_sink_compressed_kv": config.kv_lora_rank,
        "param_sink_k_pe": config.qk_rope_head_dim,
    }
    for name, width in sinks.items() if config.param_sink_number else ():
        yield Parameter(
            f"{a}.{name}", (config.param_sink_number, width), "bias", layer=layer, block="attention"
        )
    if layer in config.indexed:
        yield from indexer_parameters(
            config.indexer, f"{a}.indexer", config.hidden_size, config.q_lora_rank, layer
        )


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """openPangu-Ultra-MoE's groups, with a convolution of each channel before o_proj; an indexer
    reads the input of the first linears, and the queries' latent."""
    groups = [replace(group, head_width=0) for group in pangu_ultra_moe.scale_groups(config, layer)]
    return (
        with_indexer(groups, f"model.layers.{layer}.self_attn.indexer")
        if layer in config.indexed
        else groups
    )


class Attention(deepseek_v3.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        a = f"model.layers.{layer}.self_attn"
        self.window, self.topk, self.indexer = config.windows[layer], 0, None
        latents, heads = ("qa_conv", "compresskv_conv"), ("o_conv",)
        self.kernels = [
            torch.cat([weights.tensor(f"{a}.{name}.weight").float()[:, 0] for name in names])
            for names in (latents, heads)
        ]
        self.sinks = (
            [
                weights.tensor(f"{a}.{name}")
                for name in ("param_sink_compressed_kv", "param_sink_k_pe")
            ]
            if config.param_sink_number
            else None
        )
        if layer in config.indexed:
            self.topk = config.index_topk
            self.indexer = Indexer(config.indexer, layer, f"{a}.indexer", config.rope, weights)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        c, layer = self.config, self.layer
        latents, key = self.qkv_a(x).split(
            [c.q_lora_rank + c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        latents = context.convolve(layer, 0, latents, self.kernels[0])
        q_a = context.store_mla(layer, torch.cat((latents, key), dim=-1), self.norms, c.rope)
        if self.indexer is not None:
            self.indexer(x, q_a, context)
        q = self.q_b(q_a).unflatten(-1, (-1, c.qk_head_dim))
        attention = LatentWindow(
            self.kv_b, c.rope, c.softmax_scale, self._cached_sinks(q), self.topk, self.window
        )
        attended = context.attend_latent_window(layer, q, attention).flatten(1)
        return self.o(context.convolve(layer, 1, attended, self.kernels[1]))

    def _cached_sinks(self, like: Tensor) -> Tensor:
        """The learned tokens in cache layout, [param_sink_number, L + R]: their keys are not
        rotated."""
        if self.sinks is None:
            return like.new_zeros(0, self.config.cache.width)
        latents, keys = self.sinks
        return torch.cat((rms_norm(latents, self.norms.k, self.norms.eps), keys), dim=-1)


class MainDecoderLayer(pangu_ultra_moe.PostNormLayer, hyper_connections.HyperConnectionLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p = f"model.layers.{layer}"
        attention = Attention(config, layer, weights)
        mlp = pangu_ultra_moe.mlp_of(config, layer, weights)
        super().__init__(p, config.streams, weights, attention, mlp, _NAMES)
        self.read_post_norms(p, weights)
        self.end_norm = (
            weights.tensor(f"{p}.block_post_layernorm.weight")
            if layer in config.normed_ends
            else None
        )

    def finish(self, streams: Tensor) -> Tensor:
        if self.end_norm is None:
            return streams
        return rms_norm(streams.flatten(1), self.end_norm, self.eps).unflatten(1, (self.count, -1))


class MtpDecoderLayer(pangu_ultra_moe.DecoderLayer):
    """An MTP layer's block: openPangu-Ultra-MoE's, with this attention."""

    attention_class = Attention


def layer_of(config: Config, layer: int, weights: Weights) -> decoder.DecoderLayer:
    """A layer by number; MTP layers follow the others."""
    return (MainDecoderLayer if layer < config.num_hidden_layers else MtpDecoderLayer)(
        config, layer, weights
    )


DecoderLayer = layer_of


class Model(hyper_connections.HyperConnectionModel):
    layer_class = MainDecoderLayer
    num_mtp_vectors = 1

    def mtp_input(self, streams: Tensor, merged: Tensor) -> Tensor:
        return merged


class MtpLayer(mtp.MtpLayer):
    """Reads hidden states before the final norm, and returns its own in the same form after its
    normed ones."""

    layer_class = MtpDecoderLayer
    reads: mtp.MtpReads = "merged"

    def follow(self, model: decoder.Model) -> None:
        """Make the main model output its merged streams after its hidden states."""
        assert isinstance(model, Model), "an MTP layer for hyper-connections"
        model.outputs_mtp_input = True

    @by_own_backend
    def __call__(
        self, next_token_ids: Tensor, hidden: Tensor, context: Context, rows: Tensor | None = None
    ) -> Tensor:
        """hidden [T, 2 H], as output by the main model -> the same shape, the input of the next MTP
        layer. rows int64 [R]: of these tokens only."""
        inputs = self.inputs(next_token_ids, hidden[:, len(self.hnorm) :].contiguous())
        made = self.block(
            rms_norm(inputs, self.block.input_norm, self.eps), inputs, context, self.norm, rows
        )
        return torch.cat(made, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, 2 H] -> float32 [T, vocab]."""
        return super().logits(hidden[:, : len(self.hnorm)].contiguous())
