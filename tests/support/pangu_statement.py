"""openPangu's models as the vendor describes them, written apart from the model code."""

import stated_logits
import torch
from torch.nn import functional as F

from quantkit.models import find_architecture

BIASES = (".gate.e_score_correction_bias", ".e_score_correction_bias")
"""Names of the router's bias, after the layer's mlp."""


def random_tensors(config):
    architecture, generator = find_architecture(config), torch.Generator().manual_seed(5)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        noise = torch.randn(row.shape, generator=generator)
        gain = row.role == "norm" or row.name.endswith("norm_gamma")
        tensors[row.name] = (
            1 + 0.3 * noise
            if gain
            else noise * (0.5 if len(row.shape) == 1 else row.shape[-1] ** -0.5)
        )
    return tensors


def norm(x, gain, eps):
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Statement(stated_logits.Statement):
    """One text through the model as the vendor's description has it, every matrix spelled out;
    nothing of quantkit. What config.json does not have is left out: openPangu-Ultra-MoE has one
    stream, no convolution, no learned tokens, no windows and no indexer."""

    def __init__(self, config, tensors):
        self.c, self.t = config, tensors

    def logits(self, token_ids):
        return (
            norm(self.merged(token_ids), self.t["model.norm.weight"], self.c["rms_norm_eps"])
            @ self.t["lm_head.weight"].T
        )

    def merged(self, token_ids):
        n, eps = self.c.get("mhc_num_stream", 1), self.c["rms_norm_eps"]
        x = self.t["model.embed_tokens.weight"][token_ids].repeat(1, n)
        for layer in range(self.c["num_hidden_layers"]):
            x = self.layer(x, layer) if "mhc_num_stream" in self.c else self.sandwich(x, layer)
        if "mhc_num_stream" not in self.c:
            return x
        merge = "model.merge_mhc_module"
        made = norm(x, self.t[f"{merge}.norm_gamma"], eps) @ self.t[f"{merge}.phi.weight"].T
        counts = (
            torch.sigmoid(
                made * self.t[f"{merge}.branch_alpha_pre"] + self.t[f"{merge}.branch_beta_pre"]
            )
            + 1e-6
        )
        return torch.einsum("tn,tnh->th", counts, x.unflatten(1, (n, -1)))

    def guessed(self, number, next_ids, states):
        """What an MTP layer makes of states [T, H] that were not normed, and its logits."""
        layer, eps = self.c["num_hidden_layers"] + number, self.c["rms_norm_eps"]
        p = f"model.layers.{layer}"

        def normed(name, y):
            return norm(y, self.t[f"{p}.{name}.weight"], eps)

        embedded = normed("enorm", self.t[f"{p}.embed_tokens.weight"][next_ids])
        x = torch.cat((embedded, normed("hnorm", states)), dim=-1) @ self.t[f"{p}.eh_proj.weight"].T
        x = self.sandwich(x, layer)
        return x, normed("shared_head.norm", x) @ self.t[f"{p}.shared_head.head.weight"].T

    def sandwich(self, x, layer):
        def normed(name, y):
            return norm(y, self.t[f"model.layers.{layer}.{name}.weight"], self.c["rms_norm_eps"])

        x = x + normed(
            "post_attention_layernorm", self.attention(normed("input_layernorm", x), layer)
        )
        x = x + normed(
            "post_mlp_layernorm", self.feed_forward(normed("pre_mlp_layernorm", x), layer)
        )
        return x

    def layer(self, x, layer):
        p, eps = f"model.layers.{layer}", self.c["rms_norm_eps"]

        def normed(name, y):
            return norm(y, self.t[f"{p}.{name}.weight"], eps)

        for module, half, before, after in (
            ("attn_mhc_module", self.attention, "input_layernorm", "post_attention_layernorm"),
            ("mlp_mhc_module", self.feed_forward, "pre_mlp_layernorm", "post_mlp_layernorm"),
        ):
            collapsed, post, mixing = self.connection(x, f"{p}.{module}")
            made = normed(after, half(normed(before, collapsed), layer))
            streams = x.unflatten(1, (self.c["mhc_num_stream"], -1))
            x = (
                post[..., None] * made[:, None] + torch.einsum("tij,tih->tjh", mixing, streams)
            ).flatten(1)
        return (
            normed("block_post_layernorm", x) if layer in self.c["block_post_layernorm_idx"] else x
        )

    def connection(self, x, p):
        n = self.c["mhc_num_stream"]
        made = (
            norm(x, self.t[f"{p}.norm_gamma"], self.c["rms_norm_eps"]) @ self.t[f"{p}.phi.weight"].T
        )
        alpha, beta = self.t[f"{p}.branch_alpha"], self.t[f"{p}.branch_beta"]
        pre = torch.sigmoid(made[:, :n] * alpha[0] + beta[:n]) + 1e-6
        post = 2 * torch.sigmoid(made[:, n : 2 * n] * alpha[1] + beta[n : 2 * n])
        mixing = ((made[:, 2 * n :] * alpha[2] + beta[2 * n :]).view(-1, n, n)).softmax(-1) + 1e-6
        for step in range(self.c["mhc_recur_norm"]):
            mixing = mixing if step == 0 else mixing / (mixing.sum(-1, keepdim=True) + 1e-6)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + 1e-6)
        return torch.einsum("tn,tnh->th", pre, x.unflatten(1, (n, -1))), post, mixing

    def short_convolve(self, x, name):
        if f"{name}.weight" not in self.t:
            return x
        kernel, out = self.t[f"{name}.weight"][:, 0], x.clone()
        width = kernel.shape[1]
        for token in range(width - 1, len(x)):
            out[token] += (x[token - width + 1 : token + 1].T * kernel).sum(1)
        return out

    def turned(self, x):
        """x [T, heads, R] of tokens 0 .. T - 1."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x), dtype=x.dtype)[:, None] * self.c["rope_theta"] ** (
            -torch.arange(half, dtype=x.dtype) / half
        )
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        if self.c.get("rope_interleave"):
            return torch.view_as_real(
                torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * turn
            ).flatten(-2)
        made = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((made.real, made.imag), dim=-1)

    def attention(self, x, layer):
        a, c, eps, count = f"model.layers.{layer}.self_attn", self.c, self.c["rms_norm_eps"], len(x)
        heads, nope, rotary, rank = (
            c[key]
            for key in (
                "num_attention_heads",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "kv_lora_rank",
            )
        )
        q_a = self.short_convolve(x @ self.t[f"{a}.q_a_proj.weight"].T, f"{a}.qa_conv")
        q_a = norm(q_a, self.t[f"{a}.q_a_layernorm.weight"], eps)
        q = (q_a @ self.t[f"{a}.q_b_proj.weight"].T).view(count, heads, -1)
        q = torch.cat((q[..., :nope], self.turned(q[..., nope:])), dim=-1)
        kv = x @ self.t[f"{a}.kv_a_proj_with_mqa.weight"].T
        latent, key = (
            self.short_convolve(kv[:, :rank], f"{a}.compresskv_conv"),
            self.turned(kv[:, None, rank:])[:, 0],
        )
        sinks = c.get("param_sink_number", 0)
        if sinks:
            latent = torch.cat((self.t[f"{a}.param_sink_compressed_kv"], latent))
            key = torch.cat((self.t[f"{a}.param_sink_k_pe"], key))
        wide = (
            norm(latent, self.t[f"{a}.kv_a_layernorm.weight"], eps)
            @ self.t[f"{a}.kv_b_proj.weight"].T
        )
        wide = wide.view(len(latent), heads, -1)
        k = torch.cat((wide[..., :nope], key[:, None].expand(-1, heads, -1)), dim=-1)
        scores = torch.einsum("thd,shd->hts", q, k) * (nope + rotary) ** -0.5
        seen = torch.cat(
            (torch.ones(count, sinks, dtype=torch.bool), self.seen(x, q_a, layer)), dim=1
        )
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shv->thv", shares, wide[..., nope:]).flatten(1)
        return self.short_convolve(out, f"{a}.o_conv") @ self.t[f"{a}.o_proj.weight"].T

    def seen(self, x, q_a, layer):
        c, count = self.c, len(x)
        at = torch.arange(count)
        causal = at[:, None] >= at
        if layer in c.get("swa_layers", ()):
            window = (c["sliding_window_list"] or [c.get("sliding_window")] * 9)[
                c["swa_layers"].index(layer)
            ]
            return causal & (at[:, None] - at < window)
        if layer not in (c.get("dsa_layers") or []) or count <= c["index_topk"]:
            return causal
        p, rotary, dim = (
            f"model.layers.{layer}.self_attn.indexer",
            c["qk_rope_head_dim"],
            c["index_head_dim"],
        )
        q = (q_a @ self.t[f"{p}.wq_b.weight"].T).view(count, -1, dim)
        k = norm(x @ self.t[f"{p}.wk.weight"].T, self.t[f"{p}.k_norm.weight"], 1e-6)[:, None]
        q, k = (
            torch.cat((self.turned(side[..., :rotary]), side[..., rotary:]), dim=-1)
            for side in (q, k)
        )
        products = torch.relu(torch.einsum("thd,sd->ths", q, k[:, 0]))
        scores = torch.einsum(
            "ths,th->ts", products, x @ self.t[f"{p}.weights_proj.weight"].T
        ).masked_fill(~causal, -torch.inf)
        return causal & torch.zeros_like(causal).scatter_(
            1, scores.topk(c["index_topk"]).indices, True
        )

    def feed_forward(self, x, layer):
        p, c = f"model.layers.{layer}.mlp", self.c
        if layer < c["first_k_dense_replace"]:
            return self.mlp(x, p)
        scores = torch.sigmoid(x @ self.t[f"{p}.gate.weight"].T)
        bias = next((f"{p}{one}" for one in BIASES if f"{p}{one}" in self.t), None)
        choice = scores if bias is None else scores + self.t[bias]
        chosen = choice.topk(c["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        routed = [
            sum(w * self.mlp(row, f"{p}.experts.{int(e)}") for e, w in zip(*one))
            for row, one in zip(x, zip(chosen, weights))
        ]
        return torch.stack(routed) + self.mlp(x, f"{p}.shared_experts")

    def mlp(self, x, p):
        gate, up, down = (self.t[f"{p}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
