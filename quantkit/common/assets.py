"""Data files that ship with the package: recipes, evaluation tasks, built-in models, calibration
text."""

from pathlib import Path

from quantkit.common.errors import QuantkitError

_PACKAGE = Path(__file__).parent.parent
BUILTIN_MODELS = ("tiny-r1",)


def asset(*parts: str) -> Path:
    """Path of `recipes/...` or `eval/...`, in the source checkout if there is one, else in the
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
    """The default calibration text, made by tools/calibration/build.py."""
    return _PACKAGE / "builtin" / "calibration.jsonl"
