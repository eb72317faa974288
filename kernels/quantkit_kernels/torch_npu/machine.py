"""Whether an NPU can be used here, and with which driver, CANN and torch_npu: what must accompany
every figure that is sent back."""

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

DRIVER = Path("/usr/local/Ascend/driver/version.info")
DEVICES = Path("/dev")
PUBLISHED = (("2.12.0", 0, "9.1"), ("2.11.0", 0, "9.1"), ("2.10.0", 4, "9.1"), ("2.10.0", 0, "9.0"))
"""torch_npu's version, the first of its post-releases, and the CANN that it is published for; torch
has the same number (Ascend's pytorch, COMPATIBILITY.md of 26.1.1)."""
PROCESSORS = ("aarch64", "x86_64")
SINCE = {"npu_mla_prolog_v3": "9.1"}
"""The first CANN that has an operator which torch_npu registers with any."""
_CANN_FILES = ("compiler/version.info", "toolkit/version.info", "runtime/version.info")
_VERSION = re.compile(
    r"^\s*(?:package_)?version\s*=\s*\[?(?:[\d.]+:)?([^\]\s]+)", re.IGNORECASE | re.MULTILINE
)


class Lack(NamedTuple):
    """What keeps an NPU from being used, and what to do."""

    what: str
    remedy: str


def lack() -> Lack | None:
    """None where an NPU can be used; imports torch_npu where it is installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return Lack("torch_npu is not installed", "pip install torch_npu on a host with one")
    try:
        import torch_npu  # noqa: F401  registers torch.npu
    except (ImportError, OSError, RuntimeError) as fault:
        library = re.search(r"lib\w+\.so", str(fault))
        found = f"finds no {library[0]}" if library else f"does not load: {fault}"
        return Lack(
            f"torch_npu {found}",
            "source CANN's set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh by default)",
        )
    cards = sorted(DEVICES.glob("davinci[0-9]*"))
    if not cards:
        return Lack(
            f"there is no {DEVICES}/davinci*",
            "install the driver, and give a container its cards: --device /dev/davinci0 and "
            "/dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc",
        )
    if not any(os.access(card, os.R_OK | os.W_OK) for card in cards):
        return Lack(f"{cards[0]} may not be opened", "join the driver's group, HwHiAiUser")
    if not torch.get_device_module("npu").is_available():
        return Lack(f"torch_npu sees no card, though {cards[0]} is there", "see npu-smi info")
    return None


def versions() -> dict[str, str]:
    """By what they are of: torch, torch_npu, cann, driver, python, os, processor."""
    import torch_npu

    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # a container without /etc/os-release
        system = platform.system()
    return {
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "cann": installed_cann(),
        "driver": version_in(DRIVER),
        "python": platform.python_version(),
        "os": system,
        "processor": platform.machine(),
    }


def installed_cann() -> str:
    """CANN's version as torch_npu has it, else as the toolkit's files say."""
    utilities = getattr(getattr(sys.modules.get("torch_npu"), "npu", None), "utils", None)
    version = utilities.get_cann_version() if utilities is not None else ""
    home = os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest")
    return version or cann_version(Path(home))


def unpublished(found: Mapping[str, str]) -> list[str]:
    """What of `versions` lies outside of what was published to work together, a line each."""
    name, cann = found["torch_npu"], found["cann"]
    number, _, post = name.partition(".post")
    said = []
    if found["torch"].partition("+")[0] != number:
        said.append(f"torch_npu {name} is made for torch {number}, not {found['torch']}")
    fits = [
        pair for torch_npu, first, pair in PUBLISHED
        if torch_npu == number and int(post or 0) >= first
    ]  # fmt: skip
    if not fits:
        known = ", ".join(
            f"{one}{f'.post{first}' * (first > 0)} with {pair}" for one, first, pair in PUBLISHED
        )
        said.append(f"torch_npu {name} has no published CANN; published are {known}")
    elif _numbers(cann) != _numbers(fits[0]):
        said.append(f"torch_npu {name} is published for CANN {fits[0]}, here is {cann}")
    if found["processor"] not in PROCESSORS:
        said.append(f"processor {found['processor']}: CANN is for {' and '.join(PROCESSORS)}")
    return said


def too_old(operators: Iterable[str]) -> str | None:
    """Why the CANN that is installed does not run one of torch_npu's operators."""
    needed = {SINCE[name] for name in operators if name in SINCE}
    return next(
        (
            f"needs CANN {since}, here is {installed_cann()}"
            for since in needed
            if (_numbers(installed_cann()) or (0, 0)) < (_numbers(since) or (0, 0))
        ),
        None,
    )


def _numbers(version: str) -> tuple[int, int] | None:
    """The first two of a version; None where it is not known."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def describe(device: torch.device) -> dict[str, str]:
    """`versions`, and the device and its cores. Only for a machine with an NPU."""
    npu = torch.get_device_module(device)
    index = device.index or 0
    limit = npu.get_device_limit(index)
    return {
        **versions(),
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
