"""GLM-4.5 to 4.7: half of each head rotated, optional norms on q and k, DeepSeek-V3's mixture of
experts and MTP layer."""

from dataclasses import dataclass, replace

from quantkit_kernels import Routing

from quantkit.common.result import JsonObject
from quantkit.models import gqa, mtp
from quantkit.models.config import (
    CountOrNone,
    NumLayersOrNone,
    check_count,
    check_flag,
    check_number,
    read_fields,
)
from quantkit.models.deepseek_v3 import MIXTURE
from quantkit.models.gqa import DecoderLayer, Model, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.mlp import check_groups, read_routing
from quantkit.models.sliding_window import refuse_windows
from quantkit.models.table import Parameter

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()

_ROTARY_SHARE = 0.5
"""transformers' default of partial_rotary_factor."""


@dataclass(frozen=True)
class _Fields:
    """Fields of config.json in addition to the shared ones."""

    n_shared_experts: int
    first_k_dense_replace: CountOrNone
    num_nextn_predict_layers: NumLayersOrNone = 0


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """num_mtp_layers is transformers' name for num_nextn_predict_layers."""
        refuse_windows(config)
        if "num_nextn_predict_layers" not in config and "num_mtp_layers" in config:
            config = {**config, "num_nextn_predict_layers": config["num_mtp_layers"]}
        values = gqa.read_config(config, partial_rotary_factor=_ROTARY_SHARE, own=("use_qk_norm",))
        fields = read_fields(_Fields, config)
        return cls(
            **values,
            qkv_bias=check_flag(config, "attention_bias"),
            qk_norm="head" if check_flag(config, "use_qk_norm") else None,
            routing=read_grouped_routing(config),
            mixture=MIXTURE,
            shared_width=check_count("moe_intermediate_size", values.get("moe_intermediate_size"))
            * fields["n_shared_experts"],
            dense_layers=frozenset(
                range(min(fields["first_k_dense_replace"], values["num_hidden_layers"]))
            ),
            num_nextn_predict_layers=fields.get("num_nextn_predict_layers", 0),
        )


def read_grouped_routing(config: JsonObject) -> Routing:
    """Group-limited sigmoid routing. Raises QuantkitError where sizes do not fit."""
    routing = replace(
        read_routing(
            config,
            ("n_routed_experts", "num_local_experts"),
            check_flag(config, "norm_topk_prob", default=True),
            "sigmoid",
        ),
        n_group=check_count("n_group", config.get("n_group", 1)),
        topk_group=check_count("topk_group", config.get("topk_group", 1)),
        routed_scaling_factor=check_number(
            "routed_scaling_factor", config.get("routed_scaling_factor", 1.0)
        ),
    )
    check_groups(routing)
    return routing


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, MTP layers included, in the order of a forward pass."""
    rows = gqa.parameters(config)
    for layer in mtp.mtp_layers(config):
        block = [replace(row, mtp=True) for row in gqa.layer_parameters(config, layer)]
        rows += mtp.mtp_parameters(config.hidden_size, config.vocab_size, layer, block)
    return rows


class MtpLayer(mtp.MtpLayer):
    layer_class = DecoderLayer
