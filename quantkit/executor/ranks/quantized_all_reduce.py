"""Sums of prompts over ranks with 8 bits a value: a reduce-scatter and an all-gather of codes,
their scales next to them.

A row is cut into groups of 128 values, each with a bfloat16 scale (quantkit_kernels/codes.py). Rank
r gets the r-th part of all ranks' rows, adds what it decodes in float32 in the order of ranks, and
its sums go to all ranks, coded again. One message holds codes and scales: 130 bytes for 128 values,
where bfloat16 takes 256. Every rank gets the same bits. A row's sum depends on nothing but the row:
a rank codes its own part too, so it does not matter which rank adds it, nor which rows come with
it.

Error of a value: at most the sum over ranks of the step of their group, and the step of the sum's group. A step is max|x| / 252 with
int8; with fp8 (E4M3) 1/16 of the value, or max|x| / 455000 where that is more.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from quantkit_kernels.codes import CODES, LARGEST, decode, encode
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.errors import QuantkitError

GROUP = 128
"""Values that share a scale."""

LEAST_ROWS = 32
"""Sums of fewer rows are exact: there the time of a message is not that of its bytes."""

_SCALE_BYTES = torch.bfloat16.itemsize
_LEAST_SCALE = 1e-10


def codes_of_sums(collectives: str | None, tp: int, device: torch.device) -> torch.dtype | None:
    """The dtype of codes by their name; None where not requested. Raises QuantkitError for other
    names, where there is one rank, and for codes that a device does not have."""
    if collectives is None:
        return None
    if collectives not in CODES:
        reason = f"collectives of {collectives!r} are not known"
        raise QuantkitError(
            reason,
            f"use --collectives {' or '.join(CODES)}, or leave it out for the model's 16 bits",
        )
    if tp == 1:
        raise QuantkitError(
            f"--collectives {collectives} is for several ranks, and there is one",
            "give --tp too, or leave it out",
        )
    if collectives == "fp8" and device.type == "npu":
        raise QuantkitError("a 910B has no FP8 to add prompts in", "use --collectives int8")
    return CODES[collectives]


@dataclass(frozen=True)
class CodedSums:
    """codes: their dtype. size: ranks. rows: what a sum must have more of, so that no step of
    answers is coded."""

    codes: torch.dtype
    size: int
    rows: int

    def takes(self, x: Tensor) -> bool:
        """Whether `all_reduce` takes x: hidden states of a prompt's rows."""
        return (
            x.dim() == 2 and x.shape[0] > max(self.rows, LEAST_ROWS - 1) and x.shape[1] % GROUP == 0
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """x [T, H] of each rank -> their sum [T, H] in x's dtype, the same on each."""
        sent = F.pad(self.packed(x), (0, 0, 0, -x.shape[0] % self.size))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        parts = received.view(self.size, -1, sent.shape[1])
        total = self.unpacked(parts[0])
        for part in parts[1:]:
            total += self.unpacked(part)
        dist.all_gather(list(received.chunk(self.size)), self.packed(total))
        return self.unpacked(received[: x.shape[0]]).to(x.dtype)

    def packed(self, x: Tensor) -> Tensor:
        """x [T, H] -> bytes [T, H + 2 H / 128]: the codes of a row, then its scales."""
        groups = x.unflatten(1, (-1, GROUP))
        scales = _rounded_up(groups.float().abs().amax(dim=-1) / LARGEST[self.codes])
        codes, _ = encode(groups, self.codes, least=scales.float())
        return torch.cat([codes.view(torch.uint8).flatten(1), scales.view(torch.uint8)], dim=1)

    def unpacked(self, packed: Tensor) -> Tensor:
        """The values float32 [T, H] of `packed`."""
        width = packed.shape[1] * GROUP // (GROUP + _SCALE_BYTES)
        codes, scales = packed.split([width, packed.shape[1] - width], dim=1)
        codes = codes.contiguous().view(self.codes).unflatten(1, (-1, GROUP))
        return decode(codes, scales.contiguous().view(torch.bfloat16).float()).flatten(1)


def _rounded_up(scales: Tensor) -> Tensor:
    """Positive float32 -> bfloat16 that are not smaller, so that no code overflows."""
    bits = scales.clamp_min(_LEAST_SCALE).view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).bfloat16()
