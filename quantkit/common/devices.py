"""Where to compute and in what: the device and dtype that "auto" stands for on this machine, and
the machine in a line."""

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import torch

from quantkit.common.errors import QuantkitError, UsageFault

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def find_device(name: str) -> torch.device:
    """`auto` (cuda, else npu, else cpu) or a torch device name; refused where this machine does not
    have it.

    Of several processes on one machine (LOCAL_RANK) each gets the device of its number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "npu" if _has_npu() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "npu"):
        raise UsageFault(f"device {name!r} is not known", "use cpu, cuda or npu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise QuantkitError("no CUDA device is usable here", "use --device cpu")
    if kind == "npu" and not _has_npu():
        raise QuantkitError(
            "no Ascend NPU is usable here",
            "install torch_npu on an Ascend machine, or use --device cpu",
        )
    if name in ("cuda", "npu"):
        name = f"{name}:{os.environ.get('LOCAL_RANK', 0)}"
    return _numbered(name, kind)


def take_device(name: str) -> torch.device:
    """As `find_device`, for who computes there: it becomes the current one."""
    device = find_device(name)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Of this thread: Triton and our own kernels are launched on the current device, wherever the
    tensors lie that they are given."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def _numbered(name: str, kind: str) -> torch.device:
    """A device by kind and number, of those that are here."""
    number = name.partition(":")[2]
    if kind == "cpu" and number in ("", "0"):
        return torch.device("cpu")
    count = 1 if kind == "cpu" else int(torch.get_device_module(kind).device_count())
    if not (number.isascii() and number.isdigit() and int(number) < count):
        others = f" to {kind}:{count - 1}" if count > 1 else ""
        raise QuantkitError(f"there is no device {name} here", f"this machine has {kind}:0{others}")
    return torch.device(f"{kind}:{int(number)}")


def default_dtype(device: torch.device, int4: bool = False) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, float32 elsewhere: on AVX2 bfloat16 arithmetic is
    emulated and slower.

    int4: of a model with 4-bit integer weights, whose operator takes bfloat16 on any CPU and is 2
    to 3 times as fast there as float32.
    """
    if device.type != "cpu" or int4:
        return torch.bfloat16
    return (
        torch.bfloat16
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        else torch.float32
    )


def find_dtype(name: str | None, device: torch.device, int4: bool = False) -> torch.dtype:
    """A dtype by name; None stands for `default_dtype`."""
    return default_dtype(device, int4) if name is None else dtype_named(name)


def dtype_named(name: str) -> torch.dtype:
    """By its torch name or the short one, as bfloat16 or bf16."""
    found = DTYPES.get(_SHORT.get(name, name))
    if found is None:
        raise UsageFault(
            f"dtype {name!r} is not known", f"use {', '.join(DTYPES)}, or {', '.join(_SHORT)}"
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Its torch name: bfloat16."""
    return str(dtype).removeprefix("torch.")


def free_bytes(device: torch.device) -> int:
    """Memory that a new allocation could have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "npu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    import psutil

    return psutil.virtual_memory().available


def sent(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers of the host as a tensor of `device`, which was not waited for: `torch.tensor(values,
    device=...)` waits until everything that was launched is done. CUDA has copied what is pageable
    when the call returns."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=device.type == "cuda")


class Fetched:
    """Numbers of a tensor on their way to the host: it waits for them, and not for what CUDA is
    told to do behind this. The tensor may be written over then."""

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
    """Processor, cores and memory, and the accelerator where `device` may use one."""
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


def _has_npu() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    import torch_npu  # noqa: F401  registers torch.npu

    return bool(torch.get_device_module("npu").is_available())
