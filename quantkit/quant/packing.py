"""Four-bit values into bytes and 32-bit words, in the orders the formats use. Every function has an
exact inverse.

A nibble is a uint8 0..15. Signed int4 becomes one in two ways: offset (-8..7 -> 0..15, AutoAWQ and
compressed-tensors) or two's complement (ModelSlim). Words are little-endian, as safetensors are.
"""

import sys

import torch
from torch import Tensor

# AutoAWQ: the nibble at bits 4i of a word holds column 8c + AWQ_ORDER[i].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)

assert sys.byteorder == "little", (
    "words are packed by viewing bytes, which needs a little-endian machine"
)


def to_offset(codes: Tensor) -> Tensor:
    """int8 -8..7 -> uint8 0..15, v + 8."""
    return (codes + 8).view(torch.uint8)


def from_offset(nibbles: Tensor) -> Tensor:
    """uint8 0..15 -> int8 -8..7, v - 8."""
    return nibbles.view(torch.int8) - 8


def to_twos_complement(codes: Tensor) -> Tensor:
    """int8 -8..7 -> uint8 0..15, the low four bits."""
    return codes.view(torch.uint8) & 15


def from_twos_complement(nibbles: Tensor) -> Tensor:
    """uint8 0..15 -> int8 -8..7, the sign in bit 3."""
    return (nibbles.view(torch.int8) ^ 8) - 8


def pack_pairs(nibbles: Tensor) -> Tensor:
    """uint8 [..., 2n] -> uint8 [..., n], the even element in the low four bits."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2n]"""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_words(nibbles: Tensor) -> Tensor:
    """uint8 [..., 8n] -> int32 [..., n], element j at bits 4j."""
    return _view(pack_pairs(nibbles), torch.int32)


def unpack_words(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8n]"""
    return unpack_pairs(_view(words, torch.uint8))


def pack_bytes(codes: Tensor) -> Tensor:
    """int8 [..., 4n] -> int32 [..., n], element j as v + 128 at bits 8j."""
    return _view(codes.contiguous().view(torch.uint8) ^ 128, torch.int32)


def unpack_bytes(words: Tensor) -> Tensor:
    """int32 [..., n] -> int8 [..., 4n]"""
    return (_view(words, torch.uint8) ^ 128).view(torch.int8)


def pack_awq(nibbles: Tensor) -> Tensor:
    """uint8 [8n, m] -> int32 [m, n], packed along the rows in AutoAWQ's interleaved order.

    Rows are put in order and paired before anything is transposed: half the bytes to move across,
    whole rows at a time.
    """
    rows = nibbles.unflatten(0, (-1, 8))[:, AWQ_ORDER].flatten(0, 1)
    return _view((rows[0::2] | (rows[1::2] << 4)).T, torch.int32)


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [m, n] -> uint8 [8n, m]"""
    pairs = _view(words, torch.uint8).T.contiguous()
    rows = torch.stack((pairs & 15, pairs >> 4), dim=1).flatten(0, 1)
    return rows.unflatten(0, (-1, 8))[:, _AWQ_INVERSE].flatten(0, 1)


def _view(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes, row by row, as another dtype. Flat on the way: a dimension of size 1 may have
    any stride, which view refuses."""
    return tensor.reshape(-1).view(dtype).view(*tensor.shape[:-1], -1)
