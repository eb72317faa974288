"""The interface that every architecture file implements, and the configuration that each
provides."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from quantkit_kernels import SILU, Gating, Routing
from torch import Tensor

from quantkit.models import compressed_attention
from quantkit.models.context import Context
from quantkit.models.decoder import DecoderLayer, Model
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.hyper_connections import ResidualStreams
from quantkit.models.mtp import MtpReads
from quantkit.models.rope import Rope
from quantkit.models.short_conv import ShortConvolutions
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

CacheBits = Literal[8, 16]
SCALE_BYTES = 4


@dataclass(frozen=True)
class LatentCache:
    """Multi-head latent attention: a token and layer cache the latent KV and the rotated key shared
    by all heads. index_dim: width of an indexer's key, cached as well; 0 without an indexer.
    index_pool: tokens that share an index key (pooled_index.py); 0 where each has its own."""

    kv_lora_rank: int
    rope_dim: int
    index_dim: int = 0
    index_pool: int = 0

    @property
    def width(self) -> int:
        """Values per token and layer that attention reads."""
        return self.kv_lora_rank + self.rope_dim

    def tp_shards(self, ranks: int) -> int:
        """Number of different parts held by `ranks` tensor-parallel ranks: each rank holds the
        whole latent."""
        return 1

    def token_bytes(self, bits: CacheBits, ranks: int = 1) -> int:
        """Bytes per token and layer on one rank. In 8 bits: codes and a float32 scale of the latent
        and of an index key; rotary keys, and index keys that tokens share, stay in 16 bits."""
        index = math.ceil(2 * self.index_dim / (self.index_pool or 1))
        if bits == 16:
            return 2 * self.width + index
        if self.index_dim and not self.index_pool:
            index = self.index_dim + SCALE_BYTES
        return self.kv_lora_rank + 2 * self.rope_dim + SCALE_BYTES + index

    @property
    def read_by_head(self) -> int:
        """Multiplications per query head and cached token in the absorbed form: scores over latent
        and rotary key, then the weighted sum of latents."""
        return self.width + self.kv_lora_rank


@dataclass(frozen=True)
class KeyValueCache:
    """Grouped-query attention: a token and layer cache a key and a value for every KV head.
    index_dim, index_pool: as in `LatentCache`."""

    kv_heads: int
    head_dim: int
    index_dim: int = 0
    index_pool: int = 0

    @property
    def width(self) -> int:
        """Values per token and layer."""
        return 2 * self.kv_heads * self.head_dim

    def tp_shards(self, ranks: int) -> int:
        """Number of different parts held by `ranks` tensor-parallel ranks: KV heads are
        distributed, and replicated where there are fewer than ranks."""
        return min(ranks, self.kv_heads)

    def token_bytes(self, bits: CacheBits, ranks: int = 1) -> int:
        """Bytes per token and layer on one rank. In 8 bits: codes, and a float32 scale per head for
        keys and values."""
        values = self.width // self.tp_shards(ranks)
        index = math.ceil(2 * self.index_dim / (self.index_pool or 1))
        return index + (
            2 * values if bits == 16 else values + values // self.head_dim * SCALE_BYTES
        )

    @property
    def read_by_head(self) -> int:
        """Multiplications per query head and cached token: its key and its value."""
        return 2 * self.head_dim


@dataclass(frozen=True)
class CompressedCache:
    """DeepSeek-V4: a sequence caches the vectors (head_dim) of its last `window` tokens, and each
    layer one compressed KV entry for every `rate` tokens.

    rates: for each layer the rate, 0 for a layer without compressed KV of its own, and whether an
    indexer key of index_dim is cached per entry. keyed: index keys are made of the entries, which
    do not overlap then.
    """

    head_dim: int
    index_dim: int
    window: int
    rates: tuple[tuple[int, bool], ...]
    keyed: bool = False

    @property
    def width(self) -> int:
        """Values of compressed KV per token and layer, on average, rounded up."""
        values = sum(
            (self.head_dim + selects * self.index_dim) / rate
            for rate, selects in self.rates
            if rate
        )
        return math.ceil(values / len(self.rates))

    def tp_shards(self, ranks: int) -> int:
        """Each rank holds everything: all heads share one vector."""
        return 1

    def token_bytes(self, bits: CacheBits, ranks: int = 1) -> int:
        """Bytes per token and layer, on average. There is no 8-bit form."""
        return 2 * self.width

    def with_mtp_layers(self, drafts: int) -> "CompressedCache":
        """The cache including MTP layers, which only have a window."""
        return replace(self, rates=(*self.rates, *((0, False) for _ in range(drafts))))

    def window_shapes(self) -> dict[int, tuple[int, int]]:
        """Buffers of the last tokens of a running sequence, by `compressed_attention.buffer_index`:
        number of tokens and values per token."""
        kept = {
            compressed_attention.buffer_index(layer, 0): (self.window, self.head_dim)
            for layer in range(len(self.rates))
        }
        for layer, (rate, selects) in enumerate(self.rates):
            if rate:
                kept[compressed_attention.buffer_index(layer, 1)] = (
                    rate * (1 + self._overlaps(selects)),
                    self.raw_width(selects),
                )
        return kept

    def _overlaps(self, selects: bool) -> bool:
        return selects and not self.keyed

    def raw_width(self, selects: bool) -> int:
        """Values that a token contributes to compressed KV, the indexer's included: values and
        pooling weights, doubled where groups overlap."""
        wide = 4 * (self.head_dim + self.index_dim)
        return wide if self._overlaps(selects) else 2 * self.head_dim

    @property
    def read_by_head(self) -> int:
        """Multiplications per query head and cached token: an entry's score, then the weighted
        sum."""
        return 2 * self.width


class ModelConfig:
    """An architecture's configuration. Fields have config.json's names; properties default to a
    model with one residual stream, SiLU experts, and a cache in every layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_nextn_predict_layers: int
    """Number of MTP layers."""
    rms_norm_eps: float
    max_position_embeddings: int

    @property
    def routing(self) -> Routing | None:
        """How experts are routed; None for a dense model."""
        raise NotImplementedError

    @property
    def cache(self) -> LatentCache | KeyValueCache | CompressedCache:
        """What each layer caches per token."""
        raise NotImplementedError

    def is_moe(self, layer: int) -> bool:
        """Whether the layer has routed experts."""
        raise NotImplementedError

    @property
    def gating(self) -> Gating:
        """Activation of the routed experts."""
        return SILU

    @property
    def recurrent(self) -> DeltaNet | ShortConvolutions | None:
        """Linear attention or short convolutions, which keep a state per sequence."""
        return None

    @property
    def recent_tokens(self) -> dict[int, tuple[int, int]]:
        """What layers read of the last tokens of a running sequence (`Context.shifted`), by
        `short_conv.buffer_index`: number of tokens and float32 values per token."""
        return {}

    @property
    def has_sequence_state(self) -> bool:
        """Whether layers keep a state of fixed size per running sequence."""
        return self.recurrent is not None or bool(self.recent_tokens)

    @property
    def can_roll_back(self) -> bool:
        """Whether that state can drop its last tokens, as after rejected drafts."""
        return not isinstance(self.recurrent, DeltaNet) and not self.recent_tokens

    @property
    def max_independent_tokens(self) -> int | None:
        """Longest text for which each layer can be computed from its hidden states alone, without
        the layer before it; None for any length."""
        return None

    @property
    def streams(self) -> ResidualStreams | None:
        """Hyper-connections, or sums of earlier blocks (attention_residuals.py); None for one
        residual stream."""
        return None

    @property
    def stream_count(self) -> int:
        """Number of residual streams."""
        return 1 if self.streams is None else self.streams.count

    @property
    def state_width(self) -> int:
        """Values of a token's hidden state between sublayers, as calibration holds it."""
        return self.hidden_size if self.streams is None else self.streams.packed_width

    @property
    def drafted_block(self) -> int:
        """Tokens that a head drafts at once (dspark.py); 0 without one."""
        return 0

    def check_tokenizer(self, path: Path) -> None:
        """Raise QuantkitError where the model computes with its tokenizer's texts, and that of the
        folder is another one."""

    @property
    def mlp_output_width(self) -> int:
        """Values per token of `DecoderLayer.mlp_output` where there are experts, whose sum comes
        first."""
        return self.hidden_size

    @property
    def num_cached_layers(self) -> int:
        """Decoder layers with a cache entry per token."""
        return sum(self.delta(layer) is None for layer in range(self.num_hidden_layers))

    def delta(self, layer: int) -> DeltaNet | None:
        """The linear attention of a layer; None for other attention."""
        net = self.recurrent
        return net if isinstance(net, DeltaNet) and layer in net.layers else None

    @property
    def tp_units(self) -> dict[str, int]:
        """Counts that the number of tensor-parallel ranks must divide, by field name. KV heads
        follow from `cache`."""
        return {"num_attention_heads": self.num_attention_heads}

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        """Prefixes of tensors of another model in the checkpoint, such as a vision tower, which are
        copied."""
        return ()


class MtpModel(Protocol):
    """A multi-token prediction layer: `mtp.MtpLayer` or `hyper_connections.MtpLayer`. W: values per
    token that the main model outputs."""

    block: DecoderLayer
    embedding: Tensor
    """Its own or the main model's, [vocab, H]; only some rows during calibration."""
    reads: MtpReads
    backend: str
    """As in `decoder.Model`."""

    def follow(self, model: Model) -> None:
        """Share the main model's modules, and make it output what this layer reads."""

    def inputs(self, next_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_token_ids [T], rows of the embedding; hidden: what it reads of the main model ->
        input of the block, with the same number of residual streams."""

    def head_input(self, hidden: Tensor) -> Tensor:
        """hidden after the block, as calibration holds it -> input of the head, [T, H]."""

    def __call__(
        self, next_token_ids: Tensor, hidden: Tensor, context: Context, rows: Tensor | None = None
    ) -> Tensor:
        """hidden [T, W] of the main model or of this layer -> [T, W]. rows int64 [R]: return these
        tokens only; all tokens are cached."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, W] -> float32 [T, vocab]."""


C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class ConfigClass(Protocol[C_co]):
    def from_dict(self, config: dict[str, Any], /) -> C_co:
        """From config.json. Raises QuantkitError where a field is missing, or has a value that is
        not computed here."""


class Architecture(Protocol[C]):
    """A module of quantkit.models, whose configs have class C."""

    @property
    def Config(self) -> ConfigClass[C]: ...

    @property
    def Model(self) -> Callable[[C, Weights], Model]:
        """The decoder stack without MTP layers."""

    @property
    def DecoderLayer(self) -> Callable[[C, int, Weights], DecoderLayer]:
        """One layer, by number; also the blocks of MTP layers, which follow the others."""

    @property
    def MtpLayer(self) -> Callable[[C, Weights, int], MtpModel] | None:
        """An MTP layer, numbered from 0; None for an architecture without."""

    def parameters(self, config: C, /) -> list[Parameter]:
        """Every tensor of a checkpoint, in the order of a forward pass."""

    def scale_groups(self, config: C, layer: int, /) -> list[ScaleGroup]:
        """The foldable scales of one layer. A linear is a consumer of one group before it is the
        producer of another."""


def longest_text(config: ModelConfig) -> int:
    """Length in tokens of the longest text, as vLLM and SGLang determine it:
    max_position_embeddings, or YaRN's factor times the original length if that is more; 0 where
    config.json does not say."""
    rope = getattr(config, "rope", None)
    extended = (
        round(rope.factor * rope.original_max_position)
        if isinstance(rope, Rope) and rope.kind == "yarn"
        else 0
    )
    return max(config.max_position_embeddings or 0, extended)
