"""Rotary position embedding: plain, YaRN (arXiv 2309.00071, as DeepSeek uses it), and Llama 3.1's wavelength bands."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import QuantkitError


@dataclass(frozen=True)
class Rope:
    """Frequencies of a rotary embedding over `dim` channels, and what they do to the softmax scale.

    `interleaved` turns the pairs (x[2i], x[2i+1]), as DeepSeek does; else (x[i], x[i + dim/2]), as Llama and its kin do.
    """

    dim: int
    theta: float
    interleaved: bool
    kind: Literal["default", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_dict(cls, config: dict[str, Any], dim: int, interleaved: bool) -> "Rope":
        """From config.json: `rope_theta` with `rope_scaling`, or the newer `rope_parameters` that holds both."""
        merged = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = merged.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise QuantkitError("config.json has no rope_theta", "add the value the model was trained with")
        kind = merged.get("rope_type", merged.get("type", "default"))
        if kind == "default":
            return cls(dim, float(theta), interleaved)
        if kind not in ("yarn", "llama3"):
            raise QuantkitError(f"rope scaling {kind!r} is not supported", "quantkit has default, yarn and llama3")
        for key in ("factor", "original_max_position_embeddings"):
            if key not in merged:
                raise QuantkitError(f"config.json's rope scaling {kind!r} lacks {key}", "use the config.json that came with the model")
        optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor")
        given = {key: float(merged[key]) for key in optional if merged.get(key) is not None}
        return cls(dim, float(theta), interleaved, kind, float(merged["factor"]), int(merged["original_max_position_embeddings"]), **given)

    @property
    def softmax_factor(self) -> float:
        """Multiplier of head_dim ** -0.5: DeepSeek applies mscale_all_dim to q and k alike, hence squared."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def inverse_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """[dim / 2] float32. Scaling keeps high frequencies, divides low ones by `factor`, and goes over linearly in between."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        plain = self.theta**-exponent
        if self.kind == "default":
            return plain
        keep = self._yarn_share(device) if self.kind == "yarn" else self._llama3_share(plain)
        return plain / self.factor * (1 - keep) + plain * keep

    def _yarn_share(self, device: torch.device | str) -> Tensor:
        """How much of each plain frequency stays: a ramp over the channel index, between two numbers of rotations."""
        low = math.floor(self._correction_dim(self.beta_fast))
        high = math.ceil(self._correction_dim(self.beta_slow))
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (torch.arange(self.dim // 2, dtype=torch.float32, device=device) - low) / max(high - low, 0.001)
        return 1 - ramp.clamp(0, 1)

    def _llama3_share(self, plain: Tensor) -> Tensor:
        """How much of each plain frequency stays: a ramp over the turns it makes within the original context."""
        turns = self.original_max_position * plain / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, dim / 2] float32, scaled by YaRN's attention factor."""
        angles = positions.float()[:, None] * self.inverse_frequencies(positions.device)[None, :]
        scale = 1.0
        if self.kind == "yarn":
            both = self.mscale and self.mscale_all_dim
            scale = _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim) if both else _mscale(self.factor, 1.0)
        return angles.cos() * scale, angles.sin() * scale

    def _correction_dim(self, rotations: float) -> float:
        return self.dim * math.log(self.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
