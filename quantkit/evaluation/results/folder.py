"""The output folder of an evaluation, held by one process and kept apart from the files of a
model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.lock import Lock
from quantkit.checkpoint.output_dir import check_results_folder
from quantkit.common.assets import BUILTIN_MODELS, builtin_model
from quantkit.common.errors import QuantkitError


@contextmanager
def results_folder(out: Path | None, *models: str | None) -> Iterator[None]:
    """Hold the folder for this process; None is no folder. Raises QuantkitError where it would
    write among a model's files."""
    if out is None:
        yield
        return
    check_results_folder(out, local_models(models))
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = Lock(out / ".lock", out)
    except OSError as error:
        raise QuantkitError(
            f"cannot write {out}: {error.strerror}", "choose another --out"
        ) from error
    try:
        yield
    finally:
        lock.close()
        if made and not any(out.iterdir()):
            out.rmdir()


def local_models(names: Iterable[str | None]) -> list[Path]:
    """Those that are directories here."""
    paths = [
        builtin_model(name) if name in BUILTIN_MODELS else Path(name).expanduser()
        for name in names
        if name
    ]
    return [path for path in paths if (path / "config.json").exists()]
