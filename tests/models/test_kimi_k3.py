"""Kimi-K3 against a statement of the release's public code (modeling_kimi_linear.py), written out
here in float32 token by token, for transformers does not have it; and over a cache, however a text
is cut."""

import functools
import math
import random

import make_model
import pytest
import torch
from cut_texts import furthest_from_whole
from engines import check_same_answers, load
from plain_weights import PlainWeights
from quantkit_kernels import rms_norm
from refused import refused
from tiny_models import CONFIGS, random_tensors, write
from torch.nn import functional as F
from ulp_bound import assert_near, movement

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.executor.weights.load import load_model
from quantkit.grids.base import dequantize
from quantkit.grids.schemes import SCHEMES
from quantkit.models import attention_residuals, find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import read_model
from quantkit.quantization.run import quantize

LENGTHS = [40, 7, 1]
TOKEN_IDS = torch.randint(1, 320, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
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


class Stated:
    """One text, all tokens at once, but the recurrence token by token."""

    def __init__(self, config, tensors):
        self.c = {"routed_scaling_factor": 1.0, "moe_renormalize": True} | config["text_config"]
        self.tensors, self.eps = tensors, self.c["rms_norm_eps"]

    def t(self, name):
        return self.tensors[f"language_model.{name}.weight"]

    def linear(self, x, name):
        return x @ self.t(name).T

    def norm(self, x, name, eps=None):
        return F.rms_norm(x, x.shape[-1:], self.t(name), self.eps if eps is None else eps)

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
        scores = (k * (self.t(f"{name}_norm") * self.t(f"{name}_proj")[0])).sum(-1)
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
            weight = self.t(f"{p}.{name}_conv1d")
            y = F.conv1d(F.pad(y, (kernel - 1, 0)), weight, groups=len(weight))[0].T
            return F.silu(y).unflatten(1, (heads, dim))

        q, k, v = map(side, "qkv")
        q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
        raw = self.linear(self.linear(x, f"{p}.f_a_proj"), f"{p}.f_b_proj")
        raw = raw + self.tensors[f"language_model.{p}.dt_bias"]
        raw = raw.unflatten(1, (heads, dim))
        rate = self.tensors[f"language_model.{p}.A_log"][:heads].exp()[:, None]
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
        chosen = scores + self.tensors[f"language_model.{p}.gate.e_score_correction_bias"]
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

    def __call__(self, token_ids):
        current, blocks = self.t("model.embed_tokens")[token_ids], []
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
    """Of the whole stack, and layer by layer as calibration walks it."""
    config_dict = config_of(case)
    architecture = find_architecture(config_dict)
    config, tensors = architecture.Config.from_dict(config_dict), tensors_of(config_dict)
    with torch.no_grad():
        stated = Stated(config_dict, tensors)

        def logits():
            return torch.cat([stated(own) for own in TOKEN_IDS.split(LENGTHS)])

        expected = logits()
        moved = movement(logits, tensors.values())
        model = architecture.Model(config, PlainWeights(tensors, config.mixture.linears))
        whole = model(TOKEN_IDS, CausalContext(LENGTHS))
        assert expected.abs().max() > 1
        assert_near(model.logits(whole), expected, moved)
        context, streams = CausalContext(LENGTHS), config.streams
        hidden = streams.first(model.embedding[TOKEN_IDS], TOKEN_IDS)
        for layer in model.layers:
            hidden = layer.feed_forward(layer.attend(hidden, context), context)
        gains = PlainWeights(tensors)
        end = rms_norm(
            streams.merged(hidden, gains, model.norm, stated.eps), model.norm, stated.eps
        )
    assert (end - whole).abs().max() < 1e-4
    table = {row.name: row.shape for row in architecture.parameters(config)}
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_a_text_is_the_same_however_it_is_cut(tmp_path, monkeypatch):
    """Latents are cached as they are, not in 16 bits, by which experts would change; streams are
    read a few tokens at once."""
    monkeypatch.setattr(attention_residuals, "_ROWS", 7)
    monkeypatch.setattr("quantkit.executor.weights.load.cached_dtype", lambda dtype: dtype)
    loaded = load_model(write(tmp_path / "model", "kimi_k3"), device="cpu", dtype="float32")
    assert furthest_from_whole(loaded, random.Random(4)) < 1e-4


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
    for name, value in REFUSED.items():
        with refused(name):
            read({**config, "text_config": {**TEXT, name: value}})
    for name, value in REFUSED_DELTA.items():
        own = {**TEXT, "linear_attn_config": {**DELTA, name: value}}
        with refused(name):
            read({**config, "text_config": own})
    for name in ("hidden_act", "mla_use_output_gate", "attn_res_block_size"):
        with refused(name):
            read({**config, "text_config": {k: v for k, v in TEXT.items() if k != name}})
    for changed, line in (
        ({"text_config": None}, "text_config"),
        ({"tie_word_embeddings": 1}, "tie"),
    ):
        with refused(line):
            read({**config, **changed})


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


VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat((VALUES, -VALUES))
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
    plain = random_tensors(CONFIGS["kimi_k3"])
    rng, stored, expected = torch.Generator().manual_seed(5), {}, {}
    for name, tensor in plain.items():
        if ".experts." not in name:
            stored[name] = expected[name] = tensor
            continue
        module, (rows, columns) = name.removesuffix(".weight"), tensor.shape
        codes = torch.randint(0, 16, tensor.shape, generator=rng, dtype=torch.uint8)
        scales = torch.randint(118, 123, (rows, columns // 32), generator=rng, dtype=torch.uint8)
        stored[f"{module}.weight_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
        stored[f"{module}.weight_scale"] = scales
        scale = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
        expected[name] = E2M1[codes.long()] * scale
    outside = {
        "vision_tower.patch_embed.proj.weight": torch.randn(8, 3, 2, 2, generator=rng).bfloat16(),
        "vision_tower.encoder.blocks.0.wqkv.weight": torch.randn(24, 8, generator=rng).bfloat16(),
        "mm_projector.proj.0.weight": torch.randn(32, 32, generator=rng).bfloat16(),
    }
    config = {
        **CONFIGS["kimi_k3"],
        "text_config": {**TEXT, "quantization_config": PACKED},
        "vision_config": {"patch_size": 2},
    }
    return make_model.write_dense(path, config, stored | outside), expected | outside


def test_the_release_is_read_to_the_bit_and_its_vision_tower_copied(tmp_path):
    made, expected = release(tmp_path / "release")
    found = Checkpoint.open(made)
    assert {row.name for row in read_model(found).rows} == {*expected}
    for row in read_model(found).rows:
        packed = row.module in found.linears
        assert packed == (row.block == "expert")
        read = dequantize(found.weight(row.module)) if packed else found.read(row.name)
        assert torch.equal(read.float(), expected[row.name].float()), row.name
    text, awq = tmp_path / "text.txt", "awq-w4a16"
    text.write_text(" ".join(str(i * i % 97) for i in range(900)))
    sizes = {"samples": 4, "held_out": 2, "seq_len": 48, "search_rows": 16}
    recipe = Recipe(scheme=awq, calibration=str(text), **sizes)
    quantize(made, tmp_path / "out", SCHEMES[awq], "auto", recipe)
    out = Checkpoint.open(tmp_path / "out")
    for name in expected:
        if name.startswith(("vision_tower.", "mm_projector.")):
            assert torch.equal(out.read(name), expected[name])
    own = diagnose(str(made), depth="tensors")
    rounded = diagnose(str(tmp_path / "out"), source=str(made), depth="tensors")
    for one in (*own.findings.found, *rounded.findings.found):
        assert one.severity != "error", one
    scheme = SCHEMES["mxfp4-w4a16"]
    plain = write(tmp_path / "plain", "kimi_k3")
    copy = tmp_path / "copy"
    quantize(plain, copy, scheme, "auto", Recipe(scheme=scheme.name, methods=()))
    with refused("already quantized"):
        quantize(copy, tmp_path / "again", SCHEMES["rtn-w4a16"], "auto", Recipe(scheme="rtn-w4a16"))


def test_answers_do_not_depend_on_how_they_are_computed(tmp_path):
    """Prompts in chunks and beside steps, requests that make way for others, captured steps; what
    cannot be is refused."""
    path = write(tmp_path / "model", "kimi_k3")
    check_same_answers(path, (True, {}))
    for options, line in (
        ({"draft_length": 1}, "no MTP layer"),
        ({"prompt_lookup": 2}, "cannot be rolled back"),
        ({"prefix_cache": True}, "cannot share"),
    ):
        with refused(line):
            load(path, **options)
