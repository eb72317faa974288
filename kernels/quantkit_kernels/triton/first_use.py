"""One line for who waits: Triton compiles each kernel where it is first used, and keeps it in its
own cache."""

import functools
import hashlib
import logging
import os
import subprocess
from pathlib import Path

import torch

from quantkit_kernels.compiled import cache_directory, can_be_written, why_no_cache
from quantkit_kernels.triton.cards import architecture

_log = logging.getLogger(__name__)


@functools.cache
def announce(device: torch.device) -> None:
    """Says once on a machine, for these sources and this Triton, that kernels are going to be
    compiled."""
    if device.type != "cuda":
        return
    marker = cache_directory() / f"triton-{architecture(device)}-{_digest()}"
    if not os.path.exists(marker):  # Path.exists raises below a folder that is closed
        _log.warning(
            "compiling the Triton kernels as they are used, once on this machine: about 10 s in all"
        )
        if why_no_cache() is None:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def why_not_kept() -> str | None:
    """None where Triton can keep what it compiles, which it does not do without."""
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    if can_be_written(Path(folder).absolute()):
        return None
    return (
        f"{folder} cannot be written, where Triton keeps what it compiles; set "
        "TRITON_CACHE_DIR to a folder that can"
    )


@functools.cache
def why_not_started() -> str | None:
    """None where Triton's driver starts. At first use on a machine Triton builds it, and what
    launches each kernel, with a C compiler, which a small container lacks, as it may lack Python's
    headers."""
    from triton.runtime import driver

    try:
        driver.active  # noqa: B018  made, and built, when it is first looked at; no device is touched
    except (
        RuntimeError,
        OSError,
        AssertionError,
        ImportError,
        subprocess.SubprocessError,
    ) as fault:
        reason = str(fault).partition("\n")[0][:200]
        return (
            f"Triton does not start: {reason}; it needs a C compiler and Python's headers: "
            "install gcc and python3-dev"
        )
    return None


def _digest() -> str:
    sources = b"".join(
        path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*_kernel.py"))
    )
    return hashlib.sha256(sources + _version().encode()).hexdigest()[:16]


def _version() -> str:
    """Of Triton, whose distribution has other names on AMD's cards."""
    import triton

    return str(triton.__version__)
