"""Models by name: a directory, the built-in model, or a repository of the Hugging Face Hub.

`find_model` returns a directory and downloads a Hub model whole. `read_headers` reads what `plan`
and `inspect` need of a Hub model: config files, and the headers of its shards by HTTP range
requests. No weight is downloaded: 16 MB for DeepSeek-R1's 163 shards of 688 GB. The index (9 MB
that repeat the headers) is only read where shards lie in subfolders, whose names it holds.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.containers import check_files, foreign_files
from quantkit.checkpoint.gguf import unpack as unpack_gguf
from quantkit.common.assets import BUILTIN_MODELS, builtin_model
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_there, read_json

if TYPE_CHECKING:
    from huggingface_hub.utils import TensorInfo

_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tokenization_*.py")
_INDEX = "model.safetensors.index.json"
_CONNECTIONS = 8
"""Headers requested concurrently."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
"""Anything else that has a slash is a path."""


@dataclass(frozen=True)
class RemoteHeaders:
    """Headers of a Hub model. names: all its files. files: parsed JSON files by name. shards:
    shard -> tensor name -> entry."""

    name: str
    names: frozenset[str]
    files: dict[str, dict[str, Any]]
    shards: dict[str, dict[str, "TensorInfo"]]


def find_model(name: str) -> Path:
    """Directory of a model: a directory itself, a GGUF file, which is dequantized, a built-in name,
    or a Hub id, whose files are downloaded where they are not in the Hub's cache.

    Raises QuantkitError for a name that is none of these, and where the Hub does not provide the
    model.
    """
    local = _find_directory(name)
    if local is not None:
        return local
    from huggingface_hub import snapshot_download

    with _hub_errors(name, "download it elsewhere and give its directory"):
        return Path(snapshot_download(name, allow_patterns=list(_DOWNLOADED)))


def model_basename(model: str) -> str:
    """Last component of a path (the link's own name) or of a Hub id."""
    path = Path(model).expanduser()
    return Path(os.path.abspath(path)).name if path.is_dir() else path.name


def find_local(name: str) -> Path | None:
    """Directory of a model as `find_model` returns it if its weights are on this machine; None for
    a Hub model that is not downloaded.

    Raises QuantkitError for a name that cannot be a model.
    """
    return _find_directory(name) or _find_cached(name)


def read_headers(name: str, wanted: tuple[str, ...]) -> RemoteHeaders:
    """Headers of all shards of the Hub model `name`, and those of the JSON files `wanted` that it
    has. Raises QuantkitError."""
    from huggingface_hub import HfApi, hf_hub_download

    api = HfApi()
    with _hub_errors(name, "check the name and the network, or give a directory"):
        listed = [file.rfilename for file in api.model_info(name).siblings or []]
        shards = _shards(name, listed)
        files = {
            file: read_json(Path(hf_hub_download(name, file)), LARGEST)
            for file in wanted
            if file in listed
        }
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            headers = list(
                pool.map(lambda shard: api.parse_safetensors_file_metadata(name, shard), shards)
            )
    if found := foreign_files(listed, files.get("config.json", {}), name):
        raise QuantkitError(f"hub model {name} holds {found[0]}", found[1])
    if not shards:
        raise QuantkitError(
            f"hub model {name} has no safetensors file",
            "give a model that is published as safetensors",
        )
    entries = {shard: header.tensors for shard, header in zip(shards, headers)}
    return RemoteHeaders(name, frozenset(listed), files, entries)


def fetch_small(name: str, wanted: tuple[str, ...]) -> tuple[Path, dict[str, int]]:
    """Download those of the files `wanted` that the Hub model has; returns their folder in the
    Hub's cache, and the sizes of all files of the model by name.

    The contents are not validated. Raises QuantkitError where the Hub does not provide them.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.hf_api import RepoFile

    with _hub_errors(name, "check the name and the network, or give a directory"):
        sizes = {
            entry.path: entry.size
            for entry in HfApi().list_repo_tree(name, recursive=True)
            if isinstance(entry, RepoFile)
        }
        folders = [Path(hf_hub_download(name, file)).parent for file in wanted if file in sizes]
    if not folders:
        raise QuantkitError(
            f"hub model {name} has none of the files of a model",
            "give a model in the layout of transformers",
        )
    return folders[0], sizes


def read_shard_header(name: str, shard: str, size: int) -> dict[str, "TensorInfo"]:
    """The header of one shard of `size` bytes, by range requests. Raises QuantkitError for one that
    cannot be read, or that describes more bytes than the file has."""
    from huggingface_hub import HfApi, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    with _hub_errors(name, "give another revision"):
        header = HfApi().parse_safetensors_file_metadata(name, shard)
        begin = get_session().get(
            hf_hub_url(name, shard),
            headers={**build_hf_headers(), "range": "bytes=0-7"},
            follow_redirects=True,
        )
        begin.raise_for_status()
    end = (
        8
        + int.from_bytes(begin.content[:8], "little")
        + max((one.data_offsets[1] for one in header.tensors.values()), default=0)
    )
    if end > size:
        raise QuantkitError(
            f"{shard} of hub model {name} is truncated: its header describes {end} bytes, it has "
            f"{size}",
            "upload it again",
        )
    return header.tensors


def _shards(name: str, listed: list[str]) -> list[str]:
    """`model-*.safetensors` if there is an index, else `model.safetensors` if it exists. Other
    files are another copy, unless they lie in subfolders and the index names them."""
    from huggingface_hub import hf_hub_download

    files = [file for file in listed if file.endswith(".safetensors")]
    if _INDEX not in listed:
        return (
            ["model.safetensors"]
            if "model.safetensors" in files
            else sorted(file for file in files if "/" not in file)
        )
    if any("/" in file for file in files):
        named = read_json(Path(hf_hub_download(name, _INDEX)), LARGEST).get("weight_map")
        return sorted({*files} & {*map(str, named.values())}) if isinstance(named, dict) else []
    return sorted(file for file in files if file.startswith("model-"))


def _find_directory(name: str) -> Path | None:
    """None for a name that may be a Hub id."""
    try:
        path = Path(name).expanduser()
        is_directory = path.is_dir()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # no such home, or a name that no file can have
        raise QuantkitError(
            f"model {name} does not exist ({error})",
            "give a directory, or a hub id such as org/name",
        ) from error
    if is_directory:
        _check_folder(path)
        return path
    if name in BUILTIN_MODELS:
        return builtin_model(name)
    if path.suffix == ".gguf" and path.is_file():
        return unpack_gguf(path)
    if path.exists():
        raise QuantkitError(
            f"{name} is a file",
            "give the directory that holds config.json and the safetensors shards",
        )
    if path.with_name(f"{path.name}.partial").is_dir():
        raise QuantkitError(
            f"{name} is not finished", "give the command that makes it again: it resumes"
        )
    if re.fullmatch(r"[\w.\-]+:\d+(/.*)?", name):
        raise QuantkitError(
            f"model {name} does not exist",
            f"give a server's address as http://{name}, where a command takes one",
        )
    if not _HUB_ID.fullmatch(name):
        raise QuantkitError(
            f"there is no folder {name}" if "/" in name else f"model {name} does not exist",
            f"give a directory, {', '.join(BUILTIN_MODELS)}, or a hub id such as org/name",
        )
    if path.parent.is_dir() and not _is_downloaded(name):
        raise QuantkitError(
            f"there is no folder {name}",
            f"correct the path; if it is a model of the hub, `hf download {name}` first",
        )
    return None


def _check_folder(path: Path) -> None:
    """Raise QuantkitError where a directory is recognized as something else than a checkpoint."""
    try:
        check_files(path)
        if is_there(path / "config.json") or any(path.glob("*.safetensors")):
            return  # a model, maybe without its config.json
    except PermissionError as error:
        raise QuantkitError(
            f"{path} cannot be listed: {error.strerror}",
            f"its owner can allow it: chmod -R a+rX {path}",
        ) from error
    if below := sorted(
        file.parent
        for pattern in ("*/config.json", "snapshots/*/config.json")
        for file in path.glob(pattern)
    ):
        raise QuantkitError(
            f"{path} holds no config.json", f"give the directory of the model, such as {below[0]}"
        )


def _is_downloaded(name: str) -> bool:
    """Whether any part of a Hub model was downloaded."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _find_cached(name: str) -> Path | None:
    """The cached snapshot of a Hub model if every shard of its index, or its only file, is
    there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    index = folder / _INDEX
    if not index.exists():
        return folder if (folder / "model.safetensors").exists() else None
    shards = read_json(index, LARGEST).get("weight_map")
    return (
        folder
        if isinstance(shards, dict)
        and all((folder / str(shard)).exists() for shard in shards.values())
        else None
    )


@contextmanager
def _hub_errors(name: str, remedy: str) -> Iterator[None]:
    """Turn any exception of the Hub client into a one-line QuantkitError that names the model."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise QuantkitError(
            f"cannot download {name} from Hugging Face: {reason}", remedy
        ) from error
