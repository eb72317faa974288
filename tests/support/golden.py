"""Reads the golden vectors of tests/support/golden: bytes that the real packers wrote."""

import json
from pathlib import Path

import torch

_DIRECTORY = Path(__file__).parent / "golden"
_BITS = {
    "bits_u8": (torch.uint8, 2**8),
    "bits_u16": (torch.int16, 2**16),
    "bits_u32": (torch.int32, 2**32),
}


def load(name):
    return json.loads((_DIRECTORY / f"{name}.json").read_text())


def tensor(stored):
    """A stored tensor in its own dtype and shape."""
    dtype = getattr(torch, stored["dtype"])
    if "values" in stored:
        return torch.tensor(stored["values"], dtype=dtype).reshape(stored["shape"])
    key = next(key for key in _BITS if key in stored)
    carrier, modulus = _BITS[key]
    signed = [
        bits - modulus if carrier != torch.uint8 and bits >= modulus // 2 else bits
        for bits in stored[key]
    ]
    return torch.tensor(signed, dtype=carrier).view(dtype).reshape(stored["shape"])


def words(hexadecimal):
    """32-bit words written in hexadecimal, as the signed values of int32."""
    return [
        value - 2**32 if value >= 2**31 else value
        for value in (int(word, 16) for word in hexadecimal)
    ]
