"""Data files that travel with the package: recipes, evaluation tasks, the built-in model, and the
calibration text."""

from pathlib import Path

from quantkit.common.errors import QuantkitError

_PACKAGE = Path(__file__).parent.parent
BUILTIN_MODELS = ("tiny-r1",)


def asset(*parts: str) -> Path:
    """Path of `recipes/...` or `eval/...`: from the checkout where there is one, else from the
    wheel."""
    for root in (_PACKAGE.parent, _PACKAGE / "_assets"):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise QuantkitError(f"quantkit's own file {'/'.join(parts)} is missing", "reinstall quantkit")


def builtin_model(name: str) -> Path:
    """Directory of a model that ships with quantkit."""
    return _PACKAGE / "builtin" / name


def calibration_text() -> Path:
    """The text that models are calibrated on where none is given. tools/calibration/build.py makes
    it."""
    return _PACKAGE / "builtin" / "calibration.jsonl"
