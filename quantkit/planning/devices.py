"""The devices that a result is to run on, as a command names them: their number, their memory, and
what is known of their speed."""

import re
from dataclasses import dataclass

import psutil

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError
from quantkit.common.settings import Strict, find_yaml, read_yaml
from quantkit.common.sizes import parse_bytes
from quantkit.engines.profiles import Device
from quantkit.planning.hardware import Hardware, load_hardware

_GIB = 2**30
STANDARD_GIB = 64
"""Of a device whose memory is not given: a 910B's, for which the recipes are."""
STANDARD_DEVICES = f"8x{STANDARD_GIB}GiB"
"""Where no devices are given."""


@dataclass(frozen=True)
class Devices:
    """What the result is to run on. hardware: what is known of one device; device: its kind; None
    where only its memory was given."""

    count: int
    memory_bytes: int
    hardware: Hardware | None = None
    device: Device | None = None


class Accelerator(Strict):
    """One of recipes/go/devices.yaml."""

    name: str
    device: Device
    memory_gib: int


def accelerators() -> tuple[Accelerator, ...]:
    return read_yaml(
        asset("recipes", "go", "devices.yaml"), tuple[Accelerator, ...], "restore that file"
    )


def find_accelerator(name: str) -> Accelerator | None:
    """By its name in any case; None where it is not in the list."""
    return next((known for known in accelerators() if known.name.lower() == name.lower()), None)


def read_devices(text: str) -> Devices:
    """ "8x64GiB", "8xH100" by a name of recipes/go/devices.yaml, "8x910B1" or "8xFILE.yaml" of
    hardware whose speed is known too, "8" of STANDARD_GIB each, or "cpu": this machine's memory.
    Raises QuantkitError for anything else."""
    if text.lower() in ("cpu", "1xcpu"):
        return Devices(1, psutil.virtual_memory().total, device="cpu")
    found = re.fullmatch(r"(\d{1,6})(?:x(.+))?", text)
    if not found or int(found[1]) < 1 or re.fullmatch(r"[\d.]+", found[2] or ""):
        raise QuantkitError(
            f"devices {text!r} make no sense", "write 8, 8x64GiB, 8xH100, 8x910B1 or cpu"
        )
    count, kind = int(found[1]), found[2]
    if kind is None:
        return Devices(count, STANDARD_GIB * _GIB)
    if re.fullmatch(r".*[kmgt]i?b", kind, re.IGNORECASE):
        return Devices(count, parse_bytes(kind))
    known = find_accelerator(kind)
    if known is not None and find_yaml(kind.lower(), "recipes", "hardware") is None:
        return Devices(count, known.memory_gib * _GIB, device=known.device)
    hardware = load_hardware(kind)
    return Devices(
        count, round(hardware.memory_gb) * _GIB, hardware, None if known is None else known.device
    )


def read_number(text: str) -> int | Devices:
    """A number alone, where the caller knows their memory or needs none; else as read_devices, and
    with its errors."""
    return int(text) if re.fullmatch(r"[1-9]\d{0,5}", text) else read_devices(text)
