"""The machine with its versions, for results that will be read elsewhere."""

from quantkit.common.devices import describe_hardware


def describe_machine(device: str = "auto") -> dict[str, str]:
    """What must accompany a time: the hardware, torch, and on an NPU the versions of torch_npu,
    CANN and the driver too."""
    import torch

    from quantkit.common.devices import find_device

    target = find_device(device)
    about = {"hardware": describe_hardware(device), "torch": torch.__version__}
    if target.type == "npu":
        from quantkit_kernels.torch_npu.machine import describe

        about |= describe(target)
    return about
