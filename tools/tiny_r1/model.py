"""tiny-r1 in the formulation it is trained in: the function of DeepSeek-V3, with all experts as one
wide SwiGLU.

Every expert is computed and its hidden units are multiplied by its routing weight, zero where it is
not chosen. That is four times the arithmetic, but no gather and no scatter, and the compiler fuses
all of it. `export.py` cuts the wide matrices into R1's tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes, named as in config.json."""

    vocab_size: int = 640
    hidden_size: int = 384
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 8
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    rope_original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def rope_frequencies(c: Config) -> Tensor:
    """Yarn's blend of the original and the interpolated frequencies, [qk_rope_head_dim / 2] (Peng
    et al. 2023, as DeepSeek-V3 uses it)."""
    dim = c.qk_rope_head_dim
    base = 1.0 / c.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def turns_at(beta: float) -> float:
        return dim * math.log(c.rope_original / (beta * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    low = max(math.floor(turns_at(c.beta_fast)), 0)
    high = min(math.ceil(turns_at(c.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    return base / c.rope_factor * ramp + base * (1 - ramp)


def softmax_scale(c: Config) -> float:
    """1/sqrt(head width) times the square of yarn's magnitude (mscale_all_dim = 1)."""
    magnitude = 0.1 * math.log(c.rope_factor) + 1.0
    return (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * magnitude * magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs of the last dimension. x [B, S, heads, D], cos and sin [B, S, 1,
    D/2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def linear(out_features: int, in_features: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(
        torch.randn(out_features, in_features) * (0.6 * gain / math.sqrt(in_features))
    )


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.exp(0.1 * torch.randn(width)))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        heads, depth = c.num_attention_heads, c.num_hidden_layers
        self.q_a_proj = linear(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = Norm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = linear(heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank)
        self.kv_a_proj_with_mqa = linear(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = linear(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o_proj = linear(c.hidden_size, heads * c.v_head_dim, depth**-0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        c, (b, s, _) = self.c, x.shape
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        q = F.linear(self.q_a_layernorm(F.linear(x, self.q_a_proj)), self.q_b_proj).view(
            b, s, heads, nope + rope
        )
        latent, k_rope = F.linear(x, self.kv_a_proj_with_mqa).split((c.kv_lora_rank, rope), -1)
        kv = F.linear(self.kv_a_layernorm(latent), self.kv_b_proj).view(
            b, s, heads, nope + c.v_head_dim
        )
        k_nope, v = kv.split((nope, c.v_head_dim), -1)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin).to(q.dtype)), -1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin).to(q.dtype).expand(b, s, heads, rope)
        k = torch.cat((k_nope, k_rope), -1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            scale=softmax_scale(c),
        )
        return F.linear(out.transpose(1, 2).reshape(b, s, heads * c.v_head_dim), self.o_proj)


class FeedForward(nn.Module):
    """SwiGLU; a hidden unit may be weighted before the last product."""

    def __init__(self, hidden: int, width: int, depth: int, fan_in: int) -> None:
        super().__init__()
        self.gate_proj = linear(width, hidden)
        self.up_proj = linear(width, hidden)
        self.down_proj = nn.Parameter(
            torch.randn(hidden, width) * (0.6 / math.sqrt(fan_in * depth))
        )

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        h = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)
        return F.linear(h if weight is None else h * weight, self.down_proj)


class Moe(nn.Module):
    """Routed experts side by side in one wide SwiGLU, and the shared expert. `load` holds the last
    forward's share of each expert."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        width, depth = c.moe_intermediate_size, c.num_hidden_layers
        self.gate = linear(c.n_routed_experts, c.hidden_size)
        self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.experts = FeedForward(
            c.hidden_size, c.n_routed_experts * width, depth, c.num_experts_per_tok * width
        )
        self.shared_experts = FeedForward(
            c.hidden_size, c.n_shared_experts * width, depth, c.n_shared_experts * width
        )

    def route(self, x: Tensor) -> Tensor:
        """Routing weight of every expert, 0 where it is not chosen: [..., n_routed_experts]
        float32. Ranks are counted, not sorted."""
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.gate.float()))
        choice = (scores + self.bias).detach()
        grouped = choice.unflatten(-1, (c.n_group, -1))
        rank = (grouped.unsqueeze(-2) > grouped.unsqueeze(-1)).sum(-1)
        group = (grouped * (rank < 2)).sum(-1)
        kept = (group.unsqueeze(-2) > group.unsqueeze(-1)).sum(-1) < c.topk_group
        choice = torch.where(kept.unsqueeze(-1), grouped, -1e9).flatten(-2)
        chosen = (choice.unsqueeze(-2) > choice.unsqueeze(-1)).sum(-1) < c.num_experts_per_tok
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.route(x)
        spread = weights.to(x.dtype).repeat_interleave(self.c.moe_intermediate_size, -1)
        return self.experts(x, spread) + self.shared_experts(x), (weights > 0).float().flatten(
            0, -2
        ).mean(0)


class DecoderLayer(nn.Module):
    """One decoder layer; returns its output and the load of its experts (empty for a dense
    layer)."""

    def __init__(self, c: Config, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = (
            FeedForward(
                c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.intermediate_size
            )
            if dense
            else Moe(c)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        y = self.mlp(self.post_attention_layernorm(x))
        y, load = y if isinstance(y, tuple) else (y, x.new_zeros(0))
        return x + y, load


class Mtp(nn.Module):
    """The layer that predicts the token after next: it reads eh_proj([enorm(embedding of the next
    token), hnorm(final hidden state)])."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.enorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = linear(c.hidden_size, 2 * c.hidden_size)
        self.layer = DecoderLayer(c, dense=False)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class TinyR1(nn.Module):
    """The whole model with its MTP layer."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size) * 0.02)
        self.layers = nn.ModuleList(
            DecoderLayer(c, i < c.first_k_dense_replace) for i in range(c.num_hidden_layers)
        )
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = linear(c.vocab_size, c.hidden_size)
        self.mtp = Mtp(c)
        self.register_buffer("frequencies", rope_frequencies(c), persistent=False)

    def moes(self) -> list[Moe]:
        """The mixture layers in the order of the loads that `forward` returns, the MTP layer
        last."""
        return [layer.mlp for layer in (*self.layers, self.mtp.layer) if isinstance(layer.mlp, Moe)]

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens and positions [B, S], mask bool [B, 1, S, S] -> logits and MTP logits [B, S,
        vocab], loads [moe layers, experts].

        The MTP logits at i predict token i + 2; at the last position, whose next token is unknown,
        they mean nothing.
        """
        angle = positions.float().unsqueeze(-1) * self.frequencies
        cos, sin = angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)
        embedded = F.embedding(tokens, self.embed)
        x, loads = embedded, []
        for layer in self.layers:
            x, load = layer(x, cos, sin, mask)
            loads.append(load)
        final = self.norm(x)
        following = torch.roll(embedded, -1, 1)
        m = self.mtp
        y = F.linear(torch.cat((m.enorm(following), m.hnorm(final)), -1), m.eh_proj)
        y, load = m.layer(y, cos, sin, mask)
        loads = torch.stack([x for x in (*loads, load) if x.numel()])
        return F.linear(final, self.lm_head), F.linear(m.norm(y), self.lm_head), loads
