"""What one device holds of a plan: weights, cache, and a reserve for activations and workspaces.

Estimated bytes on one Ascend card that a step needs in addition to weights and cache are CANN's
workspaces and activations, from a model's parameter table:

    workspace_bytes(parameters, config, scheme.weight, devices=8, context=32768)

Used by plans; on a real card the executor measures instead (executor/memory_budget.py).
"""

from dataclasses import dataclass, replace

from quantkit.common.sizes import format_bytes
from quantkit.engines.memory import NO_DRAFT, DraftSizes, ParallelSizes, fit_rows
from quantkit.grids.base import Grid
from quantkit.models.architecture import CacheBits, ModelConfig, longest_text
from quantkit.models.table import Parameter
from quantkit.planning.devices import Devices
from quantkit.quantization.job import Job

PREFILL_TOKENS = 2048
"""Prompt tokens per step, the executor's default."""
HALF = 2
COLLECTIVE_BYTES = 2 * 200 * 10**6
"""HCCL's send and receive buffers at the default HCCL_BUFFSIZE."""
_CORES, _HEADS_AT_ONCE, _KEYS_AT_ONCE, _LATENT, _LIBRARY_BYTES = 24, 256, 512, 512, 16 << 20
LATENT_ATTENTION_BYTES = _LIBRARY_BYTES + 2 * _CORES * _HEADS_AT_ONCE * (
    _KEYS_AT_ONCE * (4 + 2) + _LATENT * (4 + 4) + 8 + (_LATENT + 16) * 4
)
"""Largest workspace of npu_fused_infer_attention_score_v2 in a decode step of 16-bit latent attention
(ops-transformer, fia_tiling_nonquant_mla.cpp): for two pieces per core, scores as float32 and 16
bits and two float32 sums; plus partial results of keys that were split over several cores. The
library's own share is assumed."""


def workspace_bytes(
    parameters: list[Parameter],
    config: ModelConfig,
    grid: Grid,
    *,
    devices: int,
    context: int,
    tokens: int = PREFILL_TOKENS,
) -> dict[str, int]:
    """Bytes by purpose. tokens: of a prompt computed in one step; context: of the longest sequence,
    whose latents a prompt expands.

    decoded experts: the grouped product of 16-bit activations with 4-bit weights keeps a 16-bit
    copy of the weights of all experts it is given, including the shared one (ops-transformer,
    grouped_matmul_tiling.cpp); gate and up are the larger. int4 per channel uses 8-bit activations,
    whose product decodes nothing. attention: of a decode step over latents; other kinds are not
    estimated.
    """
    layer = min(
        (row.layer for row in parameters if row.expert is not None and row.layer is not None),
        default=None,
    )
    experts = [row for row in parameters if row.expert is not None and row.layer == layer]
    shared = [row for row in parameters if row.block == "shared_expert" and row.layer == layer]
    inside = (
        sum(row.shape[0] for row in experts if row.expert == 0 and row.projection in ("gate", "up"))
        // devices
    )
    number = len({row.expert for row in experts}) + bool(shared)
    chosen = config.routing.num_experts_per_tok + bool(shared) if config.routing else 0
    four_bits = grid.kind == "int4" and grid.group_size is not None
    rows = tokens * chosen
    return {
        "decoded experts": number * inside * config.hidden_size * HALF
        if four_bits and experts
        else 0,
        "rows of experts": rows * (2 * config.hidden_size + inside + inside // 2) * HALF,
        "prompt": tokens * config.hidden_size * 4 * HALF
        + _expanded(parameters, devices) * context * HALF,
        "attention": LATENT_ATTENTION_BYTES if _expanded(parameters, devices) else 0,
        "collectives": COLLECTIVE_BYTES if devices > 1 else 0,
    }


def _expanded(parameters: list[Parameter], devices: int) -> int:
    """Values per cached token that prompt attention expands a latent to: keys and values of the
    rank's heads."""
    return max((row.shape[0] for row in parameters if row.role == "kv_b"), default=0) // devices


MEMORY_FRACTION = 0.9
"""Share of a device's memory that an engine uses."""
RESERVE_GIB = 4.0
"""Part of that for activations, graphs and communication."""
_CACHE_NAMES: dict[CacheBits, str] = {8: "8-bit", 16: "BF16"}


@dataclass(frozen=True)
class RequestSizes:
    """The request that must fit next to the weights: `context` tokens in a cache of `bits`.
    redundant: copies of routed experts per layer; data: data parallelism, in which only the routed
    experts are shared between devices. draft: sizes of the draft model."""

    context: int
    redundant: int
    bits: CacheBits
    data: bool
    draft: DraftSizes = NO_DRAFT

    def sizes(self, devices: int) -> ParallelSizes:
        if self.data:
            return ParallelSizes(1, data=devices, expert=True, redundant=self.redundant)
        return ParallelSizes(devices, expert=self.redundant > 0, redundant=self.redundant)


@dataclass(frozen=True)
class DeviceShare:
    """What one of `count` devices holds, in bytes.

    context: tokens of the request that must fit; cache_tokens: tokens of all requests that fit next
    to the weights; state_bytes_per_request: linear attention state, independent of the length.
    cache_tokens, cache_bytes_per_token and state_bytes_per_request are None for an unknown
    architecture. workspace_bytes: known parts of the reserve by purpose, of Ascend NPUs.
    """

    count: int
    memory_bytes: int
    usable_bytes: int
    weight_bytes: int
    reserve_bytes: int
    workspace_bytes: dict[str, int]
    cache_bytes: int
    cache_bytes_per_token: int | None
    state_bytes_per_request: int | None
    cache_tokens: int | None
    context: int
    assumption: str

    def facts(self) -> list[tuple[str, str]]:
        room = "" if self.cache_tokens is None else f", {self.cache_tokens:,} tokens"
        return [
            (
                f"  {self.count} device{'s' if self.count > 1 else ''} of "
                f"{format_bytes(self.memory_bytes)}",
                f"{format_bytes(self.weight_bytes)} of weights each",
            ),
            ("  room for the cache", f"{format_bytes(self.cache_bytes)} each{room}"),
            ("  assuming", self.assumption),
        ]


def _workspaces(job: Job, devices: Devices, context: int) -> dict[str, int]:
    """Workspaces on Ascend NPUs; empty for other devices."""
    if devices.device != "npu" or job.inventory.by_name:
        return {}
    grid, config = job.request.scheme.weight, job.inventory.config
    return workspace_bytes(job.rows, config, grid, devices=devices.count, context=context)


def fit_devices(
    rows: list[tuple[Parameter, int]], job: Job, devices: Devices, request: RequestSizes
) -> tuple[bool, DeviceShare]:
    """Whether weights and one request fit, and what a device then holds."""
    context, usable = request.context, int(devices.memory_bytes * MEMORY_FRACTION)
    workspaces = _workspaces(job, replace(devices, count=1) if request.data else devices, context)
    reserve = max(int(RESERVE_GIB * 2**30), sum(workspaces.values()))
    memory = (
        f"{MEMORY_FRACTION:.0%} of each device usable, {reserve / 2**30:.3g} GiB of that for "
        "activations"
    )
    if job.inventory.by_name:
        quantized = {row.name for row in job.linears}
        weights = sum(
            -(-stored // devices.count) if row.name in quantized else stored for row, stored in rows
        )
        weights += request.draft.weight_bytes
        fits, per_token, state, tokens = usable - reserve >= weights, None, None, None
        assumption = (
            f"quantized linears split over {devices.count}, {memory}; the cache of an "
            "unknown architecture is not counted"
        )
    else:
        found = fit_rows(
            rows,
            job.inventory.config,
            request.sizes(devices.count),
            context,
            devices.memory_bytes / 2**30,
            MEMORY_FRACTION,
            reserve / 2**30,
            request.bits,
            request.draft,
        )
        weights, fits, per_token, tokens = (
            found.weight_bytes,
            found.fits,
            found.cache_bytes_per_token,
            found.tokens * (devices.count if request.data else 1),
        )
        state = found.state_bytes_per_request
        shards = job.inventory.config.cache.tp_shards(devices.count)
        mode = "data and expert" if request.data else "tensor"
        split = f"{mode} parallel over {devices.count}, " if devices.count > 1 else ""
        left_out = "MTP layer not loaded, " if any(row.mtp for row, _ in rows) else ""
        assumption = f"{split}{left_out}{memory}, {_CACHE_NAMES[request.bits]} cache"
        if request.data:
            assumption += (
                "; attention and shared experts whole on every device, and each request's "
                "cache on one"
            )
        elif shards < devices.count:
            assumption += f"; each part of the cache on {devices.count // shards} devices"
        if state:
            assumption += (
                f"; {format_bytes(state)} of states for each request of {context:,} tokens"
            )
        if 0 < (limit := longest_text(job.inventory.config)) < context:
            assumption += f"; {context:,} tokens are more than the model's own limit of {limit:,}"
        if request.redundant:
            assumption += f"; experts whole, {request.redundant} copies a layer"
    if request.draft.weight_bytes:
        assumption += (
            f"; {format_bytes(request.draft.weight_bytes)} of a draft model on every device"
        )
    return fits, DeviceShare(
        count=devices.count,
        memory_bytes=devices.memory_bytes,
        usable_bytes=usable,
        weight_bytes=weights,
        reserve_bytes=reserve,
        workspace_bytes=workspaces,
        cache_bytes=max(usable - reserve - weights, 0),
        cache_bytes_per_token=per_token,
        state_bytes_per_request=state,
        cache_tokens=tokens,
        context=context,
        assumption=assumption,
    )
