"""DSpark heads of DeepSeek-V4 and V4.1 (mtp.*): draft a block of tokens at once.

A head reads the mean of the main model's residual streams at some layers. Projected to H and
normed, they give keys of every stage for the tokens so far. A block is the newest token and noise:
each of its tokens attends to a window of these keys and to the whole block. After the last stage
token i of the block has logits of token i + 1, to which a table of pairs (the Markov head) adds
what the token drafted before makes likely. The confidence head is not used: drafts are verified.

As the releases' inference/model.py have it (`DSparkBlock`). Symbols: T tokens, B sequences, b
tokens of a block, S stages, W tokens of the window, H hidden_size, D head_dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models import decoder
from quantkit.models.compressed_attention import CompressedAttention, CompressedInputs
from quantkit.models.config import check_count, refusal
from quantkit.models.context import Context, Positions
from quantkit.models.mtp import DSPARK
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights


@dataclass(frozen=True)
class DSparkSizes:
    """block: tokens drafted at once, 0 without a head; stages; targets: layers that it reads;
    noise: id of the tokens that stand for unknown ones; rank: of the table of pairs; experts of a
    stage, and those of a token."""

    block: int = 0
    stages: int = 0
    targets: tuple[int, ...] = ()
    noise: int = 0
    rank: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def from_dict(
        cls, text: dict[str, Any], num_layers: int, experts: int, experts_per_token: int
    ) -> "DSparkSizes":
        """From config.json; experts: those of the main model, which are the stages' where it does
        not say. A head has as many stages as targets, where there is no n_mtp_layers."""
        if not text.get("dspark_block_size"):
            return cls()

        def count(name: str, default: int | None = None, least: int = 1) -> int:
            value = text.get(name)
            return check_count(name, default if value is None else value, least=least)

        targets = text.get("dspark_target_layer_ids")
        known = isinstance(targets, list | tuple) and all(
            type(one) is int and 0 <= one < num_layers for one in targets
        )
        if not targets or not known or sorted({*targets}) != [*targets]:
            wanted = f"rising numbers of layers below {num_layers}"
            raise refusal("dspark_target_layer_ids", targets, wanted)
        return cls(
            count("dspark_block_size"),
            count("n_mtp_layers", len(targets)),
            tuple(targets),
            count("dspark_noise_token_id", least=0),
            count("dspark_markov_rank", 256),
            count("dspark_n_routed_experts", experts),
            count("dspark_num_experts_per_tok", experts_per_token),
        )


NO_HEAD = DSparkSizes()


class BlockHeadConfig(decoder.StackConfig, Protocol):
    """A model's configuration with a head."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def sliding_window(self) -> int: ...

    @property
    def dspark(self) -> DSparkSizes: ...


class Window(NamedTuple):
    """Keys of the last tokens [B, W, S, D], and which of them there are, bool [B, W]."""

    keys: Tensor
    there: Tensor


def head_parameters(
    config: BlockHeadConfig, stages: Iterable[Parameter], pairs: tuple[str, str]
) -> list[Parameter]:
    """Every tensor of a head, without the confidence head's; none without a head. stages: those of
    its layers; pairs: names of the two sides of its table."""
    sizes, h, last = config.dspark, config.hidden_size, f"mtp.{config.dspark.stages - 1}"
    first, end = config.num_hidden_layers, config.num_hidden_layers + sizes.stages - 1
    if not sizes.block:
        return []
    rows = [
        Parameter(DSPARK, (h, h * len(sizes.targets)), "mtp_proj", layer=first),
        Parameter("mtp.0.main_norm.weight", (h,), "norm", layer=first),
        Parameter(f"{last}.norm.weight", (h,), "norm", layer=end),
        *(
            Parameter(f"{last}.markov_head.{side}.weight", (config.vocab_size, sizes.rank), "norm")
            for side in pairs
        ),
        *stages,
    ]
    return [replace(row, mtp=True) for row in rows]


def stage_groups(config: BlockHeadConfig, layer: int, groups: list[ScaleGroup]) -> list[ScaleGroup]:
    """Those of a layer's groups, that of attention's input first, that a stage has, too: its linear
    of keys also reads what the head makes of the main model, which all stages share."""
    return groups[1:] if config.dspark.block and layer >= config.num_hidden_layers else groups


class BlockContext(Positions):
    """Attention of blocks: positions int64 [B b]."""

    def __init__(self, positions: Tensor, window: Window, first_layer: int) -> None:
        super().__init__(positions)
        self._window, self._first = window, first_layer

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """As `Context.attend_compressed`, of every token to its whole block."""
        keys, there = self._window
        block = inputs.kv.unflatten(0, (len(keys), -1))
        read = torch.cat((keys[:, :, layer - self._first], block), dim=1).float()
        seen = F.pad(there, (0, block.shape[1]), value=True)
        q = inputs.q.unflatten(0, (len(keys), -1)).float()
        scores = torch.einsum("bthd,bsd->bths", q, read) * attention.scale
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        sinks = attention.sinks[:, None].expand(*scores.shape[:-1], 1)
        shares = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        return torch.einsum("bths,bsd->bthd", shares, read).flatten(0, 1).to(inputs.q.dtype)


class BlockHead:
    """`embedding` and `head` are the main model's. stages: its layers."""

    backend: str = "auto"
    """As in `decoder.Model`."""

    streams: Any
    """Those of the stages (`ResidualStreams`)."""

    def __init__(
        self,
        config: BlockHeadConfig,
        stages: list[Any],
        weights: Weights,
        pairs: tuple[str, str],
    ) -> None:
        sizes, last = config.dspark, f"mtp.{config.dspark.stages - 1}"
        self.sizes, self.eps, self.stages = sizes, config.rms_norm_eps, stages
        self.block_size, self.window = sizes.block, config.sliding_window
        self.first_layer = config.num_hidden_layers
        self.main_proj = weights.linear("mtp.0.main_proj")
        self.main_norm = weights.tensor("mtp.0.main_norm.weight")
        self.norm = weights.tensor(f"{last}.norm.weight")
        self.pairs = tuple(weights.tensor(f"{last}.markov_head.{side}.weight") for side in pairs)
        self.embedding: Tensor
        self.head: Any

    @staticmethod
    def reads(sizes: DSparkSizes) -> tuple[int, ...]:
        """Layers whose inputs the head reads; that after the last is the model's output."""
        raise NotImplementedError

    @staticmethod
    def read(config: Any, layer: Any, hidden: Tensor, context: Context) -> Tensor:
        """What it reads [T, H] of hidden states between sublayers, as calibration holds them, at
        the input of this layer of the model, None after the last."""
        raise NotImplementedError

    def head_input(self, hidden: Tensor) -> Tensor:
        """hidden after the last stage, as calibration holds it -> input of the main model's head,
        [T, H]."""
        raise NotImplementedError

    def run(self, token_ids: Tensor, embedded: Tensor, context: BlockContext) -> Tensor:
        """token_ids [B b], embedded [B b, H] -> after the last stage and its norm, [B b, H]."""
        raise NotImplementedError

    def follow(self, model: decoder.Model) -> None:
        """Share the main model's embedding and head, and make it output what the head reads."""
        self.embedding, self.head = model.embedding, model.head
        model.aux_layers = self.reads(self.sizes)

    @by_own_backend
    def keys(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, (1 + targets) H] of the main model for tokens at positions int64 [T] -> keys
        [T, S, D]."""
        read = hidden[:, self.embedding.shape[1] :].contiguous()
        x, at = self.window_input(self.main_proj(read)), Positions(positions)
        return torch.stack([one.attention.window_keys(x, at) for one in self.stages], dim=1)

    def window_input(self, projected: Tensor) -> Tensor:
        """What all stages make keys of, [T, H], of `main_proj`'s outputs."""
        return rms_norm(projected, self.main_norm, self.eps)

    @by_own_backend
    def hidden(self, newest: Tensor, positions: Tensor, window: Window) -> Tensor:
        """newest int64 [B]: the last token of each sequence, at positions int64 [B]; window: of the
        tokens before -> input of the main model's head for the block, [B, b, H]."""
        ids = self.block_ids(newest)
        return self.block(ids, decoder.embed(ids, self.embedding), positions, window)

    def block_ids(self, newest: Tensor) -> Tensor:
        """int64 [B b]: each newest token and noise."""
        ids = newest.new_full((len(newest), self.block_size), self.sizes.noise)
        ids[:, 0] = newest
        return ids.flatten()

    @by_own_backend
    def block(self, ids: Tensor, embedded: Tensor, positions: Tensor, window: Window) -> Tensor:
        """As `hidden`; ids as of `block_ids`, embedded [B b, H]."""
        places = torch.arange(self.block_size, device=ids.device)
        at = (positions[:, None] + places).flatten()
        context = BlockContext(at, window, self.first_layer)
        return self.run(ids, embedded, context).unflatten(0, (-1, self.block_size))

    @by_own_backend
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] of one place in the blocks -> float32 [B, vocab]."""
        logits: Tensor = self.head(hidden.contiguous()).float()
        return logits

    def pair_logits(self, token_ids: Tensor) -> Tensor:
        """What the tokens [B] make likely after them, float32 [B, vocab]."""
        before, after = self.pairs
        return F.linear(decoder.embed(token_ids, before).float(), after.float())
