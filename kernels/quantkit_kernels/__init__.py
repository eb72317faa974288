"""Quantized GEMMs and the fused operators of a DeepSeek-style decode step: one API, several backends.

Plain tensors in, plain tensors out; nothing is imported from quantkit. A weight (`Int4`, `Int8`, `Fp4`, `Dense`) is laid out for a backend
once, by `prepare` or an `ExpertsBuilder`, and then called. `table()` says which operator runs where, and why not where it does not.
Arguments that do not fit raise ValueError naming the argument.
"""

from quantkit_kernels.backends import BACKENDS, OPERATORS, Row, table
from quantkit_kernels.check import Measurement, check
from quantkit_kernels.experts import Experts, ExpertsBuilder, prepare_experts
from quantkit_kernels.functional import add_rms_norm, mla_decode, mla_prepare, moe_gate, rms_norm, rope, route, silu_and_mul
from quantkit_kernels.linear import Linear, prepare, prepare_dense, prepare_fp4, prepare_int4, prepare_int8, quantize_rows
from quantkit_kernels.weights import Dense, Fp4, Int4, Int8, Weight, dequantize, stack

__all__ = [
    "BACKENDS",
    "OPERATORS",
    "Dense",
    "Experts",
    "ExpertsBuilder",
    "Fp4",
    "Int4",
    "Int8",
    "Linear",
    "Measurement",
    "Row",
    "Weight",
    "add_rms_norm",
    "check",
    "dequantize",
    "mla_decode",
    "mla_prepare",
    "moe_gate",
    "prepare",
    "prepare_dense",
    "prepare_experts",
    "prepare_fp4",
    "prepare_int4",
    "prepare_int8",
    "quantize_rows",
    "rms_norm",
    "rope",
    "route",
    "silu_and_mul",
    "stack",
    "table",
]
