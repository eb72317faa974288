"""Attention over blocks of keys whose running sum is rescaled by integer addition: a NumPy twin of
AMLA's numerics (arXiv 2509.25224).

FlashAttention multiplies what it has summed by exp(old maximum - new maximum) whenever a block
brings a larger score. Here a row is kept relative to 2^n for a whole number n instead of to its
maximum, so that the factor is 2^(old n - new n): added to the exponents of the float32 sums, as
integers, without a multiplication and without an error. On the chip that is an atomic addition in
memory, so sums need not come back to the vector cores. CANN has it in
npu_fused_infer_attention_score for 16-bit MLA (ops-transformer, fia_block_vec_nonquant_mla.h),
which backend torch_npu calls.

Probabilities are 2^(score log2(e) - n), at most sqrt(2). Error: with u = 2^-24, L keys in b blocks and S the largest |score| log2(e),
|out - exact| is at most (L + 4 b + 4 S + 16) u sum(p |v|) / sum(p) for float32 probabilities, plus 2^-8 of the same where they are rounded
to bf16 for the cube. Rescaling adds nothing: what it takes below 2^-126 is flushed to zero, less
than u of any sum by then.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_MANTISSA_BITS = 23


def rescaled(sums: Floats, steps: NDArray[np.int32]) -> Floats:
    """sums times 2^steps, steps not positive, broadcast: added to the exponent bits; what would
    become subnormal is zero."""
    bits = np.ascontiguousarray(sums, dtype=np.float32).view(np.int32)
    exponents = bits >> _MANTISSA_BITS & 0xFF
    moved = (bits + (np.clip(steps, -255, 0).astype(np.int32) << _MANTISSA_BITS)).view(np.float32)
    return np.where(exponents + steps > 0, moved, np.float32(0))


def bf16(values: Floats) -> Floats:
    """Rounded to bf16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def attend(
    q: Floats,
    keys: Floats,
    values: Floats,
    scale: float,
    *,
    block: int = 512,
    rounded: bool = False,
) -> Floats:
    """softmax(q keys.T scale) values. q [rows, D]; keys [L, D]; values [L, V], L at least 1 ->
    [rows, V], float32.

    block: keys at a time; rounded: probabilities to bf16, as the cube takes them.
    """
    rows = q.shape[0]
    powers = np.full((rows, 1), np.iinfo(np.int16).min, dtype=np.int32)
    sums, weights = np.zeros((rows, values.shape[1]), np.float32), np.zeros((rows, 1), np.float32)
    for first in range(0, keys.shape[0], block):
        scores = (q @ keys[first : first + block].T).astype(np.float32) * np.float32(
            scale * np.log2(np.e)
        )
        new = np.maximum(powers, np.rint(scores.max(axis=1, keepdims=True)).astype(np.int32))
        chances = np.exp2(scores - new.astype(np.float32))
        if rounded:
            chances = bf16(chances)
        sums = rescaled(sums, powers - new) + chances @ values[first : first + block]
        weights = rescaled(weights, powers - new) + chances.sum(axis=1, keepdims=True)
        powers = new
    return sums / weights


def attend_pages(
    query: Floats,
    cache: Floats,
    width: int,
    block_table: NDArray[np.int32],
    lengths: list[int],
    scale: float,
    *,
    rounded: bool = True,
) -> Floats:
    """Absorbed latent attention of a decode step: query [R, heads, D] over a row's own tokens in
    cache [blocks, block_size, D], whose first
    `width` channels are the values -> [R, heads, width], float32; zeros for rows of no tokens."""
    out = np.zeros((*query.shape[:2], width), np.float32)
    for row, length in enumerate(lengths):
        if length:
            seen = cache[block_table[row]].reshape(-1, cache.shape[-1])[:length]
            out[row] = attend(query[row], seen, seen[:, :width], scale, rounded=rounded)
    return out
