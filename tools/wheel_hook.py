"""Puts compiled CUDA kernels into the wheel: those in the folder QUANTKIT_LIBRARIES (`make wheel`).
Without it it is for any machine."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "quantkit_kernels/cuda/libraries"


class Libraries(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("QUANTKIT_LIBRARIES")
        if not folder or version == "editable":
            return
        found = sorted(Path(folder).glob("kernels-*.so"))
        if not found:
            raise FileNotFoundError(
                f"QUANTKIT_LIBRARIES: no kernels-*.so in {folder}; tools/compile_kernels.py makes "
                "one"
            )
        build_data["force_include"] |= {
            str(path.resolve()): f"{PLACE}/{path.name}" for path in found
        }
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{max(map(glibc_of, found))}_x86_64"


def glibc_of(path: Path) -> int:
    """The minor version of the glibc 2.x that a library asks for, at least the first that wheels
    have a name for."""
    return max(17, 0, *(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())))
