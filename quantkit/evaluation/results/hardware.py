"""The machine in one line, for results that will be read elsewhere."""

import os
import platform
from pathlib import Path


def describe_hardware(device: str = "auto") -> str:
    """Processor, cores and memory, and the accelerator where `device` may use one."""
    import psutil
    import torch

    from quantkit.devices import find_device

    cores, memory = os.cpu_count() or 0, psutil.virtual_memory().total / 2**30
    host = f"{_processor()}, {cores} cores, {memory:.0f} GiB"
    target = find_device(device)
    if target.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} ({host})"
    if target.type == "npu":
        return f"{torch.npu.device_count()} x {torch.npu.get_device_name()} ({host})"  # type: ignore[attr-defined]
    return host


def describe_machine(device: str = "auto") -> dict[str, str]:
    """What must stand beside a time: the hardware, torch, and on an NPU the versions of torch_npu, CANN and the driver too."""
    import torch

    from quantkit.devices import find_device

    target = find_device(device)
    about = {"hardware": describe_hardware(device), "torch": torch.__version__}
    if target.type == "npu":
        from quantkit_kernels.torch_npu.machine import describe

        about |= describe(target)
    return about


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU implementer"))]
    return names[0] if names else platform.processor() or platform.machine()
