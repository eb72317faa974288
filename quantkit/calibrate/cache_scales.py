"""Scales of an 8-bit cache, calibrated on what the calibration tokens store with quantized weights,
and used from then on.

A layer of latent attention has one scale for all channels, so channels are first brought to a
similar size: the norm's gain is divided by powers of two and the columns of kv_b, which is 16-bit,
are multiplied by them, which is exact. Keys and values have one scale per channel. Scales from the
one that clips nothing to half of it are tried, and the one with the least squared error is used;
latents' errors are weighted by kv_b's columns. In FP8 keys and values have one scale each, of those
that map the largest value to 448 or, with room for larger ones, to half of it, the best.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from quantkit_kernels import CodeSteps, KeySteps
from quantkit_kernels.codes import CODES, LARGEST, encode_by
from torch import Tensor

from quantkit.calibrate.hidden_states import HiddenStates, TokenBatch, no_experts
from quantkit.calibrate.sublayer import LayerWeights, Run, Sublayer
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.names import CacheCodes
from quantkit.models.activation_quant import ActivationQuant
from quantkit.models.architecture import KeyValueCache, LatentCache
from quantkit.models.cache_scales import (
    STORED,
    cache_scale_specs,
    cache_scale_tensors,
    divide_gains,
    parse_cache_scales,
    power_of_two_ratios,
)
from quantkit.models.context import CausalContext
from quantkit.models.decoder import DecoderLayer
from quantkit.models.table import Parameter

TOKENS = 16384
"""Approximate number of calibration tokens whose cache contents are used."""
_SHARES = tuple(1 - 0.05 * i for i in range(11))
_FLOAT_SHARES = (2.0, 1.75, 1.5, 1.25, 1.0)


@dataclass(frozen=True)
class QuantizedCache:
    """The 8-bit cache of one model. device: of the layers."""

    cache: LatentCache | KeyValueCache
    device: torch.device
    codes: CacheCodes

    def covers(self, sublayer: Sublayer) -> bool:
        """Whether the sublayer has a cache with scales."""
        return bool(self._specs(sublayer))

    def _specs(self, sublayer: Sublayer) -> dict[str, tuple[TensorSpec, ...]]:
        return cache_scale_specs(self.cache, sublayer.rows, self.codes)

    def find(
        self,
        sublayer: Sublayer,
        tensors: Mapping[str, Tensor],
        states: HiddenStates,
        activation_quants: Mapping[str, ActivationQuant],
    ) -> dict[str, Tensor]:
        """Tensors to store, by name: the scales, and the tensors changed so that latent channels
        have a similar size. tensors: the quantized sublayer, float32; states: before it."""
        block = sublayer.build(
            LayerWeights(tensors, no_experts, activation_quants=activation_quants)
        )
        seen = self._seen(
            block, states, (batch for batch in states.batches() if not batch.held_out)
        )
        if isinstance(self.cache, LatentCache):
            return self._latents(sublayer, tensors, seen[0][:, : self.cache.kv_lora_rank])
        steps = KeySteps(
            *(
                _whole_scale(side, _FLOAT_SHARES)
                if self.codes == "fp8"
                else best_scales(side.flatten(1)).unflatten(0, side.shape[1:])
                for side in seen
            )
        )
        return cache_scale_tensors(self._specs(sublayer), sublayer.rows, steps)

    def _latents(
        self, sublayer: Sublayer, tensors: Mapping[str, Tensor], latents: Tensor
    ) -> dict[str, Tensor]:
        norm, kv_b = latent_norm(sublayer)
        divisors = power_of_two_ratios(latents.abs().amax(0))
        stored = {row.name: tensors[row.name].to(sublayer.stored[row.name]) for row in (norm, kv_b)}
        changed = {
            norm.name: divide_gains(stored[norm.name], divisors),
            kv_b.name: stored[kv_b.name] * divisors.to(stored[kv_b.name].dtype),
        }
        counts = changed[kv_b.name].float().square().sum(0)
        step = best_scale(latents / divisors, counts)
        specs = self._specs(sublayer)
        return {name: one.cpu() for name, one in changed.items()} | cache_scale_tensors(
            specs, sublayer.rows, step
        )

    def run(self, sublayer: Sublayer, unquantized: Mapping[str, Tensor]) -> Run:
        """The sublayer with a cache by the scales among its stored tensors."""
        rows = sublayer.rows
        return self._by(
            parse_cache_scales(self.cache, self._specs(sublayer), rows, unquantized),
            sublayer,
        )

    def run_uncalibrated(
        self, sublayer: Sublayer, block: DecoderLayer, states: HiddenStates
    ) -> Run:
        """The sublayer with a cache whose scales clip nothing of what these states, before it,
        store. block: of the sublayer."""
        seen = self._seen(block, states, states.batches())
        if isinstance(self.cache, LatentCache):
            return self._by(
                _stored(
                    seen[0][:, : self.cache.kv_lora_rank].abs().amax().clamp(min=1e-30)
                    / LARGEST[torch.int8]
                ),
                sublayer,
            )
        if self.codes == "fp8":
            return self._by(KeySteps(*(_whole_scale(side, (1.0,)) for side in seen)), sublayer)
        largest = (side.abs().amax(0).clamp(min=1e-30) for side in seen)
        return self._by(
            KeySteps(*(_stored(side / LARGEST[torch.int8]) for side in largest)), sublayer
        )

    def _seen(
        self, block: DecoderLayer, states: HiddenStates, batches: Iterable[TokenBatch]
    ) -> list[Tensor]:
        """Latents [n, K], or keys and values [n, heads, K], that the tokens of some batches store
        in a 16-bit cache."""
        kept = list[tuple[Tensor, ...]]()
        for batch in batches:
            if sum(len(part[0]) for part in kept) >= TOKENS:
                break
            context = CausalContext(batch.lengths, states.hidden.device)
            block.attend(states.hidden[batch.part], context)
            kept.append(
                (context.stored[:, 0],)
                if isinstance(self.cache, LatentCache)
                else (context.keys[0], context.values[0])
            )
        return [torch.cat(parts) for parts in zip(*kept)]

    def _by(self, steps: CodeSteps, sublayer: Sublayer) -> Run:
        """The sublayer with a cache of these scales."""
        on = self.device
        placed: CodeSteps = (
            steps.to(on)
            if isinstance(steps, Tensor)
            else KeySteps(*(side.to(on) for side in steps))
        )
        layer = next(row.layer for row in sublayer.rows if row.layer is not None)

        def attend(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
            return block.attend(
                hidden, CausalContext(lengths, hidden.device, CODES[self.codes], {layer: placed})
            )

        return attend


def latent_norm(sublayer: Sublayer) -> tuple[Parameter, Parameter]:
    """The norm of the latent, and kv_b, its only reader."""
    rows = {row.module: row for row in sublayer.rows}
    kv_b = next(row for row in sublayer.rows if row.projection == "kv_b")
    group = next(group for group in sublayer.groups if group.consumers == (kv_b.module,))
    return rows[group.producer], kv_b


def _whole_scale(side: Tensor, shares: tuple[float, ...]) -> Tensor:
    """The FP8 scale for all of keys or values [n, heads, K], for each channel, float32 [heads, K]:
    of those under which the largest value is 448 over a share, the one with the least squared
    error."""
    dtype = torch.float8_e4m3fn
    largest = side.abs().amax().clamp(min=1e-30) / LARGEST[dtype]
    scales = [_stored(largest * share) for share in shares]
    errors = [(encode_by(side, one, dtype).float() * one - side).square().sum() for one in scales]
    return scales[int(torch.stack(errors).argmin())].expand(side.shape[1:])


def best_scale(x: Tensor, counts: Tensor) -> Tensor:
    """The scale for all of x [n, K], float32 []. counts [K]: weight of each channel's squared
    error."""
    largest = x.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    steps = [_stored(largest * share / LARGEST[torch.int8]) for share in _SHARES]
    errors = torch.stack([(_errors(x, step) * counts).sum() for step in steps])
    return steps[int(errors.argmin())]


def best_scales(x: Tensor) -> Tensor:
    """The scale of each channel of x [n, K], float32 [K]."""
    largest = x.abs().amax(0).clamp(min=1e-30)
    steps = torch.stack([_stored(largest * share / LARGEST[torch.int8]) for share in _SHARES])
    errors = torch.stack([_errors(x, step) for step in steps])
    return steps.gather(0, errors.argmin(0, keepdim=True))[0]


def _stored(step: Tensor) -> Tensor:
    """The smallest stored number that is at least `step`."""
    near = step.to(STORED)
    return torch.where(
        near.float() < step, torch.nextafter(near, torch.full_like(near, torch.inf)), near
    ).float()


def _errors(x: Tensor, step: Tensor) -> Tensor:
    """Squared error of each channel, [K]."""
    largest = LARGEST[torch.int8]
    return ((x / step).round_().clamp_(-largest, largest).mul_(step) - x).square_().sum(0)
