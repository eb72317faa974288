"""Data files that travel with the package: recipes, evaluation tasks, and the built-in model."""

from pathlib import Path

from quantkit.errors import QuantkitError

_PACKAGE = Path(__file__).parent
BUILTIN_MODELS = ("tiny-r1",)


def asset(*parts: str) -> Path:
    """Path of `recipes/...` or `eval/...`: from the checkout where there is one, else from the wheel."""
    for root in (_PACKAGE.parent, _PACKAGE / "_assets"):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise QuantkitError(f"quantkit's own file {'/'.join(parts)} is missing", "reinstall quantkit")


def builtin_model(name: str) -> Path:
    """Directory of a model that ships with quantkit."""
    return _PACKAGE / "builtin" / name


def find_model(name: str) -> Path:
    """Directory of a model: itself a directory, a built-in name, or a hub id, which is downloaded (or found in the hub's cache)."""
    try:
        path = Path(name).expanduser()
        is_directory = path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # no such home, or a name that no file can have
        raise QuantkitError(f"model {name} does not exist ({error})", "give a directory, or a hub id such as org/name") from error
    if is_directory:
        return path
    if name in BUILTIN_MODELS:
        return builtin_model(name)
    if path.exists():
        raise QuantkitError(f"{name} is a file", "give the directory that holds config.json and the safetensors shards")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise QuantkitError(f"model {name} does not exist", f"give a directory, {', '.join(BUILTIN_MODELS)}, or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise QuantkitError(f"hub model {name} cannot be had: {reason}", "download it elsewhere and give its directory") from error
