"""Estimated bytes on one Ascend card that a step needs in addition to weights and cache: CANN's
workspaces and activations, from a model's parameter table.

    workspace_bytes(parameters, config, scheme.weight, devices=8, context=32768)

Used by plans; on a real card the executor measures instead (executor/memory_budget.py).
"""

from quantkit.grids.base import Grid
from quantkit.models.architecture import ModelConfig
from quantkit.models.table import Parameter

PREFILL_TOKENS = 2048
"""Prompt tokens per step, the executor's default."""
HALF = 2
COLLECTIVE_BYTES = 2 * 200 * 10**6
"""HCCL's send and receive buffers at the default HCCL_BUFFSIZE."""
_CORES, _HEADS_AT_ONCE, _KEYS_AT_ONCE, _LATENT, _LIBRARY_BYTES = 24, 256, 512, 512, 16 << 20
LATENT_ATTENTION_BYTES = _LIBRARY_BYTES + 2 * _CORES * _HEADS_AT_ONCE * (
    _KEYS_AT_ONCE * (4 + 2) + _LATENT * (4 + 4) + 8 + (_LATENT + 16) * 4
)
"""Largest workspace of npu_fused_infer_attention_score in a decode step of 16-bit latent attention
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
