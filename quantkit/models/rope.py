"""Rotary position embedding, with YaRN frequency scaling (arXiv 2309.00071) as DeepSeek uses it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import QuantkitError


@dataclass(frozen=True)
class Rope:
    """Frequencies of a rotary embedding over `dim` channels, and what they do to the softmax scale."""

    dim: int
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @classmethod
    def from_dict(cls, config: dict[str, Any], dim: int) -> "Rope":
        """From config.json: `rope_theta` with `rope_scaling`, or the newer `rope_parameters` that holds both."""
        merged = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = merged.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise QuantkitError("config.json has no rope_theta", "add the value the model was trained with")
        kind = merged.get("rope_type", merged.get("type", "default"))
        if kind == "default":
            return cls(dim, float(theta))
        if kind != "yarn":
            raise QuantkitError(f"rope scaling {kind!r} is not supported", "quantkit has none and yarn")
        return cls(
            dim,
            float(theta),
            factor=float(merged["factor"]),
            original_max_position=int(merged["original_max_position_embeddings"]),
            beta_fast=float(merged.get("beta_fast") or 32),
            beta_slow=float(merged.get("beta_slow") or 1),
            mscale=float(merged.get("mscale") or 0),
            mscale_all_dim=float(merged.get("mscale_all_dim") or 0),
        )

    @property
    def softmax_factor(self) -> float:
        """Multiplier of head_dim ** -0.5: DeepSeek applies mscale_all_dim to q and k alike, hence squared."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def inverse_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """[dim / 2] float32. YaRN: high frequencies are kept, low ones divided by `factor`, a linear ramp in between."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        plain = self.theta**-exponent
        if self.factor == 1.0:
            return plain
        low = math.floor(self._correction_dim(self.beta_fast))
        high = math.ceil(self._correction_dim(self.beta_slow))
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (torch.arange(self.dim // 2, dtype=torch.float32, device=device) - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0, 1)
        return plain / self.factor * (1 - keep) + plain * keep

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, dim / 2] float32, scaled by YaRN's attention factor."""
        angles = positions.float()[:, None] * self.inverse_frequencies(positions.device)[None, :]
        scale = 1.0
        if self.factor != 1.0:
            numerator = _mscale(self.factor, self.mscale) if self.mscale else _mscale(self.factor, 1.0)
            scale = numerator / (_mscale(self.factor, self.mscale_all_dim) if self.mscale_all_dim else 1.0)
        return angles.cos() * scale, angles.sin() * scale

    def _correction_dim(self, rotations: float) -> float:
        return self.dim * math.log(self.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
