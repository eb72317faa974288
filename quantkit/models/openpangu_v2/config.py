"""openPangu-2.0's config.json."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from quantkit.models import mtp, pangu_ultra_moe
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
from quantkit.models.hyper_connections import (
    HyperConnectionNames,
    HyperConnectionSizes,
)
from quantkit.models.indexer import IndexerSizes
from quantkit.models.mlp import check_groups
from quantkit.models.rope import Rope
from quantkit.models.short_conv import ShortConvolutions

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
_ONLY: dict[str, Any] = {
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
    def from_dict(cls, config: dict[str, Any]) -> "Config":
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


def _read_layers(config: dict[str, Any], key: str, num_layers: int) -> list[int]:
    """A list of layer numbers, possibly empty."""
    listed = config.get(key)
    listed = [] if listed is None else listed
    known = isinstance(listed, list) and all(type(one) is int and one >= 0 for one in listed)
    if not known or len({*listed}) != len(listed):
        raise refusal(key, config[key], "a list of layers, each once")
    return [one for one in listed if one < num_layers]


def _read_windows(
    config: dict[str, Any], num_layers: int, drafts: int, indexed: frozenset[int]
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
