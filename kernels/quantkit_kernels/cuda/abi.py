"""The C interface of the compiled kernels: the structures and functions that csrc/ declares.

tests/kernels/test_cuda_sources.py compares every structure with its header field by field, and
every function parameter by parameter.
"""

import ctypes

_POINTER, _INT, _FLOAT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class GemmParams(ctypes.Structure):
    """linears/gemm_params.cuh."""

    _fields_ = [
        *_fields(_POINTER, "words scales zeros row_scale x x_scale out ids pair_weights sums"),
        *_fields(_INT, "ids_stride pairs top_k by_expert m n k out_n wn split epilogue"),
        *_fields(_FLOAT, "limit"),
    ]


class TileParams(ctypes.Structure):
    """linears/tile_params.cuh."""

    _fields_ = [
        *_fields(
            _POINTER,
            "words scales zeros row_scale x x_scale out tile_expert tile_count order pair_weights",
        ),
        *_fields(_INT, "tiles m n k out_n split epilogue"),
        *_fields(_FLOAT, "limit"),
    ]


class Shares(ctypes.Structure):
    """linears/tile_and_share.cuh."""

    _fields_ = [*_fields(_POINTER, "partial arrived"), *_fields(_INT, "parts")]


class Matrix(ctypes.Structure):
    """experts/fused_experts_params.cuh."""

    _fields_ = [*_fields(_POINTER, "words scales zeros row_scale"), *_fields(_INT, "n k")]


class FusedExpertsParams(ctypes.Structure):
    """experts/fused_experts_params.cuh."""

    _fields_ = [
        *_fields(Matrix, "gate_up down"),
        *_fields(_POINTER, "x between out ids pair_weights done"),
        *_fields(_INT, "ids_stride pairs top_k experts"),
        *_fields(_FLOAT, "limit"),
    ]


class RouteParams(ctypes.Structure):
    """operators/route.cu. The fields of `Routing` have its names."""

    _fields_ = [
        *_fields(_POINTER, "bias ids weights"),
        *_fields(
            _INT,
            "n_routed_experts num_experts_per_tok n_group topk_group softmax norm_topk_prob "
            "num_joined_experts",
        ),
        *_fields(_FLOAT, "routed_scaling_factor"),
    ]


class MlaPrepare(ctypes.Structure):
    """attention/mla_prepare.cuh."""

    _fields_ = [
        *_fields(_POINTER, "qkv_a q_norm kv_norm cosines sines slots q_a cache"),
        *_fields(_INT, "tokens q_lora kv_lora rope interleaved"),
        *_fields(_FLOAT, "eps"),
    ]


class MlaCodesOut(ctypes.Structure):
    """attention/mla_prepare.cu."""

    _fields_ = _fields(_POINTER, "codes keys scales")


class MlaDecode(ctypes.Structure):
    """attention/mla_sizes.cuh."""

    _fields_ = [
        *_fields(_POINTER, "q kv_b cosines sines cache table lengths absorbed weighted found out"),
        *_fields(
            _INT, "table_stride lengths_stride table_width block_size rows heads splits interleaved"
        ),
        *_fields(_FLOAT, "scale"),
    ]


class MlaCodes(ctypes.Structure):
    """attention/mla_attend_codes.cuh."""

    _fields_ = _fields(_POINTER, "codes keys scales")


class GqaPrepare(ctypes.Structure):
    """attention/gqa_head.cuh."""

    _fields_ = [
        *_fields(
            _POINTER, "qkv q_norm k_norm cosines sines slots q keys values key_scales value_scales"
        ),
        *_fields(_INT, "tokens heads kv_heads d rope interleaved"),
        *_fields(_FLOAT, "eps"),
    ]


class GqaDecode(ctypes.Structure):
    """attention/gqa_schedule.cuh."""

    _fields_ = [
        *_fields(
            _POINTER, "q keys values key_scales value_scales table lengths out partial arrived"
        ),
        *_fields(
            _INT,
            "table_stride lengths_stride table_width block_size rows kv_heads shared d window "
            "blocks least_tiles",
        ),
        *_fields(_FLOAT, "scale"),
    ]


class ExchangeNorm(ctypes.Structure):
    """collectives/exchange_norm.cu."""

    _fields_ = [
        *_fields(_POINTER, "x pairs residual weight normed total counters"),
        *_fields(_INT, "count rows h top_k rank room"),
        *_fields(_FLOAT, "eps"),
    ]


_ADDRESS = ctypes.POINTER(_POINTER)

FUNCTIONS: dict[str, list[type]] = {
    "qk_tokens_in_registers": [ctypes.POINTER(GemmParams), *[_INT] * 7, _POINTER],
    "qk_tokens_in_shared": [ctypes.POINTER(GemmParams), *[_INT] * 4, _POINTER],
    "qk_tile_per_block": [ctypes.POINTER(TileParams), *[_INT] * 5, _POINTER],
    "qk_tile_and_share": [
        ctypes.POINTER(TileParams),
        ctypes.POINTER(Shares),
        *[_INT] * 5,
        _POINTER,
    ],
    "qk_persistent_tiles": [ctypes.POINTER(TileParams), *[_INT] * 5, _POINTER],
    "qk_expand": [ctypes.POINTER(GemmParams), *[_INT] * 3, _POINTER, _POINTER],
    "qk_arrange": [*[_POINTER] * 4, *[_INT] * 4, _POINTER],
    "qk_quantize_arranged": [*[_POINTER] * 5, *[_INT] * 5, _POINTER],
    "qk_quantize_rows": [*[_POINTER] * 3, *[_INT] * 3, _POINTER],
    "qk_fused_experts": [ctypes.POINTER(FusedExpertsParams), *[_INT] * 4, _POINTER],
    "qk_sort_pairs": [_POINTER, *[_INT] * 5, *[_POINTER] * 4],
    "qk_sum_pairs": [_POINTER, _POINTER, _POINTER, *[_INT] * 5, _POINTER, _INT, _POINTER],
    "qk_sum_rounded_pairs": [_POINTER, _POINTER, _POINTER, *[_INT] * 5, _POINTER],
    "qk_expert_tiles": [ctypes.POINTER(TileParams), *[_INT] * 4, _POINTER],
    "qk_add_rms_norm": [*[_POINTER] * 5, *[_INT] * 3, _FLOAT, _POINTER],
    "qk_silu_and_mul": [_POINTER, _POINTER, *[_INT] * 3, _POINTER],
    "qk_rope": [*[_POINTER] * 5, *[_INT] * 6, _LONG, _LONG, _POINTER],
    "qk_route": [_POINTER, _INT, _INT, ctypes.POINTER(RouteParams), _POINTER],
    "qk_moe_gate": [
        _POINTER,
        _POINTER,
        _INT,
        _INT,
        _POINTER,
        ctypes.POINTER(RouteParams),
        _POINTER,
    ],
    "qk_select_highest": [*[_POINTER] * 6, *[_INT] * 6, _POINTER],
    "qk_mla_prepare": [ctypes.POINTER(MlaPrepare), _INT, _POINTER],
    "qk_mla_prepare_codes": [
        ctypes.POINTER(MlaPrepare),
        ctypes.POINTER(MlaCodesOut),
        _INT,
        _INT,
        _POINTER,
    ],
    "qk_mla_queries": [
        ctypes.POINTER(MlaPrepare),
        ctypes.POINTER(GemmParams),
        *[_INT] * 3,
        _POINTER,
    ],
    "qk_mla_decode": [ctypes.POINTER(MlaDecode), _INT, _POINTER],
    "qk_mla_attend": [ctypes.POINTER(MlaDecode), _INT, _POINTER],
    "qk_mla_decode_codes": [
        ctypes.POINTER(MlaDecode),
        ctypes.POINTER(MlaCodes),
        _INT,
        _INT,
        _POINTER,
    ],
    "qk_gqa_prepare": [ctypes.POINTER(GqaPrepare), _INT, _POINTER],
    "qk_gqa_prepare_codes": [ctypes.POINTER(GqaPrepare), _INT, _INT, _POINTER],
    "qk_gqa_decode": [ctypes.POINTER(GqaDecode), _INT, _POINTER],
    "qk_gqa_decode_int8": [ctypes.POINTER(GqaDecode), _INT, _POINTER],
    "qk_gqa_decode_fp8": [ctypes.POINTER(GqaDecode), _INT, _POINTER],
    "qk_inbox_make": [ctypes.c_size_t, _ADDRESS, _POINTER],
    "qk_inbox_open": [_POINTER, _ADDRESS],
    "qk_peer_exchange": [_POINTER, _POINTER, _ADDRESS, _POINTER, *[_INT] * 6, _POINTER],
    "qk_exchange_norm": [ctypes.POINTER(ExchangeNorm), _INT, _INT, _ADDRESS, _POINTER, _POINTER],
    "qk_error_text": [_INT],
}
RESULTS: dict[str, type] = {"qk_error_text": ctypes.c_char_p}
"""What a function returns where that is no cudaError_t."""


def declare(library: ctypes.CDLL) -> None:
    """Declare to ctypes what each function takes and returns."""
    for name, parameters in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = parameters
        function.restype = RESULTS.get(name, ctypes.c_int)
