"""One decode step of attention on a device against float64: what the tests of several backends and
of both kinds of cache ask."""

from collections.abc import Callable

import torch
from quantkit_kernels import gqa_decode, mla_decode
from quantkit_kernels.samples import TOLERANCE, distance, grouped_attention, latent_attention


def check_gqa_decode(
    backend: str,
    device: str | torch.device,
    heads: tuple[int, int],
    width: int,
    block_size: int,
    window: int,
    lengths: list[int],
    dtype: torch.dtype,
    codes: torch.dtype | None = None,
) -> None:
    """Right, zeros for rows without tokens, and the same to the bit when it is asked again."""
    case = grouped_attention(
        lengths, [1] * len(lengths), heads, width, block_size, dtype, device, window, codes=codes
    )

    def run() -> torch.Tensor:
        return gqa_decode(case.q, case.pages, scale=case.scale, window=window, backend=backend)

    _check(run, case.exact, lengths, dtype)


def check_mla_decode(
    backend: str,
    device: str | torch.device,
    heads: int,
    block_size: int,
    sizes: tuple[int, int, int, int],
    lengths: list[int],
    dtype: torch.dtype,
    interleaved: bool = True,
    codes: torch.dtype | None = None,
) -> None:
    """As `check_gqa_decode`. sizes: those of `latent_attention`."""
    case = latent_attention(lengths, heads, block_size, sizes, dtype, device, interleaved, codes)

    def run() -> torch.Tensor:
        return mla_decode(*case.arguments, scale=case.scale, backend=backend)

    _check(run, case.exact, lengths, dtype)


def _check(
    run: Callable[[], torch.Tensor], exact: torch.Tensor, lengths: list[int], dtype: torch.dtype
) -> None:
    out = run()
    assert all(length or out[row].abs().max() == 0 for row, length in enumerate(lengths))
    if any(lengths):
        assert distance(out, exact) < TOLERANCE[dtype]
    for _ in range(3 if out.is_cuda else 1):
        assert torch.equal(out, run())
