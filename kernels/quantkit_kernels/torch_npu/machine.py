"""Which NPU, driver and CANN a result was made with: what must accompany every figure that is
sent back."""

import os
import re
from pathlib import Path

import torch

DRIVER = Path("/usr/local/Ascend/driver/version.info")
_CANN_FILES = ("compiler/version.info", "toolkit/version.info", "runtime/version.info")
_VERSION = re.compile(
    r"^\s*(?:package_)?version\s*=\s*\[?(?:[\d.]+:)?([^\]\s]+)", re.IGNORECASE | re.MULTILINE
)


def describe(device: torch.device) -> dict[str, str]:
    """Names and versions by what they are of: torch, torch_npu, cann, driver, device, cores. Only
    for a machine with an NPU."""
    import torch_npu

    npu = torch.get_device_module(device)
    index = device.index or 0
    limit = npu.get_device_limit(index)
    return {
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "cann": cann_version(
            Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
        ),
        "driver": version_in(DRIVER),
        "device": f"{npu.device_count()} x {npu.get_device_name(index)}",
        "cores": f"{limit['cube_core_num']} cube, {limit['vector_core_num']} vector",
    }


def cann_version(home: Path) -> str:
    """The version of the CANN toolkit below `home`, or why it is not known."""
    return next(
        (version_in(home / name) for name in _CANN_FILES if (home / name).exists()),
        f"no version.info below {home}",
    )


def version_in(path: Path) -> str:
    """The version that a version.info file states, or why it is not known."""
    if not path.exists():
        return f"no {path}"
    match = _VERSION.search(path.read_text(errors="replace"))
    return match[1] if match else f"no version in {path}"
