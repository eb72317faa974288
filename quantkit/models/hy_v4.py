"""Hy4-preview: GLM-5's sparse latent attention with a learned score per head that takes part of its
weight, and a gate of its output; four independent residual streams; clamped routed experts.

Rotary channels are adjacent pairs, as vLLM, SGLang and llama.cpp read the release; transformers
5.24 rotates halves, which config.json says by rope_interleave = false. An indexer rotates its last
channels. transformers drops the MTP layer: it has one residual stream and an indexer of its own,
reads the main model's normed output, as in vLLM, and shares the embedding and the head.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit_kernels import Gating
from quantkit_kernels.gating import sigmoid
from torch import Tensor

from quantkit.common.result import JsonObject
from quantkit.models import decoder, deepseek_v3, deepseek_v32, glm_moe_dsa, hyper_connections, mtp
from quantkit.models.config import check_flag, check_layer_kinds, refuse_other_values
from quantkit.models.context import Context
from quantkit.models.hyper_connections import (
    HyperConnectionNames,
    HyperConnectionSizes,
    LayerNames,
    with_hyper_connections,
)
from quantkit.models.indexer import IndexerSizes, indexer_parameters, with_indexer
from quantkit.models.latent_window import LatentWindow
from quantkit.models.mlp import MixtureNames
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights

_COMPUTED: JsonObject = {
    "enable_ihc": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
}
_DEFAULTS: JsonObject = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "index_topk_freq": 4,
    "index_n_heads": 16,
}
"""transformers' defaults, by other names."""
_INDEXED = "indexed_attention"
_KINDS = (_INDEXED, "deepseek_sparse_attention", "sparse_attention", "sparse")
_NAMES = LayerNames("hc_attn_layer", "hc_mlp_layer", "input_layernorm", "post_attention_layernorm")
_STREAMS = HyperConnectionNames(
    ".hc_pre.hc_fn",
    ".hc_pre.hc_base",
    ".hc_pre.hc_scale",
    end="model.hc_head",
    ends=(".hc_head_fn", ".hc_head_base", ".hc_head_scale"),
)
_LAYERS, _DRAFTS = "model.layers.", "model.mtp_layers."


@dataclass(frozen=True)
class Config(glm_moe_dsa.Config):
    """hc_magnitude: most that the weight of a sublayer's output in a stream is. swiglu_limit: of
    routed experts alone."""

    hc_mult: int = 4
    hc_magnitude: float = 2.0
    hc_eps: float = 1e-6
    swiglu_limit: float = 10.0

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed here."""
        pairs = check_flag(config, "rope_interleave", default=True)
        computed = _COMPUTED | {"indexer_rope_interleave": pairs}
        refuse_other_values(config, computed, "Hy4", allow_null=True)
        read = _DEFAULTS | {key: value for key, value in config.items() if value is not None}
        kinds = read.pop("layer_types", None)
        made = super().from_dict({**read, "rope_interleave": True, "indexer_rope_interleave": True})
        assert isinstance(made, cls), made
        if kinds is not None:
            check_layer_kinds("layer_types", kinds, made.num_hidden_layers, _KINDS)
        return replace(made, rope=replace(made.rope, interleaved=pairs))

    @property
    def streams(self) -> HyperConnectionSizes:
        eps, magnitude = self.hc_eps, self.hc_magnitude
        return HyperConnectionSizes(
            self.hc_mult, self.hidden_size, 0, eps, self.rms_norm_eps, _STREAMS, magnitude
        )

    @property
    def indexer(self) -> IndexerSizes:
        return replace(super().indexer, eps=self.rms_norm_eps, last_rotated=True)

    @property
    def indexer_interleaved(self) -> bool:
        return self.rope.interleaved

    @property
    def gating(self) -> Gating:
        return Gating(limit=self.swiglu_limit)

    @property
    def mixture(self) -> MixtureNames:
        inherited = super().mixture
        return replace(inherited, gating=self.gating, other_gating=inherited.gating)

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        return (_DRAFTS,)

    def name(self, name: str) -> str:
        """Name in the checkpoint of a tensor or module whose layer has its number."""
        number, _, own = name.removeprefix(_LAYERS).partition(".")
        if not name.startswith(_LAYERS) or int(number) < self.num_hidden_layers:
            return name
        own = own.replace(mtp.FINAL_NORM, "final_layernorm")
        return f"{_DRAFTS}{int(number) - self.num_hidden_layers}.{own}"


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, MTP layers included, in the order of a forward pass."""

    def attention(layer: int) -> Iterable[Parameter]:
        a, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        heads, drafts = config.num_attention_heads, layer >= config.num_hidden_layers
        gate = Parameter(
            f"{a}.linear_gate.weight",
            (heads * config.v_head_dim, hidden),
            "linear",
            "column",
            layer,
            mtp=drafts,
            block="attention",
        )
        lost = replace(gate, name=f"{a}.learnable_sink_param", shape=(heads,), role="bias")
        rows = [*deepseek_v3.attention_parameters(config, layer), gate, lost]
        if config.has_indexer(layer):
            rank, own = config.q_lora_rank, config.indexer
            rows += indexer_parameters(own, f"{a}.indexer", hidden, rank, layer, mtp=drafts)
        return rows

    rows = mtp.without_own_ends(deepseek_v3.stack_parameters(config, attention))
    rows = with_hyper_connections(rows, config.streams, _NAMES, config.is_moe)
    return rename_rows(rows, config.name)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer, producers before their consumers' own groups; no scale
    passes through clamped gates."""
    a = f"model.layers.{layer}.self_attn"
    groups = deepseek_v3.gated_scale_groups(config, layer, f"{a}.linear_gate")
    if config.has_indexer(layer):
        groups = with_indexer(groups, f"{a}.indexer")
    groups += deepseek_v3.feed_forward_scale_groups(config, layer)
    return rename_groups(groups, config.name)


class Attention(deepseek_v32.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        a = f"model.layers.{layer}.self_attn"
        self.gate = weights.linear(f"{a}.linear_gate")
        self.lost = weights.tensor(f"{a}.learnable_sink_param").float()

    def attend(self, x: Tensor, q: Tensor, context: Context) -> Tensor:
        c, none = self.config, q.new_zeros(0, self.config.cache.width)
        window = LatentWindow(self.kv_b, c.rope, c.softmax_scale, none, self.topk, lost=self.lost)
        attended = context.attend_latent_window(self.layer, q, window)
        return attended * sigmoid(self.gate(x)).view_as(attended)


class GatedStreamsLayer(hyper_connections.HyperConnectionLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        attention = Attention(config, layer, weights)
        mlp = deepseek_v3.mlp_of(config, layer, weights)
        super().__init__(f"model.layers.{layer}", config.streams, weights, attention, mlp, _NAMES)


class GatedMtpBlock(deepseek_v3.DecoderLayer):
    """An MTP layer's block, with one residual stream."""

    attention_class = Attention


def layer_of(config: Config, layer: int, weights: Weights) -> decoder.DecoderLayer:
    """A layer by number; MTP layers follow the others."""
    if layer < config.num_hidden_layers:
        return GatedStreamsLayer(config, layer, weights)
    return GatedMtpBlock(config, layer, RenamedWeights(weights, config.name))


DecoderLayer = layer_of


class Model(hyper_connections.HyperConnectionModel):
    layer_class = GatedStreamsLayer


class MtpLayer(mtp.MtpLayer):
    layer_class = GatedMtpBlock
    shares_embedding = True

    def __init__(self, config: Config, weights: Weights, index: int = 0) -> None:
        super().__init__(config, RenamedWeights(weights, config.name), index)
