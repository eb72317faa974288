"""What one device holds of a checkpoint under tensor, pipeline, data and expert parallelism, and
how many tokens fit next to it.

Counted from headers: every stored byte, split as the model's table says. The latent cache of MLA is
not split by tensor parallelism; every rank holds it whole.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.profiles import LoadProblem
from quantkit.grids.base import Grid
from quantkit.models.architecture import CacheBits, KeyValueCache, ModelConfig
from quantkit.models.eagle3 import HeadConfig, is_head
from quantkit.models.stored_parameters import Model, read_model
from quantkit.models.table import Parameter

GIB = 2**30


@dataclass(frozen=True)
class ParallelSizes:
    """Parallelism over a world of devices. `expert`: routed experts, including `redundant` copies
    per layer, are spread whole over the devices of a stage; else they are split like other linears.
    """

    tensor: int
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    redundant: int = 0

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """Devices of one pipeline stage, which share its experts."""
        return self.tensor * self.data

    def local_experts(self, experts: int) -> int:
        """Experts of a layer on the fullest device, including copies."""
        return math.ceil((experts + self.redundant) / self.expert_ranks)


@dataclass(frozen=True)
class Fit:
    """Bytes on the fullest device. state_bytes_per_request: linear attention state, independent of
    the length, as in quantkit's executor. tokens: that fit next to the weights, for requests of
    `context` tokens; fits: whether at least one such request does."""

    weight_bytes: int
    reserve_bytes: int
    usable_bytes: int
    cache_bytes_per_token: int
    state_bytes_per_request: int
    tokens: int
    context: int

    @property
    def fits(self) -> bool:
        return self.tokens >= self.context


@dataclass(frozen=True)
class DraftSizes:
    """Bytes that a draft model or an EAGLE-3 head takes of each device, which holds it whole:
    weights, and cache per token."""

    weight_bytes: int = 0
    token_bytes: int = 0


NO_DRAFT = DraftSizes()


def draft_sizes(checkpoint: Checkpoint, cache_bits: CacheBits = 16) -> DraftSizes:
    """Sizes as stored. MTP layers of a draft model are not loaded; an EAGLE-3 head's cache always
    has 16 bits."""
    if is_head(checkpoint.config):
        weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        return DraftSizes(
            weights, HeadConfig.from_dict(checkpoint.config).decoder.cache.token_bytes(16)
        )
    model = read_model(checkpoint)
    held = (row for row in model.rows if not row.mtp and row.role != "ngram_table")
    weights = sum(_stored_bytes(checkpoint, row) for row in held)
    return DraftSizes(
        weights, model.config.num_cached_layers * model.config.cache.token_bytes(cache_bits)
    )


def fit(
    checkpoint: Checkpoint,
    parallel: ParallelSizes,
    context: int,
    memory_gib: float,
    fraction: float,
    reserve_gib: float,
) -> Fit:
    """Whether weights without MTP layers, reserve and one request of `context` tokens fit in the
    `fraction` of `memory_gib` that an engine may use; the cache has 16 bits."""
    model = read_model(checkpoint)
    return fit_rows(
        stored_rows(checkpoint, model.rows),
        model.config,
        parallel,
        context,
        memory_gib,
        fraction,
        reserve_gib,
    )


def fit_rows(
    rows: list[tuple[Parameter, int]],
    config: ModelConfig,
    parallel: ParallelSizes,
    context: int,
    memory_gib: float,
    fraction: float,
    reserve_gib: float,
    cache_bits: CacheBits = 16,
    draft: DraftSizes = NO_DRAFT,
    mtp: bool = False,
) -> Fit:
    """`fit` for parameters given with their (future) stored bytes, and an additional draft model.
    MTP layers belong to the last stage, and count if `mtp`; n-gram tables are on no device."""
    experts = len({row.expert for row, _ in rows if row.expert is not None})
    stages = [0.0] * parallel.pipeline
    per_stage = math.ceil(config.num_hidden_layers / parallel.pipeline)
    for row, stored in rows:
        if row.role != "ngram_table" and (not row.mtp or mtp):
            last = parallel.pipeline - 1
            stage = 0 if row.role == "embedding" and not row.mtp else last
            stages[stage if row.layer is None else min(row.layer // per_stage, last)] += (
                stored * _share(row, parallel, experts)
            )
    weights = math.ceil(max(stages)) + draft.weight_bytes
    reserve, usable = int(reserve_gib * GIB), int(memory_gib * fraction * GIB)
    mtp_layers = (
        len({row.layer for row, _ in rows if row.mtp and row.layer is not None}) if mtp else 0
    )
    cached = math.ceil(config.num_cached_layers / parallel.pipeline) + mtp_layers
    per_token = cached * config.cache.token_bytes(cache_bits, parallel.tensor) + draft.token_bytes
    state = (
        0
        if config.recurrent is None
        else math.ceil(config.recurrent.state_bytes(parallel.tensor) / parallel.pipeline)
    )
    tokens = max((usable - reserve - weights) * context // (per_token * context + state), 0)
    return Fit(weights, reserve, usable, per_token, state, tokens, context)


def stored_rows(checkpoint: Checkpoint, rows: list[Parameter]) -> list[tuple[Parameter, int]]:
    """Each parameter and the bytes that the checkpoint stores of it."""
    return [(row, _stored_bytes(checkpoint, row)) for row in rows]


def check_split(checkpoint: Checkpoint, model: Model, parallel: ParallelSizes) -> list[LoadProblem]:
    """Heads, layers and linears that do not divide over the ranks."""

    def grid(module: str) -> Grid | None:
        linear = checkpoint.linears.get(module)
        return None if linear is None else linear.grid

    problem = find_part_problem(model.config, parallel) or find_split_problem(
        model.rows, grid, checkpoint.input_rotation, parallel
    )
    return [] if problem is None else [problem]


def find_part_problem(config: ModelConfig, parallel: ParallelSizes) -> LoadProblem | None:
    """Attention heads that do not divide over the tensor-parallel ranks, or fewer layers than
    stages. Fewer key-value heads than ranks are replicated (vLLM, config/model.py)."""
    heads, ranks = config.num_attention_heads, parallel.tensor
    kv = config.cache.kv_heads if isinstance(config.cache, KeyValueCache) else ranks
    for count, what, divides in (
        (heads, "attention", heads % ranks == 0),
        (kv, "key-value", max(kv, ranks) % min(kv, ranks) == 0),
    ):
        if not divides:
            problem = f"the model has {count} {what} heads, which {ranks} ranks cannot share evenly"
            return LoadProblem(
                "error", problem, "use another number of tensor-parallel ranks (--devices, --boxes)"
            )
    if config.num_hidden_layers < parallel.pipeline:
        problem = (
            f"the model has {config.num_hidden_layers} layers, fewer than {parallel.pipeline} "
            "pipeline stages"
        )
        return LoadProblem("error", problem, "use fewer boxes, or another layout")
    return None


def find_split_problem(
    rows: Iterable[Parameter],
    grid: Callable[[str], Grid | None],
    input_rotation: Callable[[str], int],
    parallel: ParallelSizes,
) -> LoadProblem | None:
    """The first linear that does not divide. grid: of a module's weight, None if it is not
    quantized; linears are split in units of 8 rows where int4 is packed along them, or of the group
    size along columns. input_rotation: size of the blocks in which a module's inputs are rotated as
    the model runs, 0 if they are not; such inputs are not split."""
    for row in rows:
        if parallel.tensor > 1 and input_rotation(row.module):
            return LoadProblem.error(
                f"inputs of {row.module} are rotated as the model runs, which engines do on one "
                "GPU alone",
                "use one tensor-parallel rank (--devices 1)",
            )
        ranks = row.tp_shards(parallel.expert_ranks if row.expert is not None else parallel.tensor)
        if (
            (row.expert is not None and parallel.expert)
            or row.split not in ("column", "row")
            or ranks == 1
        ):
            continue
        if (
            row.split == "row" and len(row.shape) == 1
        ):  # a bias added after the sum over ranks is not split
            continue
        stored = grid(row.module)
        step = 1 if stored is None else stored.rank_multiple(inputs=row.split == "row")
        size = row.shape[row.output_axis if row.split == "column" else 1]
        if size % (ranks * step):
            what = "outputs" if row.split == "column" else "input channels"
            problem = (
                f"{row.module} has {size} {what}, which {ranks} ranks cannot share in steps of "
                f"{step}"
            )
            remedy = "use fewer tensor-parallel ranks" + (
                ", or a smaller group size" if row.split == "row" and step > 1 else ""
            )
            return LoadProblem(
                "error",
                problem,
                remedy
                + (", or a layout with expert parallelism" if row.expert is not None else ""),
            )
    return None


def _stored_bytes(checkpoint: Checkpoint, row: Parameter) -> int:
    if row.module in checkpoint.linears:
        return sum(checkpoint.tensors[name].nbytes for name in checkpoint.parts(row.module))
    return checkpoint.tensors[row.name].nbytes if checkpoint.has(row.name) else 0


def _share(row: Parameter, parallel: ParallelSizes, experts: int) -> float:
    """The fraction of a tensor on the fullest device."""
    if row.expert is not None:
        return (
            parallel.local_experts(experts) / experts
            if parallel.expert
            else 1 / parallel.expert_ranks
        )
    return 1 / row.tp_shards(parallel.tensor)
