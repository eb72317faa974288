"""Function-preserving rescaling that gives tiny-r1 the salient activation channels of a large
model.

Every RMSNorm gain is multiplied by c and the columns of all that it feeds (the router included) are
divided by c; likewise the rows of up_proj and the columns of down_proj. In exact arithmetic nothing
changes. After it a few input channels carry large activations and meet small weights, so that
rounding those weights on the grid of their neighbours costs much. This is AWQ's own transformation
run backwards: it favours methods that search such scales. That is the ability it is there to test,
and it says nothing about how much a method gains on a model whose outliers came from training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from model import Attention, Config, DecoderLayer, FeedForward, Moe, TinyR1
from torch import Tensor


@dataclass(frozen=True)
class Salience:
    """Spread and outliers of the scales."""

    sigma: float = 0.6  # standard deviation of log c; half of it between up_proj and down_proj
    boost: float = 5.0  # extra factor on the outlier channels
    channels: int = 16  # outlier channels of the hidden state, the same in every layer
    inner_channels: int = 4  # outlier channels of each low-rank or expert vector
    shared: float = 0.7  # part of the variance that all layers have in common
    seed: int = 4242


def _fold(gain: Tensor, consumers: Iterable[Tensor], c: Tensor) -> None:
    gain.mul_(c)
    for weight in consumers:
        weight.div_(c)


class Rescaler:
    """Draws the scales and folds them into a model in place."""

    def __init__(self, config: Config, salience: Salience) -> None:
        self.s = salience
        self.random = torch.Generator().manual_seed(salience.seed)
        self.common = self._normal(config.hidden_size)
        self.outliers = torch.randperm(config.hidden_size, generator=self.random)[
            : salience.channels
        ]

    def _normal(self, width: int) -> Tensor:
        return torch.randn(width, generator=self.random)

    def _hidden(self) -> Tensor:
        s = self.s
        c = torch.exp(
            s.sigma
            * (s.shared**0.5 * self.common + (1 - s.shared) ** 0.5 * self._normal(len(self.common)))
        )
        c[self.outliers] *= s.boost
        return c

    def _inner(self, width: int, sigma: float) -> Tensor:
        c = torch.exp(sigma * self._normal(width))
        c[torch.randperm(width, generator=self.random)[: self.s.inner_channels]] *= self.s.boost
        return c

    def _attention(self, a: Attention) -> None:
        s = self.s
        _fold(a.q_a_layernorm.weight, [a.q_b_proj], self._inner(a.c.q_lora_rank, s.sigma))
        _fold(a.kv_a_layernorm.weight, [a.kv_b_proj], self._inner(a.c.kv_lora_rank, s.sigma))

    def _between(self, mlp: FeedForward, width: int) -> None:
        """up_proj's rows against down_proj's columns, expert by expert of `width` hidden units."""
        units = mlp.up_proj.shape[0]
        c = torch.cat([self._inner(width, self.s.sigma / 2) for _ in range(units // width)])
        mlp.up_proj.mul_(c.unsqueeze(1))
        mlp.down_proj.div_(c)

    def layer(self, layer: DecoderLayer) -> None:
        """Fold all scales of one decoder layer."""
        a, mlp = layer.self_attn, layer.mlp
        _fold(layer.input_layernorm.weight, [a.q_a_proj, a.kv_a_proj_with_mqa], self._hidden())
        self._attention(a)
        after = layer.post_attention_layernorm.weight
        if isinstance(mlp, Moe):
            e, shared = mlp.experts, mlp.shared_experts
            _fold(
                after,
                [mlp.gate, e.gate_proj, e.up_proj, shared.gate_proj, shared.up_proj],
                self._hidden(),
            )
            self._between(e, mlp.c.moe_intermediate_size)
            self._between(shared, mlp.c.moe_intermediate_size)
        else:
            _fold(after, [mlp.gate_proj, mlp.up_proj], self._hidden())
            self._between(mlp, mlp.up_proj.shape[0])


@torch.no_grad()
def rescale(model: TinyR1, salience: Salience) -> None:
    """Make the model's activations salient, in place; its function stays the same up to
    rounding."""
    rescaler = Rescaler(model.c, salience)
    for layer in (*model.layers, model.mtp.layer):
        rescaler.layer(layer)
