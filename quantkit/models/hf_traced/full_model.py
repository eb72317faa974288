"""A whole checkpoint in memory, computed by transformers' own forward: to measure quantized models
whose architecture has no file here. Quantized weights are dequantized at load; linears of schemes
with quantized activations simulate that. It is slow."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import dequantize
from quantkit.models.activation_quant import NO_ACTIVATION_QUANT, ActivationQuant
from quantkit.models.hf_traced.embed_and_head import logits_of
from quantkit.models.hf_traced.experts import (
    ExpertsCall,
    StackedExperts,
    UnsupportedExperts,
    experts_modules,
    trace_experts,
)
from quantkit.models.hf_traced.module_tree import RTN_REMEDY, check_built, in_words
from quantkit.models.hf_traced.skeleton import Skeleton


def transformers_warning(path: Path) -> str:
    """Warning for a checkpoint that is computed this way."""
    return (
        f"{path} is computed by transformers on decoded weights, because quantkit has no file "
        "for its architecture: slow"
    )


@dataclass
class ForwardOutput:
    """hidden [T, H] after each layer, and `final` [T, H], the input of the head."""

    hidden: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor = field(default_factory=lambda: torch.empty(0))


class TransformersModel:
    """Raises QuantkitError where transformers is missing or does not know the model, and where a
    tensor that it needs is not stored."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype
        try:
            check_built(checkpoint.config)
            self.skeleton = Skeleton(checkpoint.config)
        except QuantkitError as fault:
            remedy = (
                "use the config.json that came with these weights, "
                "pip install -U transformers, or use another engine"
            )
            raise QuantkitError(
                f"{checkpoint.path / 'config.json'}: {fault.problem}",
                remedy if RTN_REMEDY in fault.remedy else fault.remedy,
            ) from fault
        self.model: Any = self.skeleton.model
        self._fill()

    @property
    def warning(self) -> str:
        return transformers_warning(self.checkpoint.path)

    @property
    def vocab_size(self) -> int:
        return int(self.skeleton.text.get_input_embeddings().weight.shape[0])

    @property
    def max_position_embeddings(self) -> int | None:
        """Length of the longest text; None where config.json does not say."""
        return self.skeleton.positions

    @torch.no_grad()
    def forward(self, ids: Tensor) -> ForwardOutput:
        """ids int64 [T] of one sequence. Raises QuantkitError for a text longer than the model
        supports."""
        output, longest = ForwardOutput(), self.max_position_embeddings

        def keep(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, made: Any) -> None:
                output.hidden[number] = self.skeleton.result(made)[0].flatten(1)

            return hook

        hooks = [
            layer.register_forward_hook(keep(number))
            for number, layer in enumerate(self.skeleton.layers)
        ]
        head = self.model.get_output_embeddings()
        hooks.append(
            head.register_forward_pre_hook(
                lambda module, args: setattr(output, "final", args[0][0])
            )
        )
        try:
            self._call(ids[None].to(self.device), use_cache=False)
        except QuantkitError as fault:
            if longest is None or len(ids) <= longest:
                raise
            raise QuantkitError(
                f"{self.checkpoint.path} has {longest} positions, and a text has {len(ids)} tokens",
                f"give --seq-len {longest}",
            ) from fault
        finally:
            for hook in hooks:
                hook.remove()
        return output

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """final [T, H] -> float32 [T, vocab]."""
        products: Tensor = self.model.get_output_embeddings()(final)
        return logits_of(self.skeleton, products).float()

    @torch.no_grad()
    def next_logits(self, ids: list[int], cache: Any) -> tuple[Tensor, Any]:
        """Logits after `ids`, which follow those in `cache` (None at first): float32 [1, vocab],
        and the cache for the next call; None where the model has no KV cache and needs the whole
        text again."""
        argument = self._cache_argument
        found = self._call(
            torch.tensor([ids], device=self.device),
            use_cache=self._has_cache,
            **{argument: cache},
        )
        return found.logits[0, -1:].float(), getattr(found, argument, None)

    def _call(self, ids: Tensor, **options: Any) -> Any:
        """transformers' forward of ids [1, T]. Raises QuantkitError where it fails, as with a
        config.json of inconsistent sizes, such as a rotary_dim above the head's."""
        if options.get(self._cache_argument) is None:
            self.skeleton.forget_lengths()
        try:
            return self.model(input_ids=ids, **options)
        except torch.OutOfMemoryError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as fault:
            raise QuantkitError(
                f"{self.checkpoint.path}: transformers fails to compute it ({in_words(fault)})",
                "the values of its config.json may not go together: use the one that came with "
                "these weights",
            ) from fault

    @cached_property
    def _cache_argument(self) -> str:
        """`past_key_values` before transformers 5.24, which calls it `cache`."""
        known = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in known else "past_key_values"

    @property
    def _has_cache(self) -> bool:
        """transformers' caches take the text length from an attention layer; a model may have
        none."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None)
        return not kinds or any(
            kind.endswith("attention") and kind != "linear_attention" for kind in kinds
        )

    def _fill(self) -> None:
        """Every tensor and buffer of the text model and the head."""
        head = self.model.get_output_embeddings()
        text = {id(one) for one in self.skeleton.text.modules()}
        names = {
            name: one for name, one in self.model.named_modules() if id(one) in text or one is head
        }
        for name, module in names.items():
            experts = next(
                ((name, one) for _, one in experts_modules(module) if one is module), None
            )
            if experts is not None and self._fill_experts(*experts):
                continue
            for key in [key for key, one in module._parameters.items() if one is not None]:
                if not (module is head and key == "weight" and self.skeleton.tied):
                    module._parameters[key] = nn.Parameter(
                        self._read(f"{name}.{key}"), requires_grad=False
                    )
            for key, one in list(module._buffers.items()):
                if one is not None and key not in module._non_persistent_buffers_set:
                    module._buffers[key] = self._read(f"{name}.{key}")
                elif one is not None:
                    module._buffers[key] = one.to(self.device)
            quant = self._activation_quant(
                self.skeleton.published.get(f"{name}.weight", "").removesuffix(".weight")
            )
            if isinstance(module, nn.Linear) and quant != NO_ACTIVATION_QUANT:
                own: Any = module
                own.forward = _quantized_forward(module, quant)
        if self.skeleton.tied:
            head._parameters["weight"] = self.skeleton.text.get_input_embeddings().weight
        self._fill_unused()

    def _fill_unused(self) -> None:
        """Parts that text does not pass through: NaN, without memory. A model computes on the
        device of its first tensor."""
        for module in self.model.modules():
            for key, one in module._parameters.items():
                if one is not None and one.is_meta:
                    value = torch.full((), torch.nan, dtype=self.dtype, device=self.device).expand(
                        one.shape
                    )
                    module._parameters[key] = nn.Parameter(value, requires_grad=False)

    def _read(self, name: str) -> Tensor:
        disk = self.skeleton.published.get(name)
        if name in self.skeleton.assembled:
            return self.skeleton.assembled[name].of(self._read_stored)
        if disk is None:
            raise QuantkitError(
                f"{self.checkpoint.path} holds {name} in another form than transformers computes "
                "with",
                "compute it with transformers itself: quantkit converts no tensors there",
            )
        if not (
            disk.removesuffix(".weight") in self.checkpoint.linears or self.checkpoint.has(disk)
        ):
            raise QuantkitError(
                f"{self.checkpoint.path} lacks {disk}, which transformers computes with",
                "download the missing shard, or use the config.json of these weights",
            )
        return self._read_stored(disk)

    def _read_stored(self, disk: str) -> Tensor:
        module = disk.removesuffix(".weight")
        value = (
            self.checkpoint.weight(module, self.device)
            if module in self.checkpoint.linears
            else self.checkpoint.read(disk, self.device)
        )
        value = dequantize(value)
        return value.to(self.dtype) if value.is_floating_point() else value

    def _activation_quant(self, module: str) -> ActivationQuant:
        bits, linear = self.checkpoint.activation_bits(module), self.checkpoint.linears.get(module)
        grid = None if linear is None else linear.grid
        return (
            ActivationQuant.of(self.checkpoint.weight(module, self.device), bits, grid)
            if grid is not None and grid.has_input_scales
            else ActivationQuant(bits, grid=grid)
        )

    def _fill_experts(self, name: str, module: nn.Module) -> bool:
        """Stacked routed experts, from one tensor per expert, whether they are stored so or in
        another stacked layout than transformers'."""
        try:
            found = trace_experts(self.model, name, module)
        except UnsupportedExperts:
            return False
        if not all(_is_stored(self.checkpoint, disk) for disk in found.names[0]):
            same_layout = all(
                f"{name}.{key}" in self.skeleton.published for key in module._parameters
            )
            stored = {stack: self.checkpoint.tensors.get(stack.name) for stack in found.stacks}
            if same_layout and all(
                info is None or stack.is_transposed(info) == stack.transposed
                for stack, info in stored.items()
            ):
                return False
            self.checkpoint = self.checkpoint.split_stacks(found.stacks)
        each = [[self._read_stored(disk) for disk in triple] for triple in found.names]
        quants = [
            [self._activation_quant(disk.removesuffix(".weight")) for disk in (gate, down)]
            for gate, _, down in found.names
        ]
        module.forward = _experts(found, each, quants)
        return True


def _is_stored(checkpoint: Checkpoint, disk: str) -> bool:
    return disk.removesuffix(".weight") in checkpoint.linears or checkpoint.has(disk)


def _quantized_forward(linear: nn.Linear, quant: ActivationQuant) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(quant(x.float()).to(x.dtype), linear.weight, linear.bias)


def _experts(
    found: StackedExperts, each: list[list[Tensor]], quants: list[list[ActivationQuant]]
) -> Callable[..., Tensor]:
    """A mixture as a loop over the experts that have tokens."""

    def forward(*given: Tensor) -> Tensor:
        call = ExpertsCall.of(given, len(each))
        assert call is not None, "the module was called like this when it was traced"
        x, topk_ids, topk_weights = call.x, call.topk_ids, call.topk_weights
        out = torch.zeros_like(x)
        for expert in topk_ids.unique().tolist():
            tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
            if expert >= len(each):  # not an expert
                out.index_add_(
                    0,
                    tokens,
                    found.zero_expert_scale
                    * x[tokens]
                    * topk_weights[tokens, slots, None].to(x.dtype),
                )
                continue
            gate, up, down = each[expert]
            before, between = quants[expert]
            read = before(x[tokens].float()).to(x.dtype)
            hidden = found.gating(F.linear(read, gate), F.linear(read, up))
            made = F.linear(between(hidden.float()).to(x.dtype), down)
            out.index_add_(0, tokens, made * topk_weights[tokens, slots, None].to(made.dtype))
        return call.result(out)

    return forward
