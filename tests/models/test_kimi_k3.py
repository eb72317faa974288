"""Kimi-K3 against a statement of the release's public code (modeling_kimi_linear.py), written out
here in float32 token by token, for transformers does not have it; and as it is published."""

import functools
import math

import make_model
import pytest
import torch
from quantized import quantized
from refused import refused
from releases import check_read, fp4
from small_recipe import SMALL
from stated_logits import Statement, check_logits
from tiny_models import CONFIGS, random_tensors, write
from torch.nn import functional as F

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.models import find_architecture
from quantkit.models.stored_parameters import read_model

LENGTHS = [40, 7, 1]
TEXT = CONFIGS["kimi_k3"]["text_config"]
DELTA = TEXT["linear_attn_config"]
CASES = {
    "release": {},
    "odd": {
        "attn_res_block_size": 3,
        "num_hidden_layers": 8,
        "latent_moe_use_norm": False,
        "activation_situ_linear_beta": None,
        "activation_situ_beta": None,
        "routed_scaling_factor": 2.5,
        "moe_renormalize": False,
        "num_expert_group": 2,
        "topk_group": 1,
        "rms_norm_eps": 1e-3,
        "num_shared_experts": 2,
        "first_k_dense_replace": 2,
        "linear_attn_config": {
            **DELTA,
            "use_full_rank_gate": False,
            "gate_lower_bound": None,
            "num_heads": 3,
            "head_dim": 24,
            "short_conv_kernel_size": 3,
            "kda_layers": [2, 3, 5, 6],
            "full_attn_layers": [1, 4, 7, 8],
        },
    },
    "every-layer": {"attn_res_block_size": 1, "num_hidden_layers": 4, "first_k_dense_replace": 0}
    | {"linear_attn_config": {**DELTA, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}},
}


def config_of(case):
    config = CONFIGS["kimi_k3"]
    return {**config, "text_config": {**TEXT, **CASES[case]}}


def tensors_of(config):
    """Scores of streams that differ much."""
    return {
        name: one.float() * (6 if name.endswith("res_proj.weight") else 1)
        for name, one in random_tensors(config).items()
    }


class Stated(Statement):
    """One text, all tokens at once, but the recurrence token by token."""

    def __init__(self, config, tensors):
        self.c = {"routed_scaling_factor": 1.0, "moe_renormalize": True} | config["text_config"]
        self.t, self.eps = tensors, self.c["rms_norm_eps"]

    def weight(self, name):
        return self.t[f"language_model.{name}.weight"]

    def linear(self, x, name):
        return x @ self.weight(name).T

    def norm(self, x, name, eps=None):
        return F.rms_norm(x, x.shape[-1:], self.weight(name), self.eps if eps is None else eps)

    def situ(self, gate, up):
        beta, linear = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        beta = beta or 1.0
        up = up if linear is None else linear * torch.tanh(up / linear)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up

    def mlp(self, x, name, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (f"{name}.{own}" for own in names)
        return self.linear(self.situ(self.linear(x, gate), self.linear(x, up)), down)

    def over_residuals(self, current, blocks, name):
        v = torch.stack([*blocks, current], dim=1)
        k = v * (v.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        scores = (k * (self.weight(f"{name}_norm") * self.weight(f"{name}_proj")[0])).sum(-1)
        return (scores.softmax(-1)[:, None] @ v)[:, 0]

    def latent_attention(self, x, p):
        c, heads, nope = self.c, self.c["num_attention_heads"], self.c["qk_nope_head_dim"]
        q = self.norm(self.linear(x, f"{p}.q_a_proj"), f"{p}.q_a_layernorm", 1e-6)
        q = self.linear(q, f"{p}.q_b_proj").unflatten(1, (heads, -1))
        latent, shared = self.linear(x, f"{p}.kv_a_proj_with_mqa").split(
            [c["kv_lora_rank"], c["qk_rope_head_dim"]], dim=1
        )
        kv = self.linear(self.norm(latent, f"{p}.kv_a_layernorm", 1e-6), f"{p}.kv_b_proj")
        k, v = kv.unflatten(1, (heads, -1)).split([nope, c["v_head_dim"]], dim=-1)
        k = torch.cat((k, shared[:, None].expand(-1, heads, -1)), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return self.linear(out * torch.sigmoid(self.linear(x, f"{p}.g_proj")), f"{p}.o_proj")

    def linear_attention(self, x, p):
        own = self.c["linear_attn_config"]
        heads, dim, kernel = own["num_heads"], own["head_dim"], own["short_conv_kernel_size"]

        def side(name):
            y = self.linear(x, f"{p}.{name}_proj").T[None]
            weight = self.weight(f"{p}.{name}_conv1d")
            y = F.conv1d(F.pad(y, (kernel - 1, 0)), weight, groups=len(weight))[0].T
            return F.silu(y).unflatten(1, (heads, dim))

        q, k, v = map(side, "qkv")
        q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
        raw = self.linear(self.linear(x, f"{p}.f_a_proj"), f"{p}.f_b_proj")
        raw = raw + self.t[f"language_model.{p}.dt_bias"]
        raw = raw.unflatten(1, (heads, dim))
        rate = self.t[f"language_model.{p}.A_log"][:heads].exp()[:, None]
        lower = own["gate_lower_bound"]
        decay = -rate * F.softplus(raw) if lower is None else lower * torch.sigmoid(rate * raw)
        beta = torch.sigmoid(self.linear(x, f"{p}.b_proj"))
        state, out = torch.zeros(heads, dim, dim), []
        for t in range(len(x)):
            state = state * decay[t].exp()[..., None]
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
            out.append(torch.einsum("hk,hkv->hv", q[t] * dim**-0.5, state))
        names = ("g_proj",) if own["use_full_rank_gate"] else ("g_a_proj", "g_b_proj")
        gate = functools.reduce(lambda y, name: self.linear(y, f"{p}.{name}"), names, x)
        out = self.norm(torch.stack(out), f"{p}.o_norm") * torch.sigmoid(gate.view_as(v))
        return self.linear(out.flatten(1), f"{p}.o_proj")

    def mixture(self, x, p):
        c = self.c
        scores = torch.sigmoid(self.linear(x, f"{p}.gate"))
        chosen = scores + self.t[f"language_model.{p}.gate.e_score_correction_bias"]
        if (groups := c.get("num_expert_group", 1)) > 1:
            best = chosen.unflatten(1, (groups, -1)).topk(2).values.sum(-1)
            kept = torch.zeros_like(best).scatter_(1, best.topk(c["topk_group"]).indices, 1)
            kept = kept.repeat_interleave(chosen.shape[1] // groups, dim=1)
            chosen = chosen.masked_fill(kept == 0, -torch.inf)
        ids = chosen.topk(c["num_experts_per_token"]).indices
        weights = scores.gather(1, ids)
        if c["moe_renormalize"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        latent = self.linear(x, f"{p}.routed_expert_down_proj")
        routed = torch.zeros_like(latent)
        for token, (own, share) in enumerate(zip(ids, weights * c["routed_scaling_factor"])):
            for expert, weight in zip(own, share):
                one = self.mlp(latent[token], f"{p}.experts.{int(expert)}", ("w1", "w3", "w2"))
                routed[token] += weight * one
        if c["latent_moe_use_norm"]:
            routed = self.norm(routed, f"{p}.routed_expert_norm")
        back = self.linear(routed, f"{p}.routed_expert_up_proj")
        return back + self.mlp(x, f"{p}.shared_experts")

    def logits(self, token_ids):
        current, blocks = self.weight("model.embed_tokens")[token_ids], []
        for layer in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{layer}"
            x, before = current, current
            if blocks:
                x = self.over_residuals(current, blocks, f"{p}.self_attention_res")
            if layer % self.c["attn_res_block_size"] == 0:
                blocks, before = [*blocks, current], 0
            linear = layer + 1 in self.c["linear_attn_config"]["kda_layers"]
            attend = self.linear_attention if linear else self.latent_attention
            current = before + attend(self.norm(x, f"{p}.input_layernorm"), f"{p}.self_attn")
            x = self.over_residuals(current, blocks, f"{p}.mlp_res")
            x = self.norm(x, f"{p}.post_attention_layernorm")
            dense = layer < self.c.get("first_k_dense_replace", 1)
            current = current + (
                self.mlp(x, f"{p}.mlp") if dense else self.mixture(x, f"{p}.block_sparse_moe")
            )
        current = self.over_residuals(current, blocks, "model.output_attn_res")
        return self.linear(self.norm(current, "model.norm"), "lm_head")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_statement_of_the_release(case):
    config_dict = config_of(case)
    tensors = tensors_of(config_dict)
    check_logits(Stated(config_dict, tensors), config_dict, tensors, LENGTHS)


def test_a_text_model_alone_is_not_taken_for_kimi_linear():
    """Its model_type is kimi_linear, too."""
    alone = {**TEXT, "model_type": "kimi_linear"}
    with refused("hidden_act"):
        find_architecture(alone).Config.from_dict(alone)
    for name in ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate"):
        one = {**CONFIGS["kimi_linear"], name: TEXT[name]}
        with refused(name):
            find_architecture(one).Config.from_dict(one)


REFUSED = {
    "hidden_act": "silu",
    "mla_use_output_gate": False,
    "mla_use_nope": False,
    "q_lora_rank": None,
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "moe_router_activation_func": "softmax",
    "moe_layer_freq": 2,
    "use_grouped_topk": False,
    "topk_method": "greedy",
    "attention_bias": True,
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "tie_word_embeddings": True,
    "latent_moe_use_norm": "yes",
    "activation_situ_beta": -1.0,
    "activation_situ_linear_beta": "all",
}
REFUSED_DELTA = {
    "kda_layers": [0, 1],
    "full_attn_layers": [3],
    "gate_lower_bound": 5.0,
    "use_full_rank_gate": 1,
    "num_heads": 200,
}


def test_what_is_not_computed_is_refused():
    config = CONFIGS["kimi_k3"]
    read = find_architecture(config).Config.from_dict
    texts = [(name, {**TEXT, name: value}) for name, value in REFUSED.items()]
    texts += [
        (name, {**TEXT, "linear_attn_config": {**DELTA, name: value}})
        for name, value in REFUSED_DELTA.items()
    ]
    texts += [
        (name, {key: value for key, value in TEXT.items() if key != name})
        for name in ("hidden_act", "mla_use_output_gate", "attn_res_block_size")
    ]
    for name, text in [*texts, ("text_config", None)]:
        with refused(name):
            read({**config, "text_config": text})
    with refused("tie"):
        read({**config, "tie_word_embeddings": 1})


PUBLISHED = {
    **{"hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93},
    **{"num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "vocab_size": 163840},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896},
    **{"num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072},
    **{"routed_expert_hidden_size": 3584, "attn_res_block_size": 12},
}
WIDE = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "correction_bias")
"""In float32 in the release."""
VISION = 447_358_976
"""Values outside the text model, in 168 tensors."""


def test_the_table_has_every_tensor_of_the_release():
    """As many as its index lists, and as many bytes."""
    linear = [layer for layer in range(1, 92) if layer % 4]
    others = [layer for layer in range(1, 94) if layer not in linear]
    own = {**DELTA, "num_heads": 96, "kda_layers": linear, "full_attn_layers": others}
    config_dict = {"model_type": "kimi_k3", "text_config": {**TEXT, **PUBLISHED}}
    config_dict["text_config"]["linear_attn_config"] = own
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    count, size = 168, 2 * VISION
    for row in architecture.parameters(config):
        values, packed = math.prod(row.shape), row.block == "expert"
        count += 1 + packed
        size += values * 17 // 32 if packed else values * (4 if row.name.endswith(WIDE) else 2)
    assert (count, size) == (497_220, 1_560_860_324_864)


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": [
        *(f"re:.*{one}.*" for one in ("self_attn", "shared_experts", "lm_head")),
        *(f"re:.*{one}.*" for one in ("vision_tower", "mm_projector")),
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **{"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
                **{"symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"},
            },
        }
    },
}
"""As published, inside text_config."""


def release(path):
    """A checkpoint as the release is: packed experts, a vision tower; and what its tensors are."""
    stored, worth = {}, {}
    for name, tensor in random_tensors(CONFIGS["kimi_k3"]).items():
        if ".experts." in name:
            module = name.removesuffix(".weight")
            stored[f"{module}.weight_packed"], scale, worth[name] = fp4(tensor)
            stored[f"{module}.weight_scale"] = scale.view(torch.uint8)
        else:
            stored[name] = worth[name] = tensor
    outside = {name: torch.randn(shape).bfloat16() for name, shape in OUTSIDE.items()}
    config = {
        **CONFIGS["kimi_k3"],
        "text_config": {**TEXT, "quantization_config": PACKED},
        "vision_config": {"patch_size": 2},
    }
    return make_model.write_dense(path, config, stored | outside), worth | outside


OUTSIDE = {
    "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
    "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
    "mm_projector.proj.0.weight": (32, 32),
}


def test_the_release_is_read_to_the_bit_and_its_vision_tower_copied(tmp_path):
    made, worth = release(tmp_path / "release")
    found, out = Checkpoint.open(made), tmp_path / "out"
    assert {row.name for row in read_model(found).rows} == {*worth}
    assert {row.module for row in read_model(found).rows if row.block == "expert"} == {
        *found.linears
    }
    check_read(found, worth)
    quantized(made, out, Recipe(scheme="awq-w4a16", **SMALL))
    for name in OUTSIDE:
        assert torch.equal(Checkpoint.open(out).read(name), worth[name])
    own = diagnose(str(made), depth="tensors")
    rounded = diagnose(str(out), source=str(made), depth="tensors")
    for one in (*own.findings.found, *rounded.findings.found):
        assert one.severity != "error", one
    plain, copy = write(tmp_path / "plain", "kimi_k3"), tmp_path / "copy"
    quantized(plain, copy, Recipe(scheme="mxfp4-w4a16", methods=()))
    with refused("already quantized"):
        quantized(copy, tmp_path / "again", "rtn-w4a16")
