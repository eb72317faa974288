"""openPangu-Ultra-MoE against a plain statement of its public description, written apart from the
model code."""

from dataclasses import replace

import pytest
import torch
from plain_weights import PlainWeights
from scaled_groups import drawn_scale
from torch import Tensor

from quantkit.models import find_architecture, pangu_ultra_moe
from quantkit.models.context import CausalContext
from quantkit.models.pangu_ultra_moe import FIRST_RELEASE_NAMES
from quantkit.models.table import resolve

CONFIG = {
    "model_type": "pangu_ultra_moe",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 25600000.0,
    "num_nextn_predict_layers": 1,
    "sandwich_norm": True,
}


def random_tensors(config: dict, with_bias: bool) -> dict[str, Tensor]:
    architecture = find_architecture(config)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        noise = torch.randn(row.shape, generator=generator)
        if row.role == "router_bias":
            if with_bias:
                tensors[row.name] = noise * 0.2
        else:
            tensors[row.name] = 1 + 0.2 * noise if row.role == "norm" else noise * 0.3
    return tensors


def statement(
    c: dict, w: dict[str, Tensor], token_ids: Tensor, bias: str | None, interleaved: bool
) -> Tensor:
    """One sequence, one head and one token at a time."""

    def norm(x: Tensor, name: str) -> Tensor:
        return (
            x / (x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]
        )

    def turn(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = torch.tensor(
                position * c["rope_theta"] ** (-2 * i / len(x)), dtype=torch.float64
            )
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            out[a] = x[a] * angle.cos() - x[b] * angle.sin()
            out[b] = x[b] * angle.cos() + x[a] * angle.sin()
        return out

    def attention(x: Tensor, p: str) -> Tensor:
        nope, pe, v_dim, heads = (
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
            c["num_attention_heads"],
        )
        compressed = x @ w[f"{p}.kv_a_proj_with_mqa.weight"].T
        latent, shared_key = (
            norm(compressed[:, : c["kv_lora_rank"]], f"{p}.kv_a_layernorm"),
            compressed[:, c["kv_lora_rank"] :],
        )
        q = (
            norm(x @ w[f"{p}.q_a_proj.weight"].T, f"{p}.q_a_layernorm")
            @ w[f"{p}.q_b_proj.weight"].T
        )
        kv = latent @ w[f"{p}.kv_b_proj.weight"].T
        rows = []
        for t in range(len(x)):
            row = []
            for head in range(heads):
                query = q[t, head * (nope + pe) : (head + 1) * (nope + pe)]
                query = torch.cat((query[:nope], turn(query[nope:], t)))
                scores, values = [], []
                for s in range(t + 1):
                    one = kv[s, head * (nope + v_dim) : (head + 1) * (nope + v_dim)]
                    scores.append(
                        query
                        @ torch.cat((one[:nope], turn(shared_key[s], s)))
                        * (nope + pe) ** -0.5
                    )
                    values.append(one[nope:])
                row.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            rows.append(torch.cat(row))
        return torch.stack(rows) @ w[f"{p}.o_proj.weight"].T

    def gated(x: Tensor, p: str) -> Tensor:
        gate = x @ w[f"{p}.gate_proj.weight"].T
        return (gate * torch.sigmoid(gate) * (x @ w[f"{p}.up_proj.weight"].T)) @ w[
            f"{p}.down_proj.weight"
        ].T

    def experts(x: Tensor, p: str) -> Tensor:
        scores = torch.sigmoid(x @ w[f"{p}.gate.weight"].T)
        choice = scores + w[bias.format(p=p)].double() if bias else scores
        rows = []
        for t in range(len(x)):
            chosen = choice[t].topk(c["num_experts_per_tok"]).indices.tolist()
            total = scores[t, chosen].sum()
            routed = sum(
                scores[t, e] / total * c["routed_scaling_factor"] * gated(x[t], f"{p}.experts.{e}")
                for e in chosen
            )
            rows.append(routed + gated(x[t], f"{p}.shared_experts"))
        return torch.stack(rows)

    h = w["model.embed_tokens.weight"][token_ids]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        h = h + norm(
            attention(norm(h, f"{p}.input_layernorm"), f"{p}.self_attn"),
            f"{p}.post_attention_layernorm",
        )
        half = gated if layer < c["first_k_dense_replace"] else experts
        h = h + norm(half(norm(h, f"{p}.pre_mlp_layernorm"), f"{p}.mlp"), f"{p}.post_mlp_layernorm")
    return norm(h, "model.norm") @ w["lm_head.weight"].T


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "bias", [None, "{p}.gate.e_score_correction_bias", "{p}.e_score_correction_bias"]
)
def test_logits_equal_the_statement(interleaved: bool, bias: str | None) -> None:
    config_dict = {**CONFIG, "rope_interleave": True} if interleaved else CONFIG
    architecture = find_architecture(config_dict)
    tensors = random_tensors(config_dict, with_bias=bias is not None)
    if bias == "{p}.e_score_correction_bias":
        tensors = {
            name.replace(".gate.e_score", ".e_score"): tensor for name, tensor in tensors.items()
        }
    token_ids = torch.randint(0, 97, (11,), generator=torch.Generator().manual_seed(1))
    expected = statement(
        config_dict,
        {name: tensor.double() for name, tensor in tensors.items()},
        token_ids,
        bias,
        interleaved,
    )
    model = architecture.Model(architecture.Config.from_dict(config_dict), PlainWeights(tensors))
    logits = model.logits(model(token_ids, CausalContext([11])))
    assert expected.abs().max() > 1
    assert (logits.double() - expected).abs().max() < 1e-4

    rows = resolve(architecture.parameters(model.config), tensors)
    assert {row.name for row in rows} == set(tensors)


def test_both_releases_name_the_same_model() -> None:
    first = {old: CONFIG[new] for old, new in FIRST_RELEASE_NAMES.items()}
    rest = {key: value for key, value in CONFIG.items() if key not in FIRST_RELEASE_NAMES.values()}
    architecture = find_architecture(CONFIG)
    assert architecture.Config.from_dict({**rest, **first}) == architecture.Config.from_dict(CONFIG)


def test_folding_keeps_the_logits_and_spares_the_post_norms() -> None:
    architecture = find_architecture(CONFIG)
    config = architecture.Config.from_dict(CONFIG)
    tensors = random_tensors(CONFIG, with_bias=True)
    token_ids = torch.arange(20)

    def logits(weights: dict[str, Tensor]) -> Tensor:
        model = architecture.Model(config, PlainWeights(weights))
        return model.logits(model(token_ids, CausalContext([20])))

    folded = dict(tensors)
    for layer in range(config.num_hidden_layers):
        for group in architecture.scale_groups(config, layer):
            producer = folded[f"{group.producer}.weight"]
            by, scale = drawn_scale(group, len(producer), lambda count: torch.rand(count) + 0.5)
            folded[f"{group.producer}.weight"] = producer / (
                by if group.producer_is_norm else by[:, None]
            )
            for consumer in group.consumers:
                folded[f"{consumer}.weight"] = folded[f"{consumer}.weight"] * scale
    changed = {name for name in tensors if not torch.equal(tensors[name], folded[name])}
    assert not [name for name in changed if "post_" in name]
    assert "model.layers.1.mlp.gate.weight" in changed
    expected = logits(tensors)
    assert (logits(folded) - expected).abs().max() < 1e-3 * expected.abs().max()


def test_mtp_layer_has_the_sandwich_norms() -> None:
    architecture = find_architecture(CONFIG)
    config = architecture.Config.from_dict(CONFIG)
    tensors = random_tensors(CONFIG, with_bias=True)
    weights = PlainWeights(tensors)
    mtp = architecture.MtpLayer(config, weights)
    hidden = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(5))
    plain = mtp(torch.arange(9), hidden, CausalContext([9]))
    doubled = {
        name: tensor * 2 if "3.post_mlp" in name else tensor for name, tensor in tensors.items()
    }
    assert not torch.allclose(
        plain,
        architecture.MtpLayer(config, PlainWeights(doubled))(
            torch.arange(9), hidden, CausalContext([9])
        ),
    )
    assert config == replace(config)


def test_the_pass_over_a_layer_is_every_layers() -> None:
    """Which rows go on behind the attention is decided in one place; of a sandwich only what is
    added differs."""
    assert "__call__" not in vars(pangu_ultra_moe.DecoderLayer)
