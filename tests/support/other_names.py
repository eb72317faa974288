"""An architecture of its own, with names that no published one has: what a new file of
quantkit/models is, in one file.

Grouped-query attention whose rotary embedding turns half of a head, one dense layer, then experts
w1, w2, w3 with a shared one and a bias that chooses. `register` does what its line in
quantkit/models/__init__.py would.
"""

import sys

from quantkit_kernels import Routing
from tiny_models import random_tensors as random_tensors

from quantkit import models
from quantkit.models import decoder, gqa
from quantkit.models.config import check_count
from quantkit.models.mlp import (
    MixtureNames,
    Mlp,
    MlpNames,
    MoeMlp,
    mlp_parameters,
    mlp_scale_groups,
    moe_parameters,
    moe_scale_groups,
)
from quantkit.models.rope import Rope
from quantkit.models.table import Parameter, ScaleGroup

NAMES = MlpNames("w1", "w3", "w2")
MIXTURE = MixtureNames(bias="choice", shared="common", linears=NAMES)
MODEL_TYPE = "other_names"


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config):
        values = gqa.read_config(config)
        values["rope"] = Rope.from_dict(
            config, check_count("rotary_dim", config.get("rotary_dim")), interleaved=False
        )
        routing = Routing(
            check_count("experts", config.get("experts")),
            config["chosen"],
            True,
            "sigmoid",
            1,
            1,
            2.0,
        )
        return cls(**values, routing=routing, dense_layers=frozenset({0}))


def parameters(config):
    h, vocab = config.hidden_size, config.vocab_size
    rows = [Parameter("tokens.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += _layer_parameters(config, layer)
    return [
        *rows,
        Parameter("last_norm.weight", (h,), "norm"),
        Parameter("logits.weight", (vocab, h), "head", "gathered"),
    ]


def _layer_parameters(config, layer):
    h, d, p = config.hidden_size, config.head_dim, f"blocks.{layer}"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def attention(projection, name, shape, split):
        fused = None if projection == "o" else f"{p}.att.wqkv"
        return Parameter(
            f"{p}.att.{name}.weight",
            shape,
            "linear",
            split,
            layer,
            fused=fused,
            block="attention",
            projection=projection,
        )

    rows = [
        Parameter(f"{p}.input_layernorm.weight", (h,), "norm", layer=layer),
        attention("q", "wq", (heads * d, h), "column"),
        attention("k", "wk", (kv_heads * d, h), "column"),
        attention("v", "wv", (kv_heads * d, h), "column"),
        attention("o", "wo", (h, heads * d), "row"),
        Parameter(f"{p}.middle_norm.weight", (h,), "norm", layer=layer),
    ]
    if config.routing is None or not config.is_moe(layer):
        return rows + mlp_parameters(f"{p}.ff", h, config.intermediate_size, layer, names=NAMES)
    count, width = config.routing.n_routed_experts, config.moe_intermediate_size
    return rows + moe_parameters(
        f"{p}.moe", h, width, layer, count, shared_width=width, names=MIXTURE
    )


def scale_groups(config, layer):
    p = f"blocks.{layer}"
    readers = (f"{p}.att.wq", f"{p}.att.wk", f"{p}.att.wv")
    groups = [ScaleGroup(f"{p}.att.qkv", f"{p}.input_layernorm", True, readers, readers[0])]
    if config.routing is None or not config.is_moe(layer):
        return groups + mlp_scale_groups(f"{p}.ff", f"{p}.middle_norm", NAMES)
    experts = config.routing.n_routed_experts
    return groups + moe_scale_groups(f"{p}.moe", f"{p}.middle_norm", experts, MIXTURE)


class Attention:
    def __init__(self, config, layer, weights):
        p = f"blocks.{layer}.att"
        self.config, self.layer = config, layer
        self.qkv, self.o = (
            weights.fused_linear((f"{p}.wq", f"{p}.wk", f"{p}.wv")),
            weights.linear(f"{p}.wo"),
        )

    def __call__(self, x, context):
        c = self.config
        q = context.store_gqa(
            self.layer, self.qkv(x), c.num_key_value_heads, c.head_dim, None, c.rope
        )
        return self.o(context.attend_gqa(self.layer, q, c.softmax_scale).flatten(1))


class DecoderLayer(decoder.DecoderLayer):
    def __init__(self, config, layer, weights):
        p, routing = f"blocks.{layer}", config.routing
        mlp: Mlp | MoeMlp
        if routing is not None and config.is_moe(layer):
            mlp = MoeMlp(routing, f"{p}.moe", weights, MIXTURE)
        else:
            mlp = Mlp(f"{p}.ff", weights, NAMES)
        super().__init__(
            p,
            config.rms_norm_eps,
            weights,
            Attention(config, layer, weights),
            mlp,
            mlp_norm="middle_norm",
        )


class Model(decoder.Model):
    layer_class = DecoderLayer

    def __init__(self, config, weights):
        super().__init__(config, weights, "logits", embedding="tokens", norm="last_norm")


MtpLayer = None


def tiny_config():
    """config.json of a small one."""
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "experts": 4,
        "chosen": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def register(monkeypatch):
    """Make it one of quantkit's architectures."""
    monkeypatch.setitem(sys.modules, f"quantkit.models.{MODEL_TYPE}", sys.modules[__name__])
    known = (*models.ARCHITECTURES, MODEL_TYPE)
    for name, module in list(sys.modules.items()):
        if name.startswith("quantkit") and "ARCHITECTURES" in vars(module):
            monkeypatch.setattr(module, "ARCHITECTURES", known)
