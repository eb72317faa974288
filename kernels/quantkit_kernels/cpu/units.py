"""What this processor multiplies."""

import torch


def has_unit(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` natively. oneDNN takes bfloat16 on any AVX-512, but
    without its instructions at a quarter of the rate of float32 (1024 x 896 by 4864 x 896, one
    core: 33 and 140 GFLOP/s)."""
    if dtype == torch.bfloat16:
        emulated = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not emulated
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
