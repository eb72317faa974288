"""Calibrated static scales of an 8-bit KV cache, and the tensors that store them.

ModelSlim's names, as vllm-ascend 0.23.0 reads them (quantization/methods/kv_c8.py,
patch/worker/patch_weight_utils.py and patch_gqa_c8.py):

    latent KV   ATTENTION.fa_k.scale [1, 1]            ATTENTION.fa_k.offset int8 [1, 1], zero
    keys        K_PROJ.kv_cache_scale [kv_heads * D]   K_PROJ.kv_cache_offset, zeros
    values      the same with V_PROJ

Scales of keys apply after rotation. vllm-ascend reads but does not use the other names for latent
KV, fa_q and fa_v: queries are quantized dynamically, and a latent is key and value at once. Scales
are stored in bfloat16, like vllm-ascend's own parameters. Of FP8, as llm-compressor writes and
vLLM and SGLang read them, ATTENTION.k_scale [1] and ATTENTION.v_scale [1].
"""

import math
from collections.abc import Iterable, Mapping

import torch
from quantkit_kernels import CodeSteps, KeySteps
from torch import Tensor

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.grids.names import CacheCodes
from quantkit.models.architecture import KeyValueCache, LatentCache
from quantkit.models.table import Parameter, Projection

STORED = torch.bfloat16
_OWNERS: tuple[Projection, ...] = ("kv_a", "k", "v")
_MAX_EXPONENT = 8
"""Largest exponent of the divisors, which are powers of two: what fits in float16 together with
weights."""


def supports_cache_scales(cache: object) -> bool:
    """Whether static scales are defined for a cache: latent KV without an indexer, or keys and
    values."""
    return isinstance(cache, KeyValueCache) or (
        isinstance(cache, LatentCache) and not cache.index_dim
    )


def cache_scale_specs(
    cache: LatentCache | KeyValueCache, rows: Iterable[Parameter], codes: CacheCodes = "int8"
) -> dict[str, tuple[TensorSpec, ...]]:
    """The tensors that store scales, by the name of the parameter that they belong to: kv_a, or k
    and v."""
    owners = (
        row
        for row in rows
        if row.role == "linear" and row.block == "attention" and row.projection in _OWNERS
    )
    return {row.name: _specs(cache, row, codes) for row in owners}


def _specs(
    cache: LatentCache | KeyValueCache, row: Parameter, codes: CacheCodes
) -> tuple[TensorSpec, ...]:
    stem = row.module.rpartition(".")[0]
    if codes == "fp8":
        return (TensorSpec(f"{stem}.{row.projection}_scale", STORED, (1,)),)
    if isinstance(cache, LatentCache):
        return TensorSpec(f"{stem}.fa_k.scale", STORED, (1, 1)), TensorSpec(
            f"{stem}.fa_k.offset", torch.int8, (1, 1)
        )
    size = (cache.kv_heads * cache.head_dim,)
    return TensorSpec(f"{row.module}.kv_cache_scale", STORED, size), TensorSpec(
        f"{row.module}.kv_cache_offset", STORED, size
    )


def cache_scale_tensors(
    specs: Mapping[str, tuple[TensorSpec, ...]], rows: Iterable[Parameter], steps: CodeSteps
) -> dict[str, Tensor]:
    """The scale tensors of one layer with these rows, by name."""
    tensors = {}
    for row in rows:
        for spec in specs.get(row.name, ()):
            if not spec.name.endswith("scale"):
                tensors[spec.name] = torch.zeros(spec.shape, dtype=spec.dtype)
            else:
                own = (
                    steps
                    if isinstance(steps, Tensor)
                    else steps.keys
                    if row.projection == "k"
                    else steps.values
                )
                first = own.flatten()[: math.prod(spec.shape)]
                tensors[spec.name] = first.to(spec.dtype).reshape(spec.shape).cpu()
    return tensors


def parse_cache_scales(
    cache: LatentCache | KeyValueCache,
    specs: Mapping[str, tuple[TensorSpec, ...]],
    rows: Iterable[Parameter],
    tensors: Mapping[str, Tensor],
) -> CodeSteps:
    """The inverse of `cache_scale_tensors`, in float32."""
    scales = {
        row.projection: tensors[specs[row.name][0].name].float()
        for row in rows
        if row.name in specs
    }
    if isinstance(cache, LatentCache):
        return scales["kv_a"].reshape(())
    shape = cache.kv_heads, cache.head_dim
    return KeySteps(*(scales[side].expand(math.prod(shape)).reshape(shape) for side in ("k", "v")))


def read_cache_scales(
    checkpoint: Checkpoint, cache: object, rows: Iterable[Parameter]
) -> dict[int, CodeSteps]:
    """Scales by layer, for layers that have them; empty where the checkpoint declares no int8
    cache. Raises QuantkitError for a cache with an offset."""
    if not supports_cache_scales(cache) or checkpoint.format.cache_codes(checkpoint.side) is None:
        return {}
    assert isinstance(cache, LatentCache | KeyValueCache)
    rows = list(rows)
    specs = cache_scale_specs(cache, rows)
    by_layer: dict[int, list[Parameter]] = {}
    for row in rows:
        if row.name in specs and row.layer is not None and checkpoint.has(specs[row.name][0].name):
            by_layer.setdefault(row.layer, []).append(row)
    stored = [
        spec.name
        for own in by_layer.values()
        for row in own
        for spec in specs[row.name]
        if checkpoint.has(spec.name)
    ]
    read = {name: checkpoint.read(name) for name in stored}
    shifted = next(
        (name for name, tensor in read.items() if name.endswith("offset") and bool(tensor.any())),
        None,
    )
    if shifted is not None:
        raise QuantkitError(
            f"{shifted} of {checkpoint.path} is not zero: its int8 cache has an offset",
            "leave --cache out, for 16 bits, or use --cache fp8, which scales each token by itself",
        )
    return {layer: parse_cache_scales(cache, specs, own, read) for layer, own in by_layer.items()}


def power_of_two_ratios(sizes: Tensor) -> Tensor:
    """The power of two nearest to each of `sizes` over their median; 1 for zero."""
    middle = sizes.median().clamp_min(torch.finfo(torch.float32).tiny)
    exponents = (sizes / middle).log2().round().clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    return torch.where(sizes > 0, exponents, 0.0).exp2()


def divide_gains(gains: Tensor, divisors: Tensor) -> Tensor:
    """gains / divisors, in the dtype of gains."""
    return (gains.float() / divisors).to(gains.dtype)
