"""The compiled library that a wheel may carry (`make wheel`): then nothing is compiled at first use
and no toolkit is needed.

It is taken where it was made from the sources next to it, has every function of abi.py, and the
driver runs what its toolkit made. What it
was made from it says itself: compile_library adds two functions, for a file can be renamed.
"""

import ctypes
import functools
import logging
from pathlib import Path

from quantkit_kernels.cuda.abi import declare

_log = logging.getLogger(__name__)
FOLDER = Path(__file__).parent / "libraries"


def library_name(architecture: str, digest: str) -> str:
    return f"kernels-{architecture}-{digest}.so"


def origin_unit(digest: str) -> str:
    """CUDA source that exports the digest of a library's sources."""
    return (
        f'extern "C" const char* qk_sources() {{ return "{digest}"; }}\nextern "C" int '
        f"qk_toolkit() {{ return __CUDACC_VER_MAJOR__; }}\n"
    )


@functools.cache
def shipped_library(architecture: str, digest: str, folder: Path = FOLDER) -> Path | None:
    """The library for such a card made from the sources of `digest`, or None. One that cannot be
    used is named in a warning."""
    for path in sorted(folder.glob(library_name(architecture, "*"))):
        reason = why_unfit(path, digest) or why_not_driven(path)
        if reason is None:
            return path
        _log.warning(
            "the compiled kernels of this installation, %s, are not used: %s", path.name, reason
        )
    return None


def why_unfit(path: Path, digest: str) -> str | None:
    """None for a whole library that was made from these sources, else the reason."""
    try:
        library = ctypes.CDLL(str(path))
        library.qk_sources.restype = ctypes.c_char_p
        sources = library.qk_sources().decode()
        declare(library)
    except OSError as fault:
        return f"it cannot be loaded: {fault}"
    except AttributeError as fault:
        return f"it is incomplete: {fault}"
    return (
        None if sources == digest else f"it was made from other sources ({sources}, not {digest})"
    )


def why_not_driven(path: Path) -> str | None:
    """None where the driver runs what the library's toolkit made, or where there is none; else the
    reason."""
    toolkit, driver = int(ctypes.CDLL(str(path)).qk_toolkit()), driver_version()
    if driver is None or driver // 1000 >= toolkit:
        return None
    return (
        f"it needs a driver for CUDA {toolkit}, and this one is for "
        f"{driver // 1000}.{driver % 1000 // 10}"
    )


def driver_version() -> int | None:
    """1000 x major + 10 x minor of the CUDA that the driver is for; None where there is no
    driver."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
