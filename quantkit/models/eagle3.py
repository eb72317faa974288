"""EAGLE-3's draft head (arXiv 2503.01840): a decoder layer that drafts from hidden states at three
depths of a target model and the next token.

Names, shapes and order are those of `LlamaForCausalLMEagle3` as trained by SGLang and read by vLLM.
The layer reads the embedding of token i + 1 together with a hidden state of token i, and drafts
token i + 2; further drafts read its own output. Its vocabulary is a subset of the target's: d2t
holds the offsets of its ids.

Symbols: T tokens, H hidden_size of the head.
"""

from dataclasses import dataclass, replace

import torch
from quantkit_kernels import add_rms_norm, by_own_backend, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.models import gqa, llama
from quantkit.models.config import check_flag
from quantkit.models.context import Context
from quantkit.models.mlp import Mlp, add_bias
from quantkit.models.ngram_table import NgramRows
from quantkit.models.table import Parameter
from quantkit.models.weights import Weights

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
EMBEDDING = "embed_tokens.weight"
OFFSETS = "d2t"
"""Offsets from the head's ids to the target's: int64 [draft_vocab]. If missing, the ids are
equal."""
_LAYER = "midlayer"
_DEPTHS = 3


@dataclass(frozen=True)
class HeadConfig:
    """decoder: the layer as a Llama config. draft_vocab: size of its vocabulary. target_hidden:
    width of the hidden states it reads. normed_residual: whether its residual stream starts after
    hidden_norm. depths: layers of the target whose inputs it reads; None: the third, the middle and
    the third from the end."""

    decoder: llama.Config
    draft_vocab: int
    target_hidden: int
    normed_residual: bool
    depths: tuple[int, ...] | None

    @classmethod
    def from_dict(cls, config: JsonObject) -> "HeadConfig":
        """From config.json. Raises QuantkitError for a value that is not computed here."""
        decoder = llama.Config.from_dict(config)
        if decoder.num_hidden_layers != 1:
            raise QuantkitError(
                f"config.json has num_hidden_layers = {decoder.num_hidden_layers}",
                "quantkit computes EAGLE-3 heads with one layer",
            )
        eagle_config = config.get("eagle_config") or {}
        if (
            not isinstance(eagle_config, dict)
            or eagle_config.get("use_aux_hidden_state", True) is not True
            or config.get("parallel_drafting")
        ):
            raise QuantkitError(
                "config.json describes another head than EAGLE-3's",
                "bring one that reads three hidden states",
            )
        # In eagle_config the ids mean layer outputs, at the top level layer inputs; engines write
        # both.
        outputs = eagle_config.get("eagle_aux_hidden_state_layer_ids")
        inputs = config.get("eagle_aux_hidden_state_layer_ids")
        given = inputs if inputs is not None else outputs
        depths = None
        if given is not None:
            if (
                not isinstance(given, list)
                or len(given) != _DEPTHS
                or not all(type(one) is int and one >= 0 for one in given)
            ):
                raise QuantkitError(
                    f"config.json has eagle_aux_hidden_state_layer_ids = {given!r:.60}",
                    f"give {_DEPTHS} layers",
                )
            depths = tuple(one + (inputs is None) for one in given)
        sizes = {"draft_vocab_size": decoder.vocab_size, "target_hidden_size": decoder.hidden_size}
        for key in sizes:
            found = config.get(key)
            if found is not None and (type(found) is not int or found < 1):
                raise QuantkitError(
                    f"config.json has {key} = {found!r:.60}", "use a positive integer"
                )
            sizes[key] = found or sizes[key]
        flag = check_flag(config, "norm_before_residual")
        return cls(decoder, sizes["draft_vocab_size"], sizes["target_hidden_size"], flag, depths)

    def aux_layers(self, layers: int) -> tuple[int, ...]:
        """Layers whose inputs are read, of a target model with this number of layers."""
        return self.depths or (2, layers // 2, layers - 3)


def is_head(config: JsonObject) -> bool:
    """Whether config.json is that of an EAGLE-3 head."""
    names = config.get("architectures")
    return isinstance(names, list) and any(name in CLASSES for name in names)


def parameters(config: HeadConfig) -> list[Parameter]:
    """Every tensor except d2t and t2d, which are not weights. The embedding may be absent: the
    target's is used then."""
    c = config.decoder
    h, own = c.hidden_size, gqa.layer_parameters(c, 0)
    rows = [Parameter(EMBEDDING, (c.vocab_size, h), "embedding", optional=True)]
    rows.append(Parameter("fc.weight", (h, _DEPTHS * config.target_hidden), "mtp_proj"))
    rows.append(Parameter(f"{_LAYER}.hidden_norm.weight", (h,), "norm", layer=0))
    for row in own:
        shape = (
            (row.shape[0], 2 * h)
            if row.projection in ("q", "k", "v") and row.role == "linear"
            else row.shape
        )
        named = row.name.replace("model.layers.0", _LAYER)
        rows.append(
            replace(
                row,
                name=named,
                shape=shape,
                fused=row.fused and row.fused.replace("model.layers.0", _LAYER),
            )
        )
    return [
        *rows,
        Parameter("norm.weight", (h,), "norm"),
        Parameter("lm_head.weight", (config.draft_vocab, h), "head"),
    ]


class Eagle3Head:
    """embedding [vocab, H]: of the target's tokens. token_ids int64 [draft_vocab]: the target ids,
    of `vocab`, that it can draft. backend: as in `decoder.Model`."""

    backend: str = "auto"
    ngram_rows: tuple[NgramRows, ...] = ()
    """As in `decoder.Model`."""

    def __init__(
        self, config: HeadConfig, weights: Weights, embedding: Tensor, token_ids: Tensor, vocab: int
    ) -> None:
        c = config.decoder
        self.config = config
        self.eps = c.rms_norm_eps
        self.embedding = embedding
        self._vocab = vocab
        self._ids = token_ids
        self.width = c.hidden_size
        self.read_width = _DEPTHS * config.target_hidden
        a = f"{_LAYER}.self_attn"
        self.fc, self.head = weights.linear("fc"), weights.linear("lm_head")
        self.qkv = weights.fused_linear((f"{a}.q_proj", f"{a}.k_proj", f"{a}.v_proj"))
        self.qkv_bias = (
            torch.cat([weights.tensor(f"{a}.{side}_proj.bias") for side in "qkv"])
            if c.qkv_bias
            else None
        )
        self.o = weights.linear(f"{a}.o_proj")
        self.o_bias = weights.tensor(f"{a}.o_proj.bias") if c.o_bias else None
        self.mlp = Mlp(f"{_LAYER}.mlp", weights, bias=c.mlp_bias)
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.input_norm, self.hidden_norm, self.mlp_norm = (
            weights.tensor(f"{_LAYER}.{name}.weight") for name in names
        )
        self.norm = weights.tensor("norm.weight")

    def combine(self, hidden: Tensor) -> Tensor:
        """hidden [T, 3 * target_hidden], the depths concatenated -> [T, H]."""
        return self.fc(hidden)

    @by_own_backend
    def __call__(
        self, next_token_ids: Tensor, hidden: Tensor, context: Context, rows: Tensor | None = None
    ) -> Tensor:
        """next_token_ids [T], hidden [T, H] of `combine` or of this -> hidden [T, H] before the
        last norm. rows int64 [R]: of these tokens only."""
        c = self.config.decoder
        normed = rms_norm(hidden, self.hidden_norm, self.eps)
        residual = normed if self.config.normed_residual else hidden
        embedded = rms_norm(F.embedding(next_token_ids, self.embedding), self.input_norm, self.eps)
        qkv = add_bias(self.qkv(torch.cat((embedded, normed), dim=-1)), self.qkv_bias)
        q = context.store_gqa(0, qkv, c.num_key_value_heads, c.head_dim, None, c.rope)
        attended = add_bias(
            self.o(context.attend_gqa(0, q, c.softmax_scale).flatten(1)), self.o_bias
        )
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        normed, residual = add_rms_norm(attended, residual, self.mlp_norm, self.eps)
        return residual + self.mlp(normed)

    @by_own_backend
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> float32 [T, vocab], minus infinity for tokens that it cannot draft."""
        own = self.head(rms_norm(hidden, self.norm, self.eps)).float()
        return own.new_full((len(own), self._vocab), float("-inf")).index_copy_(1, self._ids, own)
