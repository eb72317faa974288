"""openPangu-Ultra-MoE: DeepSeek-V3's attention and experts with sandwich norms, no expert groups,
an optional router bias.

Every sublayer is normed before and after: h + post_norm(f(pre_norm(h))). The post norms apply to
outputs that go straight into the residual stream, so no scale folds into them; MLP inputs fold into
pre_mlp_layernorm.

Rotary pairs: public code disagrees. The vendor's modeling file and its engine (omni-infer) rotate
(x[i], x[i + D/2]); vLLM rotates (x[2i], x[2i+1]). The vendor's convention is the default here;
`rope_interleave: true` in config.json selects the other.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit_kernels import add_rms_norm, rms_norm
from torch import Tensor

from quantkit.models import decoder, deepseek_v3, mtp
from quantkit.models.config import check_flag, read_fields
from quantkit.models.context import Context
from quantkit.models.deepseek_v3 import Attention
from quantkit.models.mlp import Mlp, MoeMlp, check_groups
from quantkit.models.rope import Rope
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

FIRST_RELEASE_NAMES = {
    "num_dense_layers": "first_k_dense_replace",
    "num_routed_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "attention_q_lora_dim": "q_lora_rank",
    "attention_kv_lora_dim": "kv_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""config.json keys of the V1.0 release -> DeepSeek's names, which later releases use."""
OTHER_RELEASE_NAMES: dict[str, str] = {
    **FIRST_RELEASE_NAMES,
    **{later: first for first, later in FIRST_RELEASE_NAMES.items()},
}
"""The same in both directions."""


@dataclass(frozen=True)
class Config(deepseek_v3.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        """From config.json with the names of either release."""
        named = {FIRST_RELEASE_NAMES.get(key, key): value for key, value in config.items()}
        named |= {
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "norm_topk_prob": check_flag(config, "norm_topk_prob", default=True),
        }
        values = read_fields(cls, named)
        interleaved = check_flag(config, "rope_interleave")
        made = cls(
            rope=Rope.from_dict(
                config, values["qk_rope_head_dim"], interleaved, default_theta=None
            ),
            **values,
        )
        check_groups(made.routing)
        return made


def parameters(config: Config) -> list[Parameter]:
    """DeepSeek-V3's rows with two more norms per layer; the router bias is optional and has two
    spellings."""
    rows = []
    for row in deepseek_v3.parameters(config):
        if row.role == "router_bias":
            row = replace(row, other_name=row.name.replace(".mlp.gate.", ".mlp."), optional=True)
        rows.append(row)
        if row.name.endswith(".post_attention_layernorm.weight"):
            assert row.layer is not None, row.name
            rows.append(
                replace(row, name=row.name.replace("post_attention_layernorm", "pre_mlp_layernorm"))
            )
            post_norm = row.name.replace("post_attention_layernorm", "post_mlp_layernorm")
            rows.append(replace(row, name=post_norm, after_experts=config.is_moe(row.layer)))
    return rows


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """DeepSeek-V3's groups, with MLP inputs folded into the norm before the MLP."""
    after_attention, before_mlp = (
        f"model.layers.{layer}.{name}_layernorm" for name in ("post_attention", "pre_mlp")
    )
    return [
        replace(group, producer=before_mlp) if group.producer == after_attention else group
        for group in deepseek_v3.scale_groups(config, layer)
    ]


class PostNormLayer(decoder.DecoderLayer):
    """What its sublayers put out is summed over the ranks and normed before it is added."""

    def read_post_norms(self, prefix: str, weights: Weights) -> None:
        self.post_attention_norm, self.post_mlp_norm = (
            weights.tensor(f"{prefix}.post_{name}_layernorm.weight")
            for name in ("attention", "mlp")
        )

    def attention_output(self, normed: Tensor, context: Context) -> Tensor:
        return rms_norm(
            super().attention_output(normed, context), self.post_attention_norm, self.eps
        )

    def post_mlp(self, mlp_output: Tensor) -> Tensor:
        return rms_norm(mlp_output, self.post_mlp_norm, self.eps)


class DecoderLayer(PostNormLayer):
    attention_class: ClassVar[type[Any]] = Attention

    def __init__(self, config: deepseek_v3.Config, layer: int, weights: Weights) -> None:
        p, eps = f"model.layers.{layer}", config.rms_norm_eps
        attention, mlp = (
            self.attention_class(config, layer, weights),
            mlp_of(config, layer, weights),
        )
        super().__init__(p, eps, weights, attention, mlp, mlp_norm="pre_mlp_layernorm")
        self.add_rms_norm = add_rms_norm  # outputs are summed over the ranks already
        self.read_post_norms(p, weights)

    def attention_part(self, normed: Tensor, context: Context) -> Tensor:
        return self.attention_output(normed, context)

    def mlp_part(self, normed: Tensor) -> Tensor:
        return self.post_mlp(self.mlp_reduced(normed))


def mlp_of(config: deepseek_v3.Config, layer: int, weights: Weights) -> Mlp | MoeMlp:
    """A layer's MLP or experts, with the router's bias by either name, or without."""
    prefix = f"model.layers.{layer}.mlp"
    if not config.is_moe(layer):
        return Mlp(prefix, weights)
    names = ("gate.e_score_correction_bias", "e_score_correction_bias")
    bias = next((name for name in names if weights.has(f"{prefix}.{name}")), None)
    return MoeMlp(config.routing, prefix, weights, replace(deepseek_v3.MIXTURE, bias=bias))


class Model(decoder.Model):
    layer_class = DecoderLayer


class MtpLayer(mtp.MtpLayer):
    layer_class = DecoderLayer
