"""How a forward pass attends: over whole sequences here, over a cache in the executor.

Tokens of all sequences lie flat in [T, ...]. The model computes queries, keys and values; the context knows which tokens
see which, and where earlier ones are kept.
"""

from typing import Protocol

import quantkit_kernels
import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.rope import Rope, rotate_halves


class Context(Protocol):
    positions: Tensor
    """[T] int64, the position of each token in its sequence."""

    def rotate(self, rope: Rope, x: Tensor) -> Tensor:
        """x [T, heads, rope.dim] turned to the tokens' positions."""

    def attend_mla(self, layer: int, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, kv_b: Tensor, scale: float) -> Tensor:
        """Multi-head latent attention.

        q_nope [T, heads, nope], q_pe [T, heads, rope] rotated; latent [T, kv_lora] normalised, k_pe [T, rope] rotated;
        kv_b [heads * (nope + v), kv_lora]. Returns [T, heads, v].
        """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Grouped-query attention: q [T, heads, d], k and v [T, kv_heads, d], heads a multiple of kv_heads. Returns [T, heads, d]."""


class Positions:
    """Positions of the tokens of one pass, and their rotary tables, computed once for all layers."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def rotate(self, rope: Rope, x: Tensor) -> Tensor:
        if rope not in self._tables:
            self._tables[rope] = rope.cos_sin(self.positions)
        cos, sin = self._tables[rope]
        return quantkit_kernels.rope(x, self._rows, cos, sin) if rope.interleaved else rotate_halves(x, cos, sin)


class CausalContext(Positions):
    """Whole sequences, each seeing itself causally, nothing kept: for calibration, perplexity and tests."""

    def __init__(self, seq_lens: list[int], device: torch.device | str = "cpu") -> None:
        super().__init__(torch.cat([torch.arange(n, device=device) for n in seq_lens]))
        self.seq_lens = seq_lens

    def attend_mla(self, layer: int, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, kv_b: Tensor, scale: float) -> Tensor:
        heads, nope = q_nope.shape[1:]
        k_nope, v = F.linear(latent, kv_b).unflatten(-1, (heads, -1)).split([nope, kv_b.shape[0] // heads - nope], dim=-1)
        q = torch.cat((q_nope, q_pe), dim=-1)
        k = torch.cat((k_nope, k_pe[:, None, :].expand(-1, heads, -1)), dim=-1)
        return self.attend(layer, q, k, v, scale)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, start = [], 0
        for length in self.seq_lens:
            part = slice(start, start + length)
            one = [t[part].transpose(0, 1)[None] for t in (q, k, v)]
            attended = F.scaled_dot_product_attention(
                one[0], one[1], one[2], is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            out.append(attended[0].transpose(0, 1))
            start += length
        return torch.cat(out)
