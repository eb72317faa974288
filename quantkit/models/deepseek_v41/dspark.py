"""DeepSeek-V4.1's DSpark head (mtp.*): drafts a block of tokens at once.

It reads the mean of the main model's streams before some of its layers. Projected to H and normed,
they give keys of every stage for the tokens so far. A block is the newest token and noise: each of
its tokens attends to a window of these keys and to the whole block. After the last stage token i of
the block has logits of token i + 1, to which a table of pairs (the Markov head) adds what the token
drafted before makes likely. The confidence head is not used: drafts are verified.

As the release's inference/model.py has it (`DSparkBlock`). Symbols: B sequences, b tokens of a
block, S stages, W tokens of the window, H hidden_size, D head_dim, n streams.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models import decoder
from quantkit.models.compressed_attention import CompressedAttention, CompressedInputs
from quantkit.models.context import Positions
from quantkit.models.deepseek_v41.architecture import DecoderLayer, Model, layer_parameters
from quantkit.models.deepseek_v41.config import Config
from quantkit.models.hyper_connections import AheadStreams
from quantkit.models.table import Parameter
from quantkit.models.weights import Weights


class Window(NamedTuple):
    """Keys of the last tokens [B, W, S, D], and which of them there are, bool [B, W]."""

    keys: Tensor
    there: Tensor


def head_parameters(config: Config) -> list[Parameter]:
    """Every tensor of the head, without the confidence head's."""
    sizes, h, last = config.dspark, config.hidden_size, config.dspark.stages - 1
    if not sizes.block:
        return []
    own = stage_config(config)
    rows = [
        Parameter("mtp.0.main_proj.weight", (h, h * len(sizes.targets)), "mtp_proj"),
        Parameter("mtp.0.main_norm.weight", (h,), "norm"),
        Parameter(f"mtp.{last}.norm.weight", (h,), "norm"),
        Parameter(f"mtp.{last}.markov_head.embed.weight", (config.vocab_size, sizes.rank), "norm"),
        Parameter(f"mtp.{last}.markov_head.head.weight", (config.vocab_size, sizes.rank), "norm"),
    ]
    for stage in range(sizes.stages):
        rows += layer_parameters(own, config.num_hidden_layers + stage)
    return [replace(row, mtp=True) for row in rows]


def stage_config(config: Config) -> Config:
    """Of the stages: a window and experts of their own number."""
    sizes = config.dspark
    return replace(
        config,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_token,
        ratios=(*config.ratios, *[0] * sizes.stages),
        sources=(*config.sources, *[-1] * sizes.stages),
    )


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
    """`embedding` and `head` are the main model's."""

    backend: str = "auto"
    """As in `decoder.Model`."""

    def __init__(self, config: Config, weights: Weights) -> None:
        sizes, self.config, self.eps = config.dspark, config, config.rms_norm_eps
        own, last = stage_config(config), f"mtp.{sizes.stages - 1}"
        self.block_size, self.window = sizes.block, config.sliding_window
        self.noise, self.first_layer = sizes.noise, config.num_hidden_layers
        self.main_proj = weights.linear("mtp.0.main_proj")
        self.main_norm = weights.tensor("mtp.0.main_norm.weight")
        self.stages = [
            DecoderLayer(own, config.num_hidden_layers + stage, weights)
            for stage in range(sizes.stages)
        ]
        self.norm = weights.tensor(f"{last}.norm.weight")
        self.pairs = tuple(
            weights.tensor(f"{last}.markov_head.{side}.weight") for side in ("embed", "head")
        )

    def follow(self, model: decoder.Model) -> None:
        """Share the main model's embedding and head, and make it output what the head reads."""
        assert isinstance(model, Model), "a head of this model"
        self.embedding, self.head = model.embedding, model.head
        model.aux_layers = self.config.dspark.targets

    @by_own_backend
    def keys(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, (1 + targets) H] of the main model for tokens at positions int64 [T] -> keys
        [T, S, D]."""
        read = hidden[:, self.embedding.shape[1] :].contiguous()
        x = rms_norm(self.main_proj(read), self.main_norm, self.eps)
        at = Positions(positions)
        return torch.stack([one.attention.window_keys(x, at) for one in self.stages], dim=1)

    @by_own_backend
    def hidden(self, newest: Tensor, positions: Tensor, window: Window) -> Tensor:
        """newest int64 [B]: the last token of each sequence, at positions int64 [B]; window: of the
        tokens before -> input of the main model's head for the block, [B, b, H]."""
        count, device = self.block_size, newest.device
        ids = torch.full((len(newest), count), self.noise, device=device)
        ids[:, 0] = newest
        at = (positions[:, None] + torch.arange(count, device=device)).flatten()
        sizes = replace(self.config.streams, shared=0)
        state = AheadStreams.first(
            decoder.embed(ids.flatten(), self.embedding), ids.flatten(), sizes
        )
        context = BlockContext(at, window, self.first_layer)
        for stage in self.stages:
            state = stage.step(state, context, None)  # type: ignore[arg-type]
        return rms_norm(state.merged(), self.norm, self.eps).unflatten(0, (-1, count))

    @by_own_backend
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] of one place in the blocks -> float32 [B, vocab]."""
        return self.head(hidden.contiguous()).float()

    def pair_logits(self, token_ids: Tensor) -> Tensor:
        """What the tokens [B] make likely after them, float32 [B, vocab]."""
        before, after = self.pairs
        return F.linear(decoder.embed(token_ids, before).float(), after.float())
