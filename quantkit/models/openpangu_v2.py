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
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor

from quantkit.common.result import JsonObject
from quantkit.models import decoder, deepseek_v3, hyper_connections, mtp, pangu_ultra_moe
from quantkit.models.architecture import LatentCache
from quantkit.models.config import (
    DECIDED,
    CountOrNone,
    check_at_most,
    check_count,
    check_flag,
    read_fields,
    refusal,
    refuse_attention_bias,
    refuse_other_values,
)
from quantkit.models.context import Context
from quantkit.models.hyper_connections import (
    HyperConnectionNames,
    HyperConnectionSizes,
    LayerNames,
    with_hyper_connections,
)
from quantkit.models.indexer import Indexer, IndexerSizes, indexer_parameters, with_indexer
from quantkit.models.latent_window import LatentWindow
from quantkit.models.mlp import check_groups
from quantkit.models.rope import Rope
from quantkit.models.short_conv import ShortConvolutions
from quantkit.models.table import Parameter, ScaleGroup, Split
from quantkit.models.weights import Weights

_EPS = 1e-6
"""Of hyper-connections, whatever rms_norm_eps is."""
_STREAMS = HyperConnectionNames(
    ".phi.weight",
    ".branch_beta",
    ".branch_alpha",
    ".norm_gamma",
    "model.merge_mhc_module",
    (".phi.weight", ".branch_beta_pre", ".branch_alpha_pre"),
)
_ONLY: JsonObject = {
    "hidden_act": "silu",
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
}
_FLAGS = {
    "use_mhc": True,
    "mhc_use_gamma": True,
    "sandwich_norm": True,
    "use_mome": True,
    "param_sink_with_value": False,
    "attn_groupnorm": False,
    "attn_elementwise_gate": False,
    "attn_k_layernorm": False,
    "vanilla_mlp": False,
    "tie_word_embeddings": False,
}
"""Flags of config.json that are only computed with this value, which is also the default."""


@dataclass(frozen=True)
class Config(pangu_ultra_moe.Config):
    """Fields as config.json names them. router_sliding_window: kernel width of the short
    convolutions. windows: for each layer, MTP layers included, how many tokens its attention sees,
    0 for all; indexed: layers with an indexer; normed_ends: layers with a norm over their output
    streams."""

    mhc_num_stream: int = 4
    mhc_recur_norm: int = 20
    param_sink_number: CountOrNone = 0
    router_sliding_window: int = 3
    index_topk: int = 2048
    index_n_heads: int = 64
    index_head_dim: int = 128
    windows: Annotated[tuple[int, ...], DECIDED] = ()
    indexed: Annotated[frozenset[int], DECIDED] = frozenset()
    normed_ends: Annotated[frozenset[int], DECIDED] = frozenset()

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed by this architecture."""
        refuse_other_values(config, _ONLY | _FLAGS, "openPangu-2.0", allow_null=True)
        refuse_attention_bias(config)
        values = read_fields(
            cls,
            {
                **_ONLY,
                **config,
                "norm_topk_prob": check_flag(config, "norm_topk_prob", default=True),
            },
        )
        rope = Rope.from_dict(
            config,
            values["qk_rope_head_dim"],
            check_flag(config, "rope_interleave"),
            default_theta=None,
        )
        made = cls(rope=rope, **values)
        check_groups(made.routing)
        check_at_most(
            "qk_rope_head_dim", made.qk_rope_head_dim, "index_head_dim", made.index_head_dim
        )
        check_count("router_sliding_window", made.router_sliding_window, least=2)
        indexed, ends = (
            _read_layers(config, key, made.num_hidden_layers)
            for key in ("dsa_layers", "block_post_layernorm_idx")
        )
        windows = _read_windows(
            config, made.num_hidden_layers, made.num_nextn_predict_layers, frozenset(indexed)
        )
        return replace(
            made, windows=windows, indexed=frozenset(indexed), normed_ends=frozenset(ends)
        )

    @property
    def streams(self) -> HyperConnectionSizes:
        return HyperConnectionSizes(
            self.mhc_num_stream,
            self.hidden_size,
            self.mhc_recur_norm,
            _EPS,
            self.rms_norm_eps,
            _STREAMS,
        )

    @property
    def cache(self) -> LatentCache:
        return LatentCache(self.kv_lora_rank, self.qk_rope_head_dim, self.index_head_dim)

    @property
    def recurrent(self) -> ShortConvolutions:
        latents = self.q_lora_rank + self.kv_lora_rank
        values = self.num_attention_heads * self.v_head_dim
        return ShortConvolutions(
            self.router_sliding_window, latents, values, self.num_hidden_layers
        )

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}." for layer in mtp.mtp_layers(self))

    @property
    def indexer(self) -> IndexerSizes:
        return IndexerSizes(self.index_n_heads, self.index_head_dim, self.index_topk, centred=False)


def _read_layers(config: JsonObject, key: str, num_layers: int) -> list[int]:
    """A list of layer numbers, possibly empty."""
    listed = config.get(key)
    listed = [] if listed is None else listed
    known = isinstance(listed, list) and all(type(one) is int and one >= 0 for one in listed)
    if not known or len({*listed}) != len(listed):
        raise refusal(key, config[key], "a list of layers, each once")
    return [one for one in listed if one < num_layers]


def _read_windows(
    config: JsonObject, num_layers: int, drafts: int, indexed: frozenset[int]
) -> tuple[int, ...]:
    """swa_layers have a window, each its own in sliding_window_list or all the same. MTP layers,
    which come last, take the list's remaining entries if swa_layers does not name them."""
    listed = config.get("swa_layers")
    sliding = _read_layers(config, "swa_layers", num_layers + drafts)
    if indexed & {*sliding}:
        raise refusal("swa_layers", config["swa_layers"], "layers that are not in dsa_layers")
    kinds, later = config.get("layer_types"), [*range(num_layers, num_layers + drafts)]
    if kinds is not None and kinds != [
        "sliding_attention" if layer in sliding else "full_attention" for layer in range(num_layers)
    ]:
        raise refusal(
            "layer_types",
            kinds,
            "sliding_attention for swa_layers and full_attention for the others",
        )
    sizes = config.get("sliding_window_list")
    if sizes is None:
        sizes = [config.get("sliding_window")] * len(listed or ())
    if not isinstance(sizes, list) or len(sizes) < len(sliding):
        raise refusal("sliding_window_list", sizes, "a window for each of swa_layers")
    sliding += [] if {*later} & {*sliding} else later[: len(sizes) - len(sliding)]
    by_layer = {
        layer: check_count("sliding_window_list", sizes[number])
        for number, layer in enumerate(sliding)
    }
    return tuple(by_layer.get(layer, 0) for layer in range(num_layers + drafts))


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
