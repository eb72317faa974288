"""Drafts by an EAGLE-3 head: loaded for one target model, with a cache of one layer, and computed
like an MTP layer."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.check import DRAFT_VOCAB_MASK
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.executor.cache.cache import CachePlan, PagedCache
from quantkit.executor.options import EngineOptions
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.attention_context import MixedContext
from quantkit.executor.runner.graphs import Capture
from quantkit.executor.runner.prompt_context import PrefillContext
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.speculation.mtp_drafter import MtpDrafter
from quantkit.executor.weights.load import LoadedModel
from quantkit.executor.weights.weights import ExecutorWeights
from quantkit.models import decoder
from quantkit.models.context import cached_dtype
from quantkit.models.eagle3 import EMBEDDING, OFFSETS, Eagle3Head, HeadConfig, parameters
from quantkit.models.stored_parameters import check_stored
from quantkit.models.table import resolve

_REMEDY = "use a head that was trained for this model"


@dataclass(frozen=True)
class LoadedEagleHead:
    """A head, unsharded on this rank, in the target model's dtype."""

    head: Eagle3Head
    config: HeadConfig
    dtype: torch.dtype
    device: torch.device
    nbytes: int

    @property
    def cache_token_bytes(self) -> int:
        """The head's cache has 16 bits, whatever the target model's has."""
        return self.config.decoder.cache.token_bytes(16)

    def drafter(
        self,
        plan: CachePlan,
        runner: Runner,
        count: int,
        parallel: Parallel,
        capture: Capture | None = None,
    ) -> "EagleDrafter":
        """Drafts at most `count` tokens a step for the model that `runner` computes, over a cache
        with as many blocks."""
        width = self.config.decoder.cache.width // 2
        cache = PagedCache(
            1,
            plan.num_blocks,
            2 * width,
            block_size=plan.block_size,
            dtype=cached_dtype(self.dtype),
            device=self.device,
            parts=(width, width),
        )
        own, max_positions = (
            Runner(self.head, cache, capture),
            self.config.decoder.max_position_embeddings,
        )
        return EagleDrafter(
            self.head, runner, count, parallel, own=own, max_positions=max_positions
        )


class EagleDrafter(MtpDrafter):
    """mtp: the head."""

    mtp: Eagle3Head

    def _states(self, hidden: Tensor) -> Tensor:
        return self.mtp.combine(hidden[:, -self.mtp.read_width :].contiguous())

    def _context(self, output: ForwardPass) -> PrefillContext | MixedContext:
        return self._own.prompt_context(output.spans)


def load_eagle_head(path: Path, loaded: LoadedModel, options: EngineOptions) -> LoadedEagleHead:
    """The head at `path` for the model `loaded`, which from now on also returns the hidden states
    that the head reads. Raises QuantkitError where the head is for another model or not
    supported."""
    checkpoint = Checkpoint.open(path)
    try:
        config = HeadConfig.from_dict(checkpoint.config)
    except QuantkitError as fault:
        raise QuantkitError(
            fault.problem.replace("config.json", str(path / "config.json"), 1), fault.remedy
        ) from fault
    aux_layers = _check_model(path, config, loaded)
    rows = resolve(parameters(config), checkpoint.tensors)
    check_stored(checkpoint, rows)
    if (
        unknown := set(checkpoint.tensors)
        - {row.name for row in rows}
        - {OFFSETS, DRAFT_VOCAB_MASK}
    ):
        raise QuantkitError(
            f"{path} has {min(unknown)}, which is not supported in EAGLE-3 heads", _REMEDY
        )
    weights = ExecutorWeights(
        checkpoint, rows, device=loaded.device, dtype=loaded.dtype, backend=options.backend
    )
    vocab = loaded.config.vocab_size
    with torch.inference_mode():
        offsets = torch.zeros(config.draft_vocab, dtype=torch.int64)
        if checkpoint.has(OFFSETS):
            offsets = checkpoint.read(OFFSETS).to(torch.int64)
        ids = offsets + torch.arange(len(offsets))
        if (
            len(ids) != config.draft_vocab
            or not 0 <= int(ids.min()) <= int(ids.max()) < vocab
            or len(ids.unique()) != len(ids)
        ):
            raise QuantkitError(
                f"{OFFSETS} of {path} refers to tokens that {options.model_path} does not have",
                _REMEDY,
            )
        own = checkpoint.has(EMBEDDING)
        embedding = weights.tensor(EMBEDDING) if own else loaded.model.embedding
        if embedding.shape[1] != config.decoder.hidden_size or len(embedding) < vocab:
            raise QuantkitError(
                f"{path} has no embedding of its own, and the model's is {tuple(embedding.shape)}",
                _REMEDY,
            )
        head = Eagle3Head(config, weights, embedding, ids.to(loaded.device), vocab)
        head.backend = options.backend
    loaded.model.aux_layers = aux_layers
    return LoadedEagleHead(head, config, loaded.dtype, loaded.device, weights.nbytes)


def _check_model(path: Path, config: HeadConfig, loaded: LoadedModel) -> tuple[int, ...]:
    """The layers of the model that the head reads."""
    hidden, layers = loaded.config.hidden_size, loaded.config.num_hidden_layers
    if config.target_hidden != hidden:
        raise QuantkitError(
            f"{path} reads hidden states of {config.target_hidden}, the model's have {hidden}",
            _REMEDY,
        )
    if type(loaded.model).__call__ is not decoder.Model.__call__:
        raise QuantkitError(
            f"EAGLE-3 heads are not supported for {loaded.checkpoint.path}",
            "run it without --draft",
        )
    aux_layers = config.aux_layers(layers)
    if not all(a < b for a, b in zip((-1, *aux_layers), (*aux_layers, layers))):
        raise QuantkitError(f"{path} reads layers {aux_layers}, the model has {layers}", _REMEDY)
    return aux_layers
