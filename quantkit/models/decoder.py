"""What the architectures share: layers of two halves around a residual stream, and the stack of
them.

A half is h + f(norm(h)). The stack computes the sum of one half, over the ranks too, and the norm
of the next as one operator, so a layer is called with the normed input of its first half and the
residual stream, and returns both for whoever comes next. Calibration walks the halves one by one,
residual included: `attend` and `feed_forward` compute the same, operator by operator.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from quantkit_kernels import UnsummedPairs, by_own_backend, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.context import Context
from quantkit.models.mlp import Mlp, MoeMlp
from quantkit.models.weights import Weights


class StackConfig(Protocol):
    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...


def gain_of(weights: Weights, name: str, offset: float) -> Tensor:
    """A norm's gain; with what it adds to the stored one, in float32 then."""
    gain = weights.tensor(name)
    return gain.float() + offset if offset else gain


class DecoderLayer:
    """attention: x [T, H], context -> [T, H]; mlp: x [T, H] -> [T, H]; both partial over ranks.
    input_norm, mlp_norm: the norms before the two."""

    def __init__(
        self,
        prefix: str,
        eps: float,
        weights: Weights,
        attention: Callable[[Tensor, Context], Tensor],
        mlp: Mlp | MoeMlp,
        mlp_norm: str = "post_attention_layernorm",
        norm_offset: float = 0.0,
        input_norm: str = "input_layernorm",
    ) -> None:
        self.eps, self.all_reduce = eps, weights.all_reduce
        self.add_rms_norm: Callable[[Any, Tensor, Tensor, float], tuple[Tensor, Tensor]] = (
            weights.add_rms_norm
        )  # of what the parts return
        self.attention, self.mlp = attention, mlp
        self.input_norm = gain_of(weights, f"{prefix}.{input_norm}.weight", norm_offset)
        self.mlp_norm = gain_of(weights, f"{prefix}.{mlp_norm}.weight", norm_offset)

    def __call__(
        self,
        normed: Tensor,
        residual: Tensor,
        context: Context,
        next_norm: Tensor,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """normed, residual [T, H]: the residual stream with and without `input_norm`. next_norm
        [H]: gain of the norm after this layer.
        rows int64 [R]: tokens that anything behind the attention is asked for, all by default.
        Returns the two after the layer, of these tokens."""
        attended = self.attention_part(normed, context)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        normed, residual = self.add_rms_norm(attended, residual, self.mlp_norm, self.eps)
        return self.add_rms_norm(self.mlp_part(normed), residual, next_norm, self.eps)

    def attention_part(self, normed: Tensor, context: Context) -> Tensor:
        """What `add_rms_norm` adds of the attention: partial over ranks, which it sums."""
        return self.attention(normed, context)

    def mlp_part(self, normed: Tensor) -> Tensor | UnsummedPairs:
        """What `add_rms_norm` adds of the MLP: partial over ranks, which it sums."""
        return self.mlp.unsummed(normed) if isinstance(self.mlp, MoeMlp) else self.mlp(normed)

    def attend(self, hidden: Tensor, context: Context) -> Tensor:
        """The attention half, residual included: hidden [T, H] -> [T, H]."""
        return hidden + self.attention_output(rms_norm(hidden, self.input_norm, self.eps), context)

    def feed_forward(self, hidden: Tensor, context: Context) -> Tensor:
        """The MLP or expert half, residual included: hidden [T, H] -> [T, H]. It is the same for
        every context."""
        return self.add_mlp_output(hidden, self.mlp_output(hidden, context), context)

    def mlp_output(self, hidden: Tensor, context: Context) -> Tensor:
        """What the MLP, or the experts together, make of hidden [T, H]: [T, H]."""
        return self.mlp_reduced(rms_norm(hidden, self.mlp_norm, self.eps))

    def add_mlp_output(self, hidden: Tensor, summed: Tensor, context: Context) -> Tensor:
        """The hidden states after the half, from those before it and what `mlp_output` gave."""
        return hidden + self.post_mlp(summed)

    def attention_output(self, normed: Tensor, context: Context) -> Tensor:
        """What the attention half adds to the residual stream."""
        return self.all_reduce(self.attention(normed, context))

    def post_mlp(self, summed: Tensor) -> Tensor:
        """What is added of what the MLP or the experts make."""
        return summed

    def mlp_reduced(self, normed: Tensor) -> Tensor:
        """What the MLP, or the experts together, make: all that is added, or what a norm behind the
        experts reads."""
        return self.all_reduce(self.mlp(normed))


class Model:
    """The whole stack but MTP. `layers` may be walked one by one; `__call__` runs them all. head:
    the module that makes logits."""

    layer_class: ClassVar[type[Any]]
    """The architecture's layer, made from (config, layer, weights)."""
    backend: str = "auto"
    """Of the operators that hold no weights, while it computes."""

    def __init__(
        self,
        config: StackConfig,
        weights: Weights,
        head: str = "lm_head",
        norm_offset: float = 0.0,
        *,
        embedding: str = "model.embed_tokens",
        norm: str = "model.norm",
    ) -> None:
        self.config = config
        self.embedding = weights.tensor(f"{embedding}.weight")
        self.layers: list[DecoderLayer] = [
            self.layer_class(config, layer, weights) for layer in range(config.num_hidden_layers)
        ]
        self.norm = gain_of(weights, f"{norm}.weight", norm_offset)
        self.head = weights.linear(head)
        self.aux_layers: tuple[int, ...] = ()
        """Layers whose inputs are handed out behind the hidden states, side by side: a head of
        EAGLE-3 reads them."""

    @property
    def width(self) -> int:
        """Values of a token that `__call__` returns."""
        return self.embedding.shape[1] * (1 + len(self.aux_layers))

    @by_own_backend
    def __call__(self, token_ids: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """token_ids [T] -> hidden [T, H] after the final norm, and what `aux_layers` asks for, [T,
        width]; rows int64 [R]: of these tokens."""
        residual = embedded(token_ids, self.embedding)
        normed = rms_norm(residual, self.layers[0].input_norm, self.config.rms_norm_eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        read: list[Tensor] = []
        for number, (layer, next_norm) in enumerate(zip(self.layers, next_norms)):
            if number in self.aux_layers:
                read.append(
                    residual.clone() if rows is None else residual[rows]
                )  # operators may add to it in place
            last = number == len(self.layers) - 1
            normed, residual = layer(normed, residual, context, next_norm, rows if last else None)
        return torch.cat((normed, *read), dim=-1) if read else normed

    @by_own_backend
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H], or [T, width] -> float32 [T, vocab]."""
        return self.head(hidden[:, : self.embedding.shape[1]].contiguous()).float()


def embedded(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [vocab, H] by token_ids [T]. On CUDA by indexing: torch.embedding gives a few
    rows to few blocks, 8 us for 16 tokens of 7168 on an H200, where this takes 2."""
    return table[token_ids] if table.is_cuda else F.embedding(token_ids, table)
