"""The Triton backend over a cache in 8 bits, against float64 and the reference: on a GPU, or
interpreted (`make test-triton`)."""

import pytest
import torch
from decode_attention import check_gqa_decode, check_mla_decode
from quantkit_kernels import Norms, Rotation, gqa_decode, gqa_prepare, mla_prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.codes import CODES, CodedKeys, CodedLatents, empty_keys, empty_latents
from quantkit_kernels.samples import TOLERANCE, distance, grouped_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    why_unusable("rms_norm", "triton", DEVICE) is not None,
    reason="no GPU with Triton, and not interpreted",
)
KINDS = pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@KINDS
@DTYPES
def test_gqa_decode(codes: torch.dtype, dtype: torch.dtype, poisoned_memory: None) -> None:
    check_gqa_decode("triton", DEVICE, (6, 2), 24, 7, 0, [1, 0, 37, 64], dtype, codes)
    check_gqa_decode("triton", DEVICE, (40, 2), 64, 16, 20, [300, 5], dtype, codes)


@KINDS
@DTYPES
def test_mla_decode(codes: torch.dtype, dtype: torch.dtype, poisoned_memory: None) -> None:
    check_mla_decode("triton", DEVICE, 5, 16, (24, 16, 20, 64), [1, 0, 37, 64], dtype, True, codes)
    check_mla_decode("triton", DEVICE, 40, 64, (16, 32, 16, 48), [300], dtype, False, codes)


@KINDS
def test_values_of_unlike_sizes_with_a_sink(codes: torch.dtype) -> None:
    """Tokens' scales differ by up to 2^30, smallest first: what was summed in a small unit is
    carried into a larger one."""
    sinks = torch.randn(6, device=DEVICE)
    case = grouped_attention(
        [150], [1], (6, 2), 32, 16, torch.float16, DEVICE, sinks=sinks, codes=codes
    )
    factor = torch.exp2(torch.linspace(-30, 0, case.pages.keys.shape[0] * 16, device=DEVICE)).view(
        -1, 16, 1
    )
    pages = case.pages._replace(
        scales=(case.pages.scales[0], torch.nan_to_num(case.pages.scales[1]) * factor)
    )
    found, exact = (
        gqa_decode(q, pages, scale=case.scale, sinks=sinks, backend=backend)
        for q, backend in ((case.q, "triton"), (case.q.float(), "reference"))
    )
    assert distance(found, exact.double()) < TOLERANCE[torch.float16]


@KINDS
def test_what_is_cached_is_what_the_reference_caches(codes: torch.dtype) -> None:
    """All but a code here and there, where a number fell between two of 16 bits first; sizes from a
    millionth to a thousand, and zeros."""
    tokens, slots = 40, torch.randperm(64, device=DEVICE)[:40]
    size = torch.logspace(-6, 3, tokens, device=DEVICE).unsqueeze(1)
    angles = torch.rand(tokens, 8, device=DEVICE) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    qkv_a, qkv = (
        torch.randn(tokens, 24 + 40 + 16, device=DEVICE).half(),
        (torch.randn(tokens, 8 * 24, device=DEVICE) * size).half(),
    )
    qkv_a[3], qkv[3] = 0, 0
    gains = Norms(
        torch.rand(24, device=DEVICE).half(), (torch.rand(40, device=DEVICE) * 100).half(), 1e-6
    )
    caches: list[tuple[CodedLatents | CodedKeys, ...]] = []
    for backend in ("triton", "reference"):
        latents = empty_latents((4, 16), 40, 16, codes, torch.float16, DEVICE)
        keys = empty_keys((4, 16, 2, 24), codes, DEVICE)
        for part in (*latents, *keys):
            part.view(torch.uint8).fill_(0)
        mla_prepare(qkv_a, gains, rotation, latents, slots, backend=backend)
        gqa_prepare(qkv, None, rotation, keys, slots, backend=backend)
        caches.append((latents, keys))
    for ours, theirs in zip(*caches, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            if mine.element_size() > 1:
                assert distance(mine.float(), other.double()) < TOLERANCE[torch.float16]
            else:
                same = mine.view(torch.uint8) == other.view(torch.uint8)
                assert same.float().mean() > 0.98
                assert (
                    (mine.float() - other.float()).abs()[~same]
                    <= (1 if codes == torch.int8 else 32)
                ).all()
