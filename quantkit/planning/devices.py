"""The devices of `--devices`: their number, memory and kind."""

import re
from dataclasses import dataclass, field

import psutil

from quantkit.common.assets import asset
from quantkit.common.devices import find_device
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.settings import Strict, read_yaml
from quantkit.common.sizes import parse_bytes
from quantkit.engines.profiles import Device

STANDARD_DEVICES = "8x64GiB"
"""The default of `plan`."""
PER_BOX = 8
"""Devices of one machine, in the layouts of recipes/deploy."""
_GIB = 2**30
_SYNTAX = "write 8x64GiB, 8xH100, 8x910B1 or cpu"


@dataclass(frozen=True)
class Devices:
    """`count` devices of `memory_bytes` each; 0 where only a number was given. device: their
    kind; None where only number and memory were given. name: in words."""

    count: int
    memory_bytes: int = 0
    device: Device | None = None
    name: str = field(default="", compare=False)

    @property
    def boxes(self) -> int:
        """Machines of at most PER_BOX devices."""
        return -(-self.count // PER_BOX)


class Accelerator(Strict):
    """One of recipes/go/devices.yaml."""

    name: str
    device: Device
    memory_gib: int


def accelerators() -> dict[str, Accelerator]:
    """By name in lower case."""
    path = asset("recipes", "go", "devices.yaml")
    listed = read_yaml(path, tuple[Accelerator, ...], "restore that file")
    return {known.name.lower(): known for known in listed}


def read_devices(text: str) -> Devices:
    """ "8x64GiB", "8xH100" by a name of recipes/go/devices.yaml, "8" of unknown memory, or "cpu": this machine's memory.
    Raises QuantkitError for anything else."""
    if text.lower() in ("cpu", "1xcpu"):
        return _cpu()
    found = re.fullmatch(r"(\d{1,6})(?:x(.+))?", text)
    if not found or int(found[1]) < 1 or re.fullmatch(r"[\d.]+", found[2] or ""):
        raise QuantkitError(
            f"devices {text!r} make no sense", "write 8, 8x64GiB, 8xH100, 8x910B1 or cpu"
        )
    count, kind = int(found[1]), found[2]
    if kind is None:
        return Devices(count)
    if re.fullmatch(r".*[kmgt]i?b", kind, re.IGNORECASE):
        memory = parse_bytes(kind)
        return Devices(count, memory, name=f"{count} x {memory / _GIB:g} GiB")
    listed = accelerators()
    known = listed.get(kind.lower())
    if known is None:
        names = ", ".join(one.name for one in listed.values())
        raise UsageError(f"devices {kind} are not known", f"write 8x64GiB; known are {names}")
    name = f"{count} x {known.name} of {known.memory_gib} GiB"
    return Devices(count, known.memory_gib * _GIB, known.device, name)


def find_devices(text: str | None) -> Devices:
    """Devices of a known kind and memory that fill their machines; this machine's where `text` is
    None. Devices without a name are of the kind of this machine's accelerator, if it has one, else
    NVIDIA's. Raises QuantkitError as `read_devices`."""
    found = _here() if text is None else read_devices(text)
    if not found.memory_bytes:
        raise QuantkitError(f"the memory of devices {text!r} is not known", _SYNTAX)
    if found.count > PER_BOX and found.count % PER_BOX:
        raise QuantkitError(
            f"{found.count} devices do not fill machines of {PER_BOX}",
            f"give up to {PER_BOX}, or a multiple of {PER_BOX}",
        )
    if found.device is not None:
        return found
    here, count = find_device("auto").type, found.count
    if here in ("cuda", "npu"):
        kind: Device = "npu" if here == "npu" else "cuda"
        name = f"{found.name}, of this machine's kind ({here})"
    else:
        kind = "cuda"
        name = f"{found.name}, assumed to be NVIDIA's: name others, as in {count}x910B1"
    return Devices(count, found.memory_bytes, device=kind, name=name)


def _here() -> Devices:
    """The accelerators of this machine, at most PER_BOX, or its processor."""
    import torch

    where = find_device("auto")
    if where.type == "cpu":
        return _cpu()
    module = torch.get_device_module(where)
    count, memory = min(module.device_count(), PER_BOX), module.mem_get_info(where)[1]
    name = f"{count} x {module.get_device_name(where)}, found here"
    return Devices(count, memory, device="npu" if where.type == "npu" else "cuda", name=name)


def _cpu() -> Devices:
    memory = psutil.virtual_memory().total
    name = f"this machine's processor and {memory / _GIB:.0f} GiB of memory"
    return Devices(1, memory, device="cpu", name=name)
