"""Qwen3.8-Flash-Next's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from quantkit.models import gqa
from quantkit.models.architecture import KeyValueCache
from quantkit.models.config import (
    DECIDED,
    check_at_most,
    check_count,
    check_divides,
    check_flag,
    check_layer_kinds,
    refusal,
    refuse_other_values,
)
from quantkit.models.mlp import MixtureNames, read_routing
from quantkit.models.qwen3_5 import ROPES, TextConfig, is_flat, plain_ropes, read_text
from quantkit.models.qwen3_next import ROTARY_SHARE, read_delta_net
from quantkit.models.qwen4_exp.gated_streams import GatedStreamSizes
from quantkit.models.qwen4_exp.ngrams import NGramSizes
from quantkit.models.short_conv import buffer_index
from quantkit.models.sliding_window import refuse_windows

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_COUNTS = {"hc_count": 4, "hc_lowrank": 320}
"""transformers' defaults."""
_COMPUTED: dict[str, Any] = {"hidden_act": "silu", "indexer_kv_heads": 1}
_INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_FULL, _LINEAR = "full_attention", "linear_attention"
_ALIASES = {"indexed_attention": _FULL, "qwen_sparse_attention": _FULL}
_SHARE = "partial_rotary_factor"


@dataclass(frozen=True)
class Config(TextConfig):
    """hc_count: residual streams; hc_lowrank: inner width of the gates of their input. indexer_*:
    heads and width of the indexer, tokens that share a key, tokens selected. ngrams: sizes of the
    n-gram tables, by layer."""

    hc_count: int = 4
    hc_lowrank: int = 320
    indexer_n_heads: int = 1
    indexer_head_dim: int = 1
    indexer_budget: int = 1
    indexer_compress_ratio: int = 1
    ngrams: Annotated[Mapping[int, NGramSizes], DECIDED] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed here."""
        text = read_text(config)
        given = {key: value for key, value in text.items() if value is not None}
        text = _DEFAULTS | plain_ropes(given)
        refuse_other_values(text, _COMPUTED, "Qwen3.8-Flash-Next")
        refuse_windows({key: value for key, value in text.items() if key != "layer_types"})
        width = check_count("moe_intermediate_size", text["moe_intermediate_size"])
        values = gqa.read_config(
            {**text, "intermediate_size": width}, partial_rotary_factor=ROTARY_SHARE
        )
        if not any(_SHARE in (text.get(place) or {}) for place in ROPES) and _SHARE not in text:
            place = "rope_parameters"
            raise refusal(place, text.get(place), f"{_SHARE}, of which engines have other defaults")
        layers, bias = values["num_hidden_layers"], check_flag(text, "attention_bias")
        kinds = _read_kinds(text, layers)
        net = read_delta_net({**text, "layer_types": kinds}, layers, joined=False)
        for name in (*_COUNTS, *_INDEXER):
            values[name] = check_count(name, text.get(name, _COUNTS.get(name)))
        made = cls(
            **values,
            qk_norm="head",
            qkv_bias=bias,
            o_bias=bias,
            routing=read_routing(
                text,
                ("num_experts",),
                check_flag(text, "norm_topk_prob", default=True),
                "softmax",
            ),
            mixture=MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate"),
            shared_width=check_count(
                "shared_expert_intermediate_size", text["shared_expert_intermediate_size"]
            ),
            recurrent=net and replace(net, sigmoid=_gated_by_sigmoid(text)),
            output_gate=True,
            norm_offset=1.0,
            copied_prefixes=("mtp.", "model.visual."),
            ngrams=_read_ngrams(text, values["hidden_size"], kinds),
            flat=is_flat(config),
        )
        if made.hc_count < 2:
            raise refusal("hc_count", made.hc_count, "at least 2 residual streams")
        check_divides("indexer_compress_ratio", "indexer_budget", made)
        check_at_most(
            "the rotated part of head_dim", made.rope.dim, "indexer_head_dim", made.indexer_head_dim
        )
        return made

    @property
    def streams(self) -> GatedStreamSizes:
        end = self.name("model.hyper_connection_mixer")
        return GatedStreamSizes.of(
            self.hc_count, self.hidden_size, self.rms_norm_eps, self.hc_lowrank, end
        )

    @property
    def cache(self) -> KeyValueCache:
        pool = self.indexer_compress_ratio
        return KeyValueCache(self.num_key_value_heads, self.head_dim, self.indexer_head_dim, pool)

    @property
    def recent_tokens(self) -> dict[int, tuple[int, int]]:
        channels = self.hc_count * self.hidden_size
        return {
            buffer_index(layer, 0): (sizes.reach, channels) for layer, sizes in self.ngrams.items()
        }


def _read_kinds(text: dict[str, Any], num_layers: int) -> list[str] | None:
    """layer_types in the words of Qwen3-Next."""
    kinds = text.get("layer_types")
    if kinds is None:
        return None
    kinds = [_ALIASES.get(str(one), one) for one in kinds] if isinstance(kinds, list) else kinds
    return [*check_layer_kinds("layer_types", kinds, num_layers, (_LINEAR, _FULL))]


def _gated_by_sigmoid(text: dict[str, Any]) -> bool:
    """Whether the output of linear attention is gated by a sigmoid, not by SiLU."""
    gate = text.get("output_gate_type", "silu")
    if gate not in ("sigmoid", "silu"):
        raise refusal("output_gate_type", gate, "'sigmoid' or 'silu'")
    return bool(gate == "sigmoid")


def _read_ngrams(
    text: dict[str, Any], hidden: int, kinds: list[str] | None
) -> dict[int, NGramSizes]:
    """Of the layers that ple_layer_ids counts from 1."""
    listed, layers = text.get("ple_layer_ids", []), text["num_hidden_layers"]
    if not isinstance(listed, list) or not all(
        type(one) is int and 1 <= one <= layers for one in listed
    ):
        raise refusal("ple_layer_ids", listed, f"layers counted from 1 to {layers}")
    numbers = sorted({one - 1 for one in listed})
    if kinds is not None and any(kinds[number] != _LINEAR for number in numbers):
        raise refusal("ple_layer_ids", listed, f"layers with {_LINEAR}")
    return {layer: NGramSizes.from_dict(text, hidden, place) for place, layer in enumerate(numbers)}
