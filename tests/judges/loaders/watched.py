"""What a loader writes into a model's parameters: every operator is seen that changes their memory
while a checkpoint is read.

loads = Loads()
loads.watch(model, lambda reading: load(reading(tensors)))  # (name, tensor), as its loader takes them
loads.told()
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """A parameter is written where an operator with an output argument wrote it, element by
    element."""

    def __init__(self, model):
        super().__init__()
        self.name = None
        self.read = set()
        self.used = set()
        self.written = {}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        for parameter in self.parameters.values():
            storage = parameter.untyped_storage()
            self.written[storage.data_ptr()] = torch.zeros(
                storage.nbytes() // parameter.element_size(), dtype=torch.bool
            )

    def reading(self, tensors):
        for (
            self.name,
            tensor,
        ) in tensors:  # the name that is being read, until the next is asked for
            self.read.add(self.name)
            yield self.name, tensor
        self.name = None

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for argument, value in zip(operator._schema.arguments, args):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, Tensor)
            ):
                self._mark(value)
        return result

    def _mark(self, target):
        written = self.written.get(target.untyped_storage().data_ptr())
        if written is not None:
            written.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(True)
            if self.name is not None:
                self.used.add(self.name)

    def untouched(self):
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


@dataclass
class Loads:
    """Those of a model and of its MTP layer. untouched: parameters not written in full, but for
    those that begin with `shared`, which an MTP layer gets from the model."""

    read: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    untouched: list[str] = field(default_factory=list)

    def watch(self, model, load, shared=()):
        """load: takes `Watch.reading`, through which it must read."""
        watch = Watch(model)
        with watch:
            load(watch.reading)
        self.read |= watch.read
        self.used |= watch.used
        self.untouched += [name for name in watch.untouched() if not name.startswith(shared)]

    def watch_vllm(self, loader, then=id, shared=()):
        """Every load of vLLM's DefaultModelLoader, `loader`; then: called with the loaded model."""
        plain = loader.load_weights

        def load_weights(own, model, model_config):
            every = own.get_all_weights

            def load(reading):
                own.get_all_weights = lambda *asked: reading(every(*asked))
                plain(own, model, model_config)

            self.watch(model, load, shared)
            then(model)

        loader.load_weights = load_weights

    def told(self):
        return {"unread": sorted(self.read - self.used), "untouched": self.untouched}
