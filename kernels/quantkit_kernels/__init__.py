"""Quantized GEMMs and the fused operators of a DeepSeek-style decode step: one API, several
backends.

Plain tensors in, plain tensors out; nothing is imported from quantkit. A weight (`Int4`, `Int8`,
`Fp4`, `Dense`) is laid out for a backend once, by `prepare` or an `ExpertsBuilder`, and then
called. `table()` says which operator runs where, and why not where it does not. Arguments that do
not fit raise ValueError naming the argument.
"""

from quantkit_kernels.backends import (
    BACKENDS,
    OPERATORS,
    OperatorRow,
    asked,
    by_own_backend,
    check_runs,
    prefer,
    table,
)
from quantkit_kernels.codes import CODES, CodedKeys, CodedLatents, CodeSteps, KeySteps, KeyValues
from quantkit_kernels.experts import NO_EXPERT, Experts, ExpertsBuilder, prepare_experts
from quantkit_kernels.functional import (
    add_rms_norm,
    gate_and_mul,
    likeliest,
    mla_decode,
    mla_prepare,
    mla_queries,
    rms_norm,
    rope,
    silu_and_mul,
)
from quantkit_kernels.gating import SILU, ExpertBiases, Gating
from quantkit_kernels.grouped import gqa_decode, gqa_prepare
from quantkit_kernels.latents import (
    CacheLayout,
    Latents,
    cache_layout,
    doubled_angles,
    pairs_apart,
    why_no_codes,
)
from quantkit_kernels.linear import (
    Linear,
    prepare,
    prepare_dense,
    prepare_fp4,
    prepare_int4,
    prepare_int8,
    quantize_rows,
    round_to_nvfp4,
    why_no_rounded_inputs,
)
from quantkit_kernels.paged import Norms, PagedKeys, PagedLatents, Rotation
from quantkit_kernels.pairs import UnsummedPairs
from quantkit_kernels.prolog import (
    MlaProlog,
    MlaSizes,
    MlaWeights,
    prepare_mla_prolog,
    why_no_prolog,
)
from quantkit_kernels.prompts import (
    PaddedPrompts,
    PromptPart,
    Prompts,
    SpansNow,
    gqa_prefill,
    mla_prefill,
)
from quantkit_kernels.routing import Routing, moe_gate, route
from quantkit_kernels.self_check import Measurement, check
from quantkit_kernels.weights import (
    Dense,
    Fp4,
    Int4,
    Int4Int8,
    Int8,
    NarrowInt8,
    Weight,
    dequantize,
    stack,
)

__all__ = [
    "BACKENDS",
    "CODES",
    "NO_EXPERT",
    "OPERATORS",
    "SILU",
    "CacheLayout",
    "CodeSteps",
    "CodedKeys",
    "CodedLatents",
    "Dense",
    "ExpertBiases",
    "Experts",
    "ExpertsBuilder",
    "Fp4",
    "Gating",
    "Int4",
    "Int4Int8",
    "Int8",
    "KeySteps",
    "KeyValues",
    "Latents",
    "Linear",
    "Measurement",
    "MlaProlog",
    "MlaSizes",
    "MlaWeights",
    "NarrowInt8",
    "Norms",
    "OperatorRow",
    "PaddedPrompts",
    "PagedKeys",
    "PagedLatents",
    "PromptPart",
    "Prompts",
    "Rotation",
    "Routing",
    "SpansNow",
    "UnsummedPairs",
    "Weight",
    "add_rms_norm",
    "asked",
    "by_own_backend",
    "cache_layout",
    "check",
    "check_runs",
    "dequantize",
    "doubled_angles",
    "gate_and_mul",
    "gqa_decode",
    "gqa_prefill",
    "gqa_prepare",
    "likeliest",
    "mla_decode",
    "mla_prefill",
    "mla_prepare",
    "mla_queries",
    "moe_gate",
    "pairs_apart",
    "prefer",
    "prepare",
    "prepare_dense",
    "prepare_experts",
    "prepare_fp4",
    "prepare_int4",
    "prepare_int8",
    "prepare_mla_prolog",
    "quantize_rows",
    "rms_norm",
    "rope",
    "round_to_nvfp4",
    "route",
    "silu_and_mul",
    "stack",
    "table",
    "why_no_codes",
    "why_no_prolog",
    "why_no_rounded_inputs",
]
