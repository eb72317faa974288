"""Libraries that the user's own compiler makes at first use. They have a plain C interface, so that
they depend on no version of torch.

Each is kept in the user's cache under a hash of what it was made from; nothing is ever written into
the package.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_NO_HOME = "/nonexistent"


def cache_directory() -> Path:
    """Of a user without a home it is where nothing can be."""
    home = os.path.expanduser("~")
    return (
        Path(
            os.environ.get("XDG_CACHE_HOME")
            or Path(home if os.path.isabs(home) else _NO_HOME) / ".cache"
        )
        / "quantkit"
    )


def why_no_cache() -> str | None:
    """None where a library can be kept, else the reason and what helps."""
    folder = cache_directory()
    if can_be_written(folder):
        return None
    return (
        f"{folder} cannot be written, where kernels are kept that are compiled at first use; "
        "set XDG_CACHE_HOME to a folder that can"
    )


def can_be_written(folder: Path) -> bool:
    """Whether it is a folder that takes files, or could be made one."""
    there = next(
        one for one in (folder, *folder.parents) if os.path.exists(one)
    )  # Path.exists raises below a folder that is closed
    return os.access(there, os.W_OK | os.X_OK) and there.is_dir()


def compile_into(target: Path, command: Sequence[str], sources: Sequence[Path]) -> None:
    """Compile to `target`. Another process doing the same is harmless: the last rename wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        done = subprocess.run(
            [*command, "-o", str(built), *map(str, sources)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{Path(command[0]).name} could not compile the kernels: "
                f"{done.stderr.strip()[-2000:]}"
            )
        built.rename(target)
