"""What every architecture file offers, and what every config can be asked."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from quantkit_kernels import SILU, Gating, Routing
from torch import Tensor

from quantkit.models import compressed_attention
from quantkit.models.context import Context
from quantkit.models.decoder import DecoderLayer, Model
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.hyper_connections import HyperConnectionSizes
from quantkit.models.mtp import MtpReads
from quantkit.models.rope import Rope
from quantkit.models.short_conv import ShortConvolutions
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

CacheBits = Literal[8, 16]
SCALE_BYTES = 4


@dataclass(frozen=True)
class LatentCache:
    """Multi-head latent attention: a token and layer keep the latent and the rotated key that all
    heads share; index_dim: width of the key that an indexer reads beside them, 0 for a model
    without."""

    kv_lora_rank: int
    rope_dim: int
    index_dim: int = 0

    @property
    def width(self) -> int:
        """Values of a token and layer that attention reads."""
        return self.kv_lora_rank + self.rope_dim

    def tp_shards(self, ranks: int) -> int:
        """Parts that `ranks` tensor-parallel ranks hold it in: each holds the whole latent."""
        return 1

    def token_bytes(self, bits: CacheBits, ranks: int = 1) -> int:
        """Of a token and layer on one rank: in 8 bits the latent's codes and a float32 scale,
        rotary and index keys have 16 always."""
        return 2 * self.index_dim + (
            2 * self.width if bits == 16 else self.kv_lora_rank + 2 * self.rope_dim + SCALE_BYTES
        )

    @property
    def read_by_head(self) -> int:
        """Values of a cached token that a query head is multiplied by: scores with all, then the
        latent, while absorbed."""
        return self.width + self.kv_lora_rank


@dataclass(frozen=True)
class KeyValueCache:
    """Grouped-query attention: a token and layer keep a key and a value of every KV head."""

    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Values of a token and layer."""
        return 2 * self.kv_heads * self.head_dim

    def tp_shards(self, ranks: int) -> int:
        """Parts that `ranks` tensor-parallel ranks hold it in: heads are shared out, a single one
        is held by several."""
        return min(ranks, self.kv_heads)

    def token_bytes(self, bits: CacheBits, ranks: int = 1) -> int:
        """Of a token and layer on one rank: in 8 bits codes, and a float32 scale for each head's
        key and value."""
        values = self.width // self.tp_shards(ranks)
        return 2 * values if bits == 16 else values + values // self.head_dim * SCALE_BYTES

    @property
    def read_by_head(self) -> int:
        """Values of a cached token that a query head is multiplied by: its key and its value."""
        return 2 * self.head_dim


@dataclass(frozen=True)
class CompressedCache:
    """DeepSeek-V4's: a sequence keeps the last `window` tokens' vectors of head_dim, and a layer an
    entry for every so many tokens.

    rates: of each layer, tokens of an entry, 0 for none, and whether an indexer reads a vector of
    index_dim for each entry.
    """

    head_dim: int
    index_dim: int
    window: int
    rates: tuple[tuple[int, bool], ...]

    @property
    def width(self) -> int:
        """Values of a token and layer in entries, on average, rounded up."""
        values = sum(
            (self.head_dim + selects * self.index_dim) / rate
            for rate, selects in self.rates
            if rate
        )
        return math.ceil(values / len(self.rates))

    def tp_shards(self, ranks: int) -> int:
        """Each rank holds the whole: all heads read one vector."""
        return 1

    def token_bytes(self, bits: CacheBits, ranks: int = 1) -> int:
        """Of a token and layer, on average. It is not kept in 8 bits."""
        return 2 * self.width

    def with_mtp_layers(self, drafts: int) -> "CompressedCache":
        """With MTP layers, which have a window alone."""
        return replace(self, rates=(*self.rates, *((0, False) for _ in range(drafts))))

    def window_shapes(self) -> dict[int, tuple[int, int]]:
        """Of the last tokens of a running sequence, by `compressed_attention.buffer_index`: how many,
        and the values of each."""
        kept = {
            compressed_attention.buffer_index(layer, 0): (self.window, self.head_dim)
            for layer in range(len(self.rates))
        }
        for layer, (rate, selects) in enumerate(self.rates):
            if rate:
                kept[compressed_attention.buffer_index(layer, 1)] = (
                    rate * (1 + selects),
                    self.raw_width(selects),
                )
        return kept

    def raw_width(self, selects: bool) -> int:
        """What a token brings to entries, the indexer's included: values and their weights, twice
        where groups overlap."""
        return 4 * (self.head_dim + self.index_dim) if selects else 2 * self.head_dim

    @property
    def read_by_head(self) -> int:
        """Values of a cached token that a query head is multiplied by: an entry's scores, then the
        entry."""
        return 2 * self.width


class ModelConfig(Protocol):
    """A config.json as its architecture read it. Fields have config.json's names."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_nextn_predict_layers(self) -> int:
        """MTP layers, 0 without."""

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def routing(self) -> Routing | None:
        """How experts are chosen; None for a model without."""

    @property
    def gating(self) -> Gating:
        """What is between the linears of routed experts."""

    @property
    def cache(self) -> LatentCache | KeyValueCache | CompressedCache:
        """What is kept of every token in every layer."""

    @property
    def recurrent(self) -> DeltaNet | ShortConvolutions | None:
        """The linear attention, or the convolutions, of layers that keep a state of each sequence;
        None for a model without."""

    @property
    def has_sequence_state(self) -> bool:
        """Whether layers keep something of each running sequence, of a fixed size."""

    @property
    def can_roll_back(self) -> bool:
        """Whether tokens can be taken back from what these keep."""

    @property
    def max_independent_tokens(self) -> int | None:
        """Tokens of a text up to which each layer can be computed without the one before it, given
        its hidden states; None for any."""

    @property
    def streams(self) -> HyperConnectionSizes | None:
        """The streams beside each other that a token's hidden states are made of, and its id with
        them (hyper.py); None for one stream."""

    @property
    def num_cached_layers(self) -> int:
        """Decoder layers that keep something of every token."""

    @property
    def tp_units(self) -> dict[str, int]:
        """What tensor-parallel ranks share in whole ones, all as many: numbers by their fields'
        names. Of key heads `cache` tells."""

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        """How the names of tensors begin that belong to another model beside this one, such as a
        vision tower. They are copied."""

    def is_moe(self, layer: int) -> bool:
        """Whether the layer has routed experts."""


class ConfigDefaults:
    """What a config answers where its architecture says nothing else: one residual stream, SiLU
    between the linears of experts, every layer keeping something of each token and nothing of a
    sequence, no other model beside it."""

    num_hidden_layers: int
    num_attention_heads: int

    @property
    def gating(self) -> Gating:
        return SILU

    @property
    def recurrent(self) -> DeltaNet | ShortConvolutions | None:
        return None

    @property
    def has_sequence_state(self) -> bool:
        return self.recurrent is not None

    @property
    def can_roll_back(self) -> bool:
        return not isinstance(self.recurrent, DeltaNet)

    @property
    def max_independent_tokens(self) -> int | None:
        return None

    @property
    def streams(self) -> HyperConnectionSizes | None:
        return None

    @property
    def num_cached_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def tp_units(self) -> dict[str, int]:
        return {"num_attention_heads": self.num_attention_heads}

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        return ()


class MtpModel(Protocol):
    """A layer that predicts one token further: see `mtp.MtpLayer` and `streams_mtp.MtpLayer`. W:
    what the model hands out of a token."""

    block: DecoderLayer
    embedding: Tensor
    """Its own or the main model's, [vocab, H]; of some tokens alone while the layer is
    calibrated."""
    reads: MtpReads
    backend: str
    """As `decoder.Model` has it."""

    def follow(self, model: Model) -> None:
        """Share what it shares with the main model, which hands out from now on what it reads."""

    def inputs(self, next_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_token_ids [T]: rows of the embedding; hidden: what it reads, one stream or several
        side by side -> the block's, as many."""

    def __call__(
        self, next_token_ids: Tensor, hidden: Tensor, context: Context, rows: Tensor | None = None
    ) -> Tensor:
        """hidden [T, W] of the main model, or of this layer -> [T, W]; rows int64 [R]: of these
        tokens alone, whose cache all are in."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, W] -> float32 [T, vocab]."""


C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class ConfigClass(Protocol[C_co]):
    def from_dict(self, config: dict[str, Any], /) -> C_co:
        """From config.json. Raises QuantkitError where a field is missing, or asks for what is not
        computed here."""


class Architecture(Protocol[C]):
    """A file of quantkit.models, whose configs are of class C."""

    @property
    def Config(self) -> ConfigClass[C]: ...

    @property
    def Model(self) -> Callable[[C, Weights], Model]:
        """The stack but MTP."""

    @property
    def DecoderLayer(self) -> Callable[[C, int, Weights], DecoderLayer]:
        """One layer, by number; MTP layers' blocks, which come after the others, too."""

    @property
    def MtpLayer(self) -> Callable[[C, Weights, int], MtpModel] | None:
        """An MTP layer, counted from 0; None where the architecture has none."""

    def parameters(self, config: C, /) -> list[Parameter]:
        """Every tensor of a checkpoint in the order a forward pass meets them."""

    def scale_groups(self, config: C, layer: int, /) -> list[ScaleGroup]:
        """The scales of one layer that can be folded. A linear is consumer of one group before it
        is the producer of another."""


def longest_text(config: ModelConfig) -> int:
    """Tokens of the longest text as vLLM and SGLang count them: max_position_embeddings, or YaRN's
    factor times what it extends where that is more; 0 where config.json does not say."""
    rope = getattr(config, "rope", None)
    extended = (
        round(rope.factor * rope.original_max_position)
        if isinstance(rope, Rope) and rope.kind == "yarn"
        else 0
    )
    return max(config.max_position_embeddings or 0, extended)
