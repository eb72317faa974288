"""Device and dtype selection ("auto" resolves to what this machine has), host/device copies, and a
one-line description of the hardware."""

import functools
import os
import platform
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.common.errors import QuantkitError, UsageError

if TYPE_CHECKING:
    from quantkit_kernels.torch_npu import machine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def find_device(name: str) -> torch.device:
    """Resolve `auto` (cuda, else npu, else cpu) or a torch device name.

    "cuda" and "npu" without a number become the device numbered LOCAL_RANK. Raises QuantkitError if
    this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu" if npu_lack() else "npu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "npu"):
        raise UsageError(f"device {name!r} is not known", "use cpu, cuda or npu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise QuantkitError("no CUDA device is usable here", "use --device cpu")
    if kind == "npu" and (lack := npu_lack()):
        raise QuantkitError(
            f"no Ascend NPU is usable here: {lack.what}", f"{lack.remedy}; or use --device cpu"
        )
    if name in ("cuda", "npu"):
        name = f"{name}:{os.environ.get('LOCAL_RANK', 0)}"
    return _numbered(name, kind)


def select_device(name: str) -> torch.device:
    """`find_device`, and make the device current for this thread."""
    device = find_device(name)
    set_current_device(device)
    return device


def set_current_device(device: torch.device) -> None:
    """Make `device` current for this thread: Triton and our own kernels launch on the current
    device, whichever device their tensors are on."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def _numbered(name: str, kind: str) -> torch.device:
    """The device with its number checked against the number of devices present."""
    number = name.partition(":")[2]
    if kind == "cpu" and number in ("", "0"):
        return torch.device("cpu")
    count = 1 if kind == "cpu" else int(torch.get_device_module(kind).device_count())
    if not (number.isascii() and number.isdigit() and int(number) < count):
        others = f" to {kind}:{count - 1}" if count > 1 else ""
        raise QuantkitError(f"there is no device {name} here", f"this machine has {kind}:0{others}")
    return torch.device(f"{kind}:{int(number)}")


def default_dtype(device: torch.device, int4: bool = False) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float32: AVX2 only emulates bfloat16, which
    is slower.

    int4: the model has 4-bit integer weights, whose operator takes bfloat16 on any CPU and is 2 to
    3 times as fast there as in float32.
    """
    if device.type != "cpu" or int4:
        return torch.bfloat16
    return (
        torch.bfloat16
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        else torch.float32
    )


def find_dtype(name: str | None, device: torch.device, int4: bool = False) -> torch.dtype:
    """A dtype by name; None selects `default_dtype`."""
    return default_dtype(device, int4) if name is None else parse_dtype(name)


def parse_dtype(name: str) -> torch.dtype:
    """A dtype by its torch name or the short one: bfloat16 or bf16."""
    found = DTYPES.get(_SHORT.get(name, name))
    if found is None:
        raise UsageError(
            f"dtype {name!r} is not known", f"use {', '.join(DTYPES)}, or {', '.join(_SHORT)}"
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The torch name, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def free_bytes(device: torch.device) -> int:
    """Bytes that a new allocation could use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "npu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    import psutil

    return psutil.virtual_memory().available


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Host values as a tensor on `device`, copied without synchronizing: `torch.tensor(values,
    device=...)` waits for everything launched so far. CUDA has copied pageable memory by the time
    the call returns."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=device.type == "cuda")


class HostCopy:
    """Asynchronous copy of a tensor to the host: `tolist` waits for the copy only, not for work
    queued on CUDA after it. The tensor may be overwritten as soon as the copy was started."""

    def __init__(self, values: torch.Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = values.to("cpu", non_blocking=True)  # pinned memory
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(values.device))
        else:
            self._values = values.clone()

    def tolist(self) -> list[Any]:
        if self._there is not None:
            self._there.synchronize()
        found: list[Any] = self._values.tolist()
        return found


def describe_hardware(device: str = "auto") -> str:
    """Processor, cores and memory, and the accelerator if `device` selects one."""
    import psutil

    cores, memory = os.cpu_count() or 0, psutil.virtual_memory().total / 2**30
    host = f"{_processor()}, {cores} cores, {memory:.0f} GiB"
    target = find_device(device)
    if target.type == "cpu":
        return host
    module = getattr(torch, target.type)
    return f"{module.device_count()} x {module.get_device_name()} ({host})"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith(("model name", "CPU implementer"))
    ]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def npu_lack() -> "machine.Lack | None":
    """What keeps an Ascend NPU from being used. Where one can be, a warning says which versions
    were not published to work together."""
    from quantkit_kernels.torch_npu import machine

    lack = machine.lack()
    for line in machine.unpublished(machine.versions()) if lack is None else ():
        warnings.warn(line, RuntimeWarning, stacklevel=2)
    return lack


def describe_machine(device: str = "auto") -> dict[str, str]:
    """What must accompany a measured time: hardware, torch version, and on an NPU the versions
    of torch_npu, CANN and the driver."""
    target = find_device(device)
    about = {"hardware": describe_hardware(device), "torch": torch.__version__}
    if target.type == "npu":
        from quantkit_kernels.torch_npu.machine import describe

        about |= describe(target)
    return about
