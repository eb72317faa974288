"""Embedding, last norm and logits of a transformers model, as computed by the model's own
forward."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.common.errors import QuantkitError
from quantkit.models.hf_traced.layer import replace_forwards
from quantkit.models.hf_traced.module_tree import RTN_REMEDY
from quantkit.models.hf_traced.scale_groups import SAME, distance
from quantkit.models.hf_traced.skeleton import PROBE_TOKENS, Skeleton

Read = Callable[[str], Tensor]
"""A stored tensor by name, in its stored dtype."""
_BATCH = 2048
"""Tokens per batch of the last norm."""


@dataclass(frozen=True)
class LastNorm:
    """The norm between the last layer and the head. module: its stored name; gain_offset as in
    `Parameter`; centred: it subtracts the mean; eps: added to the mean square."""

    module: str
    gain_offset: float
    centred: bool
    eps: float


def last_norm(skeleton: Skeleton) -> LastNorm | None:
    """None where the last operation is not a single norm with a stored gain."""
    given: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args: given.update({name: args[0][0]} if args else {})

    hooks = [one.register_forward_pre_hook(keep(name)) for name, one in skeleton.outside.items()]
    before = skeleton.after_layers(skeleton.probe(3))
    for hook in hooks:
        hook.remove()
    for name, module in skeleton.outside.items():
        gain, hidden = module._parameters.get("weight"), given.get(name)
        if (
            gain is None
            or hidden is None
            or gain.shape != (skeleton.hidden_size,)
            or f"{name}.weight" not in skeleton.published
        ):
            continue
        with torch.no_grad():
            alone: Tensor = module(hidden)
            if distance(alone, before) > SAME:
                continue
            centred = distance(module(hidden + 1), alone) < SAME
            kept, bias = gain.clone(), module._parameters.get("bias")
            module._parameters["weight"] = nn.Parameter(torch.zeros_like(kept), requires_grad=False)
            without = module(hidden) - (0 if bias is None else bias)
            module._parameters["weight"] = nn.Parameter(kept, requires_grad=False)
        offset = 0.0 if float(without.abs().max()) == 0 else 1.0
        eps = next(
            (
                float(value)
                for key, value in vars(module).items()
                if key.endswith(("eps", "epsilon"))
            ),
            1e-6,
        )
        return LastNorm(
            skeleton.published[f"{name}.weight"].removesuffix(".weight"), offset, centred, eps
        )
    return None


class EmbedAndHead:
    """read: reads stored tensors. embedding: stored name of the table."""

    def __init__(
        self, skeleton: Skeleton, read: Read, embedding: str, device: torch.device
    ) -> None:
        self.skeleton, self.read, self.embedding, self.device = skeleton, read, embedding, device
        names = (
            f"{name}.{key}"
            for name, module in skeleton.outside.items()
            for key in module._parameters
        )
        disk = [skeleton.published[name] for name in names if name in skeleton.published]
        skeleton.fill_outside({name: read(name) for name in disk})
        norm = last_norm(skeleton)
        self.centred = norm is not None and norm.centred
        self._norm = next(
            (
                module
                for name, module in skeleton.outside.items()
                if norm is not None
                and skeleton.published.get(f"{name}.weight") == f"{norm.module}.weight"
            ),
            None,
        )

    def embed(self, sequences: Sequence[Tensor]) -> Tensor:
        """Of the table only the rows that are asked for are held in float32: the model sees their
        numbers among these."""
        table = self.read(self.embedding)
        unique, compact = torch.cat([*sequences]).unique(return_inverse=True)
        if int(unique.max()) >= len(table):
            raise QuantkitError(
                f"the tokenizer gives token {int(unique.max())}, the model has {len(table)}",
                "use the model's own tokenizer",
            )
        module = self.skeleton.text.get_input_embeddings()
        module.weight = nn.Parameter(table[unique].float(), requires_grad=False)
        module.padding_idx = None
        del table
        lengths = [len(one) for one in sequences]
        return torch.cat(
            [
                self.skeleton.first_states(ids, rows)
                for ids, rows in zip(sequences, compact.split(lengths))
            ]
        )

    def merged(self, hidden: Tensor) -> Tensor:
        """What the last norm reads, of several residual streams."""
        if self.skeleton.stream_count == 1:
            return hidden
        seen: list[Tensor] = []
        assert self._norm is not None, "no norm at the end of the stack"
        hook = self._norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].float()))
        try:
            self.final_norm(hidden)
        finally:
            hook.remove()
        return torch.cat(seen).to(hidden.device)

    def final_norm(self, hidden: Tensor) -> Tensor:
        count = min(_BATCH, self.skeleton.positions or _BATCH)
        parts = [self.skeleton.after_layers(part).float() for part in hidden.cpu().split(count)]
        return torch.cat(parts).to(hidden.device)

    def logits(self, products: Tensor, first: int) -> Tensor:
        bias = self._bias
        if bias is not None:
            products = products + bias[first : first + products.shape[1]]
        return products if self._identity else logits_of(self.skeleton, products)

    @cached_property
    def _bias(self) -> Tensor | None:
        head = self.skeleton.model.get_output_embeddings()
        name = next((name for name, one in self.skeleton.model.named_modules() if one is head), "")
        disk = self.skeleton.published.get(f"{name}.bias")
        return (
            None
            if disk is None or getattr(head, "bias", None) is None
            else self.read(disk).float().to(self.device)
        )

    @cached_property
    def _identity(self) -> bool:
        probe = torch.linspace(-100, 100, 64)[None]
        return torch.equal(logits_of(self.skeleton, probe), probe)


def logits_of(skeleton: Skeleton, products: Tensor) -> Tensor:
    """The model's logits for products [T, V] with rows of its head: scaled, capped, or unchanged.
    Elementwise, so V may be a subset of the vocabulary."""
    head = skeleton.model.get_output_embeddings()

    def head_forward(x: Tensor) -> Tensor:
        return x

    def text_forward(*args: Any, **kwargs: Any) -> Any:
        return _TextOutput(products[None])

    def embed(ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, skeleton.hidden_size)

    # Ids, not embeddings: with those a model with a vision tower searches for image tokens.
    ids = torch.zeros(1, len(products), dtype=torch.int64)
    with (
        torch.no_grad(),
        replace_forwards(
            {
                head: head_forward,
                skeleton.text: text_forward,
                skeleton.text.get_input_embeddings(): embed,
            }
        ),
    ):
        found: Tensor = skeleton.model(input_ids=ids, use_cache=False).logits
    return found[0].to(products.dtype)


@dataclass(frozen=True)
class _TextOutput:
    """Output of a text model: its hidden states first, the only entry of the mapping, and None for
    any other attribute."""

    last_hidden_state: Tensor

    def __getitem__(self, place: int | slice | str) -> Any:
        return (
            self.last_hidden_state if isinstance(place, str) else (self.last_hidden_state,)[place]
        )

    def keys(self) -> tuple[str]:
        return ("last_hidden_state",)

    def __getattr__(self, name: str) -> None:
        return None


def check_logits(skeleton: Skeleton) -> None:
    """Raise QuantkitError where logits are not a function of the products with the head."""
    probe, found = torch.linspace(-3, 3, 2 * PROBE_TOKENS).view(PROBE_TOKENS, 2), None
    if skeleton.model.get_output_embeddings() is not None:
        with suppress(Exception):  # a forward may need more than text
            found = logits_of(skeleton, probe)
    if found is None or found.shape != probe.shape:
        raise QuantkitError(
            f"{skeleton.label}: transformers' model gives no logits of its text model alone",
            RTN_REMEDY,
        )
