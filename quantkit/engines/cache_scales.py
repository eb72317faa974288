"""What an engine reads of the scales that a checkpoint has for an 8-bit KV cache."""

from dataclasses import dataclass

from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.profiles import EngineProfile, LoadProblem
from quantkit.grids.names import CacheCodes


def check_cache(
    profile: EngineProfile, checkpoint: Checkpoint, codes: CacheCodes | None
) -> list[LoadProblem]:
    """What keeps the engine from an 8-bit cache of this model with scales from the checkpoint."""
    model_type = checkpoint.config.get("model_type")
    supported = () if codes is None else profile.caches.get(codes, ())
    if codes is None or model_type in supported:
        return []
    return [
        LoadProblem.error(
            f"{profile.engine} reads no scales of an {codes} cache of {model_type}",
            f"use --scheme int8-a8w8c16, or leave --kv-cache out; it reads them for {', '.join(supported)}"
            if supported
            else "use another engine",
        )
    ]


@dataclass(frozen=True)
class Fp8Cache:
    """FP8 of a KV cache as a checkpoint has it: number of stored scales; the strategy of
    kv_cache_scheme, "tensor" where it says none."""

    scales: int
    strategy: str = "tensor"

    @property
    def text(self) -> str:
        return f"FP8, {self.scales:,} stored scales, one for each {self.strategy}"


def find_fp8_cache(checkpoint: Checkpoint) -> Fp8Cache | None:
    """None where config.json declares no such cache, and no scale of one is stored."""
    block = checkpoint.config.get("quantization_config") or {}
    side = checkpoint.side.get("hf_quant_config.json", {}).get("quantization") or {}
    scheme = block.get("kv_cache_scheme") or {}
    algorithm = block.get("kv_cache_quant_algo") or side.get("kv_cache_quant_algo")
    scales = sum(
        name.endswith((".k_scale", ".v_scale", ".kv_scale")) for name in checkpoint.tensors
    )
    declared = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    if not (declared or algorithm == "FP8" or (scales and not scheme)):
        return None
    return Fp8Cache(scales, str(scheme.get("strategy") or "tensor"))


def check_fp8_cache(profile: EngineProfile, checkpoint: Checkpoint) -> list[LoadProblem]:
    """What the engine does not read of the checkpoint's cache scales, or reads where asked only."""
    cache, engine, format = find_fp8_cache(checkpoint), profile.engine, checkpoint.format.name
    if cache is None:
        scheme = (checkpoint.config.get("quantization_config") or {}).get("kv_cache_scheme")
        remedy = "remove it from config.json: the cache then has 16 bits"
        return (
            [LoadProblem.error(f"{engine} reads no kv_cache_scheme but of FP8", remedy)]
            if scheme
            else []
        )
    options = profile.fp8_caches.get(format)
    model_type = checkpoint.config.get("model_type")
    lacks = {
        f"of {format}": options is None,
        f"of {model_type}": model_type not in profile.caches.get("fp8", ()),
        f"for each {cache.strategy}": cache.strategy
        not in ("tensor", *(["attn_head"] if profile.fp8_cache_heads else [])),
    }
    what = next((what for what, lacking in lacks.items() if lacking), None)
    if what is not None:
        return [
            LoadProblem.warning(
                f"{engine} reads no FP8 scales {what} for its KV cache, and the checkpoint has "
                f"{cache.scales:,}",
                "serve it with a 16-bit cache, which needs none of them",
            )
        ]
    if not cache.scales:
        return [
            LoadProblem.warning(
                f"{engine} takes 1 for the FP8 scales of its KV cache, for none is stored",
                "serve it with a 16-bit cache, or quantize the cache with calibrated scales",
            )
        ]
    if options:
        text = " ".join(options)
        return [
            LoadProblem.warning(
                f"{engine} uses the FP8 scales of the KV cache with {text} only", f"add {text}"
            )
        ]
    return []
