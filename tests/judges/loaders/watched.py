"""What a loader writes into a model's parameters: every operator is seen that changes their memory
while a checkpoint is read.

watch = Watch(model)
with watch:
    load(watch.reading(tensors))    # an iterator over (name, tensor), as the engine's loader takes it
watch.read - watch.used, watch.untouched()
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """A parameter is written where an operator with an output argument wrote it, element by
    element."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.name: str | None = None
        self.read: set[str] = set()
        self.used: set[str] = set()
        self.written: dict[int, Tensor] = {}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        for parameter in self.parameters.values():
            storage = parameter.untyped_storage()
            self.written[storage.data_ptr()] = torch.zeros(
                storage.nbytes() // parameter.element_size(), dtype=torch.bool
            )

    def reading(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for (
            self.name,
            tensor,
        ) in tensors:  # the name that is being read, until the next is asked for
            self.read.add(self.name)
            yield self.name, tensor
        self.name = None

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for argument, value in zip(operator._schema.arguments, args):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, Tensor)
            ):
                self._mark(value)
        return result

    def _mark(self, target: Tensor) -> None:
        written = self.written.get(target.untyped_storage().data_ptr())
        if written is not None:
            written.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(True)
            if self.name is not None:
                self.used.add(self.name)

    def untouched(self) -> list[str]:
        """Parameters of which some element was never written."""
        found = []
        for name, parameter in self.parameters.items():
            written = self.written.get(parameter.untyped_storage().data_ptr())
            if (
                written is None
            ):  # it was given other memory while it was loaded, written in one piece
                continue
            seen = written.as_strided(
                parameter.shape, parameter.stride(), parameter.storage_offset()
            )
            if not bool(seen.all()):
                found.append(
                    f"{name} {tuple(parameter.shape)}, {int(seen.sum())} of {seen.numel()} elements"
                )
        return found
