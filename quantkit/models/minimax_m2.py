"""MiniMax-M2: norms over all queries and all keys, half of each head rotated, sigmoid routing with
a bias, Mixtral's tensor names."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import check_count, refusal, refuse_other_values
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.mixtral import COUNT, LINEARS, MODULE
from quantkit.models.mlp import MixtureNames, read_routing
from quantkit.models.sliding_window import refuse_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]

_COMPUTED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
_HEAD_DIM, _THETA = 128, 5e6
"""transformers' defaults."""


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        """The release declares MTP modules (use_mtp) but publishes no weights of them: there are
        none here."""
        refuse_other_values(config, _COMPUTED, "MiniMax-M2")
        kinds = config.get("attn_type_list") or []
        if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
            raise refusal("attn_type_list", kinds, "a list of 1, full attention")
        refuse_windows(config)
        config = {"head_dim": _HEAD_DIM, "num_key_value_heads": 8, **config}
        rotary = config.get("rotary_dim")
        share = (
            1.0
            if rotary is None
            else check_count("rotary_dim", rotary) / check_count("head_dim", config["head_dim"])
        )
        values = gqa.read_config(
            config, default_theta=_THETA, partial_rotary_factor=share, own=("use_qk_norm",)
        )
        values["moe_intermediate_size"] = values["intermediate_size"]
        return cls(
            **values,
            qk_norm="all",
            routing=read_routing(config, COUNT, True, "sigmoid"),
            mixture=MixtureNames(bias="e_score_correction_bias", linears=LINEARS),
            mixture_module=MODULE,
        )
