"""The devices that shall serve a model: as they were named, or as this machine has them."""

import re
from dataclasses import dataclass

from quantkit.common.devices import find_device
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.sizes import parse_bytes
from quantkit.engines.profiles import Device
from quantkit.planning.devices import accelerators, find_accelerator

PER_BOX = 8
"""Devices of one machine, in the layouts of recipes/deploy."""
_GIB = 2**30
_REMEDY = "write 8x64GiB, 8xH100, 8x910B1 or cpu"


@dataclass(frozen=True)
class DeviceBox:
    """`count` devices of `memory_bytes` each, in machines of at most PER_BOX. named: what they were
    found to be, in words."""

    count: int
    memory_bytes: int
    device: Device
    named: str

    @property
    def boxes(self) -> int:
        return -(-self.count // PER_BOX)


def read_box(text: str | None) -> DeviceBox:
    """ "8xH100" by a name of recipes/go/devices.yaml, "8x64GiB", or "cpu"; None: what this machine
    has.

    A size alone is of the accelerator that this machine has, else of the one of that memory in the
    list, else NVIDIA's. Raises QuantkitError for anything else, and for a number that does not fill
    machines of PER_BOX devices.
    """
    if text is None:
        return _here()
    if re.fullmatch(r"(1x)?cpu", text, re.IGNORECASE):
        return _cpu()
    found = re.fullmatch(r"(\d{1,6})x(\S+)", text)
    if not found or int(found[1]) < 1:
        raise QuantkitError(f"devices {text!r} make no sense", _REMEDY)
    count, kind = int(found[1]), found[2]
    if count > PER_BOX and count % PER_BOX:
        raise QuantkitError(
            f"{count} devices do not fill machines of {PER_BOX}",
            f"give up to {PER_BOX}, or a multiple of {PER_BOX}",
        )
    return (
        _sized(count, kind)
        if re.match(r"[\d.]", kind) and kind.endswith("B")
        else _named(count, kind)
    )


def _named(count: int, kind: str) -> DeviceBox:
    known = find_accelerator(kind)
    if known is not None:
        return DeviceBox(
            count,
            known.memory_gib * _GIB,
            known.device,
            f"{count} x {known.name} of {known.memory_gib} GiB",
        )
    names = ", ".join(known.name for known in accelerators())
    raise UsageError(f"device {kind!r} is not known", f"{_REMEDY}; known are {names}")


def _sized(count: int, text: str) -> DeviceBox:
    try:
        memory = parse_bytes(text)
    except QuantkitError as error:
        raise QuantkitError(
            f"devices of {text!r} make no sense: {error.problem}", _REMEDY
        ) from error
    here = find_device("auto").type
    like = next((known for known in accelerators() if known.memory_gib * _GIB == memory), None)
    size = f"{count} x {memory / _GIB:g} GiB"
    if here == "cuda" or here == "npu":
        return DeviceBox(
            count,
            memory,
            "npu" if here == "npu" else "cuda",
            f"{size}, of this machine's kind ({here})",
        )
    if like is not None:
        return DeviceBox(
            count,
            memory,
            like.device,
            f"{size}, taken for {like.name}: name them, as in {count}xH100, if they are others",
        )
    return DeviceBox(
        count,
        memory,
        "cuda",
        f"{size}, taken for NVIDIA's: name them, as in {count}x910B1, if they are others",
    )


def _here() -> DeviceBox:
    """This machine's accelerators of one machine, or its processor."""
    import torch

    where = find_device("auto")
    if where.type == "cpu":
        return _cpu()
    module = torch.get_device_module(where)
    count, memory = min(module.device_count(), PER_BOX), module.mem_get_info(where)[1]
    return DeviceBox(
        count,
        memory,
        "npu" if where.type == "npu" else "cuda",
        f"{count} x {module.get_device_name(where)}, found here",
    )


def _cpu() -> DeviceBox:
    import psutil

    memory = psutil.virtual_memory().total
    return DeviceBox(
        1, memory, "cpu", f"this machine's processor and {memory / _GIB:.0f} GiB of memory"
    )
