"""From a checkpoint directory to a model that computes: the part that every verb shares."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from quantkit_kernels import (
    CacheLayout,
    CodeSteps,
    KeySteps,
    cache_layout,
    check_runs,
    use_backend,
    why_no_rounded_inputs,
)

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.devices import find_device, find_dtype, set_current_device
from quantkit.common.errors import QuantkitError
from quantkit.executor.cache.cache import (
    BLOCK_SIZE,
    CacheCodes,
    OtherCaches,
    PagedCache,
    check_cache_dtype,
)
from quantkit.executor.cache.compressed_kv import CompressedKVCache, PooledIndexCache
from quantkit.executor.cache.kv_channel_scales import equalize_kv_channels
from quantkit.executor.cache.sequence_state import (
    RecurrentStates,
    RotatingCache,
    check_recurrent_options,
    recurrent_state_bytes,
    rotating_cache_bytes,
)
from quantkit.executor.options import EngineOptions, check_context
from quantkit.executor.ranks.expert_parallel import ExpertRanks
from quantkit.executor.ranks.parallel import SINGLE, Parallel, check_ranks
from quantkit.executor.weights.tp_shares import check_shares
from quantkit.executor.weights.weights import ExecutorWeights, share_range
from quantkit.models import find_block_head
from quantkit.models.architecture import (
    CompressedCache,
    KeyValueCache,
    LatentCache,
    ModelConfig,
    MtpModel,
)
from quantkit.models.cache_scales import read_cache_scales
from quantkit.models.context import cached_dtype
from quantkit.models.decoder import Model
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.dspark import BlockHead
from quantkit.models.mtp import DSPARK
from quantkit.models.short_conv import ShortConvolutions
from quantkit.models.stored_parameters import Model as StoredModel
from quantkit.models.stored_parameters import (
    block_head_rows,
    check_stored,
    check_stored_head,
    is_stored,
    read_model,
)
from quantkit.models.table import Parameter


@dataclass(frozen=True)
class LoadedModel:
    """`model`, `mtp_layers` and `config` are the architecture file's Model, MtpLayers (as many as
    asked for) and Config.

    `nbytes` is what the prepared weights hold. codes: the dtype of a cache in 8 bits, None for one
    of 16; steps: by layer, what a code is worth, where the checkpoint says so and the cache is in
    int8. warning: as in `stored_parameters.Model`. block_head: a head that drafts blocks, if asked
    for.
    """

    model: Model
    mtp_layers: tuple[MtpModel, ...]
    config: ModelConfig
    checkpoint: Checkpoint
    weights: ExecutorWeights
    device: torch.device
    dtype: torch.dtype
    codes: torch.dtype | None = None
    warning: str = ""
    steps: Mapping[int, CodeSteps] = field(default_factory=dict)
    block_head: BlockHead | None = None

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    @property
    def num_cached_layers(self) -> int:
        """Layers that keep something of every token."""
        return self.config.num_cached_layers + len(self.mtp_layers)

    def _recent_sizes(self) -> dict[int, tuple[int, int]]:
        """Of the last tokens of a running sequence, as `RotatingCache` has it; the MTP layer's,
        too."""
        held, net, drafts = self.config.cache, self.config.recurrent, len(self.mtp_layers)
        if isinstance(held, CompressedCache):
            return held.with_mtp_layers(drafts).window_shapes()
        return (
            net.with_mtp_layers(drafts).window_shapes(self.weights.parallel.size)
            if isinstance(net, ShortConvolutions)
            else self.config.recent_tokens
        )

    @property
    def _pooled_sizes(self) -> dict[int, tuple[int, int]]:
        """The same of what an indexer with a key for several tokens reads."""
        held = self.config.cache
        if isinstance(held, CompressedCache) or not held.index_pool:
            return {}
        return dict.fromkeys(self._cached_layers, (held.index_pool, 2 * held.index_dim))

    def sequence_bytes(self, places: int, ahead: int) -> int:
        """What a cache for so many sequences holds in addition to their tokens' blocks. ahead: as
        `RotatingCache` has it."""
        net = self.config.recurrent
        dtype = self.dtype if isinstance(self.config.cache, CompressedCache) else torch.float32
        states = (
            recurrent_state_bytes(net, places, self.weights.parallel.size)
            if isinstance(net, DeltaNet)
            else 0
        )
        pooled = rotating_cache_bytes(self._pooled_sizes, 0, places, self.dtype.itemsize)
        recent = rotating_cache_bytes(self._recent_sizes(), ahead, places, dtype.itemsize)
        return states + pooled + recent

    def checkpoint_bytes(self, ahead: int) -> int:
        """Of one copy of what a sequence's place holds; 0 for models without states."""
        return (self.sequence_bytes(1, ahead) - self.sequence_bytes(0, ahead)) // 2

    @property
    def cache_width(self) -> int:
        """Values of a token and layer that this rank keeps: a latent is every head's, keys and
        values are shared out with the heads."""
        return self.config.cache.width // self.config.cache.tp_shards(self.weights.parallel.size)

    @property
    def cache_token_bytes(self) -> int:
        """Of a token, over all layers, on this rank."""
        return self.num_cached_layers * self.config.cache.token_bytes(
            16 if self.codes is None else 8, self.weights.parallel.size
        )

    def new_cache(
        self, num_blocks: int, places: int = 1, ahead: int = 0, checkpoints: int = 0
    ) -> PagedCache:
        """A cache of `num_blocks` blocks, with per-sequence states of `places` sequences whose last
        `ahead` tokens can be rolled back, and `checkpoints` copies of such states."""
        layout, held, codes, net = (
            self.cache_layout,
            self.config.cache,
            None,
            self.config.recurrent,
        )
        compressed_kv = rotating_cache = pooled_index = None
        if isinstance(held, CompressedCache):
            sizes = held.with_mtp_layers(len(self.mtp_layers))
            compressed_kv = CompressedKVCache(
                sizes, num_blocks, layout.block_size, places, self.dtype, self.device, ahead
            )
        elif recent := self._recent_sizes():
            rotating_cache = RotatingCache(recent, ahead, places, torch.float32, self.device)
        if not isinstance(held, CompressedCache) and held.index_pool:
            pooled_index = PooledIndexCache(
                self._cached_layers,
                held.index_pool,
                held.index_dim,
                num_blocks,
                layout.block_size,
                places,
                self.dtype,
                self.device,
            )
        if self.codes is not None:
            heads = self.cache_width // 2 // held.head_dim if isinstance(held, KeyValueCache) else 0
            codes = CacheCodes(self.codes, heads)
        recurrent = None
        if isinstance(net, DeltaNet):
            recurrent = RecurrentStates(net, places, self.device, self.weights.parallel.size)
        return PagedCache(
            self.num_cached_layers if compressed_kv is None else 0,
            num_blocks,
            self.cache_width,
            block_size=layout.block_size,
            dtype=self.cache_dtype,
            device=self.device,
            parts=layout.widths if len(layout.widths) > 1 else (),
            codes=codes,
            code_scales=self.steps,
            index_dim=held.index_dim if isinstance(held, LatentCache) and not pooled_index else 0,
            layer_index=self._layer_index,
            others=OtherCaches(recurrent, compressed_kv, rotating_cache, pooled_index),
            checkpoints=checkpoints,
        )

    @property
    def _layer_index(self) -> dict[int, int] | None:
        """As of `PagedCache`."""
        net = self.config.recurrent
        return None if net is None else net.attention_layer_places(self.config.num_hidden_layers)

    @property
    def _cached_layers(self) -> Iterable[int]:
        """Numbers of the layers that keep something of every token."""
        places = self._layer_index
        return range(self.num_cached_layers) if places is None else places

    @property
    def cache_layout(self) -> CacheLayout:
        """How the cache lies in memory: latents as their operators read them, keys and values
        apart."""
        match self.config.cache:
            case LatentCache(kv_lora_rank, rope_dim) if self.codes is not None:
                return CacheLayout((kv_lora_rank, rope_dim), BLOCK_SIZE)
            case LatentCache(kv_lora_rank, rope_dim):
                with use_backend(self.weights.backend):
                    return cache_layout(kv_lora_rank, rope_dim, self.dtype, self.device)
            case KeyValueCache():
                return CacheLayout((self.cache_width // 2, self.cache_width // 2), BLOCK_SIZE)
            case CompressedCache():
                return CacheLayout((self.cache_width,), BLOCK_SIZE)

    @property
    def cache_dtype(self) -> torch.dtype:
        """As `models.context.cached_dtype` has it."""
        return cached_dtype(self.dtype)


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint whose config.json and headers go with what it is to be loaded with. codes,
    dtype: as `LoadedModel` has them; mtp: MTP layers, at most."""

    checkpoint: Checkpoint
    read: StoredModel
    device: torch.device
    backend: str
    dtype: torch.dtype
    codes: torch.dtype | None
    mtp: int


def open_model(
    path: Path,
    *,
    device: str = "auto",
    backend: str = "auto",
    dtype: str | None = None,
    mtp: int = 0,
    cache: str | None = None,
    tp: int = 1,
    dp: int = 1,
) -> OpenedModel:
    """Open and check, as `load_model`, and read no weight. tp: ranks that are to cut linears; dp:
    that are to share out routed experts."""
    checkpoint = Checkpoint.open(Path(path))
    read = read_model(checkpoint)
    target = find_device(device)
    _check_inputs(checkpoint, target, backend)
    try:
        check_runs(backend, target)
    except ValueError as fault:
        raise QuantkitError(
            str(fault), "choose another --backend (`quantkit kernels` lists them)"
        ) from fault
    with use_backend(backend):
        codes = check_cache_dtype(cache, target)
    compute = find_dtype(
        dtype, target, checkpoint.grid is not None and checkpoint.grid.kind == "int4"
    )
    check_shares(checkpoint, read.config, read.rows, tp, dp)
    _check_sparse(read.config, target)
    _check_compressed(read.config, target, cache)
    if mtp:
        _check_mtp(checkpoint, read)
    check_stored(checkpoint, (row for row in read.rows if mtp or not row.mtp))
    if mtp:
        check_stored(checkpoint, _head_rows(checkpoint, read.config))
    check_stored_head(checkpoint, read.rows)
    read.config.check_tokenizer(checkpoint.path)
    return OpenedModel(checkpoint, read, target, backend, compute, codes, mtp)


def open_given(options: EngineOptions) -> OpenedModel:
    """What an engine is to load, with everything refused that options and headers show."""
    check_ranks(options)
    opened = open_model(
        options.model_path,
        device=options.device,
        backend=options.backend,
        dtype=options.dtype,
        mtp=options.draft_length if options.draft is None else 0,
        cache=options.cache,
        tp=options.tp,
        dp=options.dp,
    )
    config = opened.read.config
    check_context(options.max_model_len, config.max_position_embeddings)
    check_recurrent_options(config.has_sequence_state, config.can_roll_back, options)
    return opened


def load_model(
    path: Path,
    *,
    device: str = "auto",
    backend: str = "auto",
    dtype: str | None = None,
    mtp: int = 0,
    parallel: Parallel = SINGLE,
    expert_parallel: Parallel = SINGLE,
    cache: str | None = None,
) -> LoadedModel:
    """Open, check and prepare. mtp: MTP layers, at most. cache: int8 or fp8 for a cache in 8 bits.
    parallel: ranks that cut linears; expert_parallel: ranks that share out the routed experts and
    have all else whole.

    backend: serves every operator that it has of this model; what it lacks the best one serves.
    Raises QuantkitError for a fault of the checkpoint, the architecture, the device or the backend.
    """
    sizes = {"tp": parallel.size, "dp": expert_parallel.size}
    opened = open_model(
        path, device=device, backend=backend, dtype=dtype, mtp=mtp, cache=cache, **sizes
    )
    return prepare(opened, parallel, expert_parallel)


def prepare(
    opened: OpenedModel, parallel: Parallel = SINGLE, expert_parallel: Parallel = SINGLE
) -> LoadedModel:
    """Read and lay out the weights; parallel, expert_parallel: as `load_model`."""
    checkpoint, target, backend, codes = (
        opened.checkpoint,
        opened.device,
        opened.backend,
        opened.codes,
    )
    set_current_device(target)
    architecture, config, rows = opened.read.architecture, opened.read.config, opened.read.rows
    expert_ranks = ExpertRanks(expert_parallel, target)
    has_head = bool(opened.mtp and _head_rows(checkpoint, config))
    weights = ExecutorWeights(
        checkpoint,
        rows,
        device=target,
        dtype=opened.dtype,
        backend=backend,
        parallel=parallel,
        expert_ranks=expert_ranks,
    )
    with torch.inference_mode():
        model = architecture.Model(config, weights)
        model.backend = backend
        count = min(opened.mtp, config.num_nextn_predict_layers)
        count = count if architecture.MtpLayer and not has_head else 0
        layers = tuple(architecture.MtpLayer(config, weights, number) for number in range(count))  # type: ignore[misc]
        for layer in layers:
            layer.follow(model)
            layer.backend = backend
        block_head: BlockHead | None = None
        if has_head:
            block_head = find_block_head(checkpoint.config).HEAD(config, weights)
            block_head.follow(model)
            block_head.backend = backend
    steps = _steps(checkpoint, config, rows, target, parallel) if codes == torch.int8 else {}
    if codes is not None:
        uneven = [*model.layers, *(layer.block for layer in layers)]
        equalize_kv_channels(
            [layer for number, layer in enumerate(uneven) if number not in steps], rows, checkpoint
        )
    return LoadedModel(
        model,
        layers,
        config,
        checkpoint,
        weights,
        target,
        opened.dtype,
        codes,
        opened.read.warning,
        steps,
        block_head,
    )


def _head_rows(checkpoint: Checkpoint, config: ModelConfig) -> list[Parameter]:
    return block_head_rows(checkpoint.config, config, checkpoint.tensors)


def _steps(
    checkpoint: Checkpoint,
    config: ModelConfig,
    rows: list[Parameter],
    device: torch.device,
    parallel: Parallel,
) -> dict[int, CodeSteps]:
    """Of this rank's heads, on the device."""
    steps: dict[int, CodeSteps] = {}
    for layer, found in read_cache_scales(checkpoint, config.cache, rows).items():
        if isinstance(found, KeySteps):
            heads = len(found.keys)
            own = slice(
                *share_range(heads, "key heads", "the cache", parallel.rank, parallel.size, heads)
            )
            steps[layer] = KeySteps(*(side[own].to(device) for side in found))
        else:
            steps[layer] = found.to(device)
    return steps


def _check_sparse(config: ModelConfig, device: torch.device) -> None:
    held = None if isinstance(config.cache, CompressedCache) else config.cache
    if device.type == "npu" and held and held.index_dim:
        reason = (
            "sparse attention is not computed on NPUs: their captured steps receive lengths "
            "by the host, which does not select"
        )
        raise QuantkitError(reason, "run it on another device")
    pool = held.index_pool if held else 0
    if pool and BLOCK_SIZE % pool:
        raise QuantkitError(
            f"index keys of {pool} tokens each do not fill blocks of {BLOCK_SIZE} tokens",
            "quantize, ppl and eval compute the model; serve it with another engine",
        )


def _check_compressed(config: ModelConfig, device: torch.device, cache: str | None) -> None:
    if not isinstance(config.cache, CompressedCache):
        return
    if device.type == "npu":
        raise QuantkitError(
            "compressed attention is not computed on NPUs", "run it on another device"
        )
    if cache is not None:
        raise QuantkitError(
            f"no cache of {cache} for compressed attention: its entries have 16 bits",
            "leave --cache out",
        )


def _check_inputs(checkpoint: Checkpoint, device: torch.device, backend: str) -> None:
    refused = why_no_rounded_inputs(backend, device)
    rounds = (
        (module, one.grid.label)
        for module, one in checkpoint.linears.items()
        if one.grid and not one.grid.is_integer and checkpoint.activation_bits(module) < 16
    )
    module, label = next(rounds, ("", "")) if refused else ("", "")
    if module:
        where = device.type if backend == "auto" else f"backend {backend}"
        reason = (
            f"{module} ({label}) rounds what it reads, which is not computed on {where}: {refused}"
        )
        raise QuantkitError(
            reason,
            "quantize the source with --scheme fp4-w4a16 or int8-a8w8c16, or run it on a CPU or "
            "with CUDA",
        )


def _check_mtp(checkpoint: Checkpoint, read: StoredModel) -> None:
    remedy = "leave out --draft-length"
    if checkpoint.has(DSPARK):
        if find_block_head(checkpoint.config) is None:
            raise QuantkitError(
                f"{checkpoint.path} has a DSpark draft head (mtp.*), which quantkit keeps and does "
                "not run",
                f"{remedy}; --prompt-lookup guesses without a head, vLLM and SGLang run this one",
            )
        if not _head_rows(checkpoint, read.config):
            raise QuantkitError(
                f"{checkpoint.path} has a DSpark draft head, and its config.json no "
                "dspark_block_size",
                "use the config.json that came with the model",
            )
        return
    if not read.config.num_nextn_predict_layers:
        if any(row.role == "copied" and row.name.startswith("mtp.") for row in read.rows):
            raise QuantkitError(
                f"{checkpoint.path} has an MTP layer (mtp.*), which quantkit keeps and does not run",
                f"{remedy}; vLLM and SGLang run it",
            )
        raise QuantkitError(
            read.warning or f"{checkpoint.path} has no MTP layer (num_nextn_predict_layers)", remedy
        )
    if not any(row.mtp and is_stored(checkpoint, row) for row in read.rows):
        raise QuantkitError(
            f"config.json of {checkpoint.path} names an MTP layer, its tensors are missing",
            remedy,
        )
