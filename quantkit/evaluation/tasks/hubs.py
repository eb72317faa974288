"""Files of a data set from Hugging Face or, with QUANTKIT_HUB=modelscope, from ModelScope.

The hub lists a repository's files with their checksums; those of a configuration and split are
downloaded once into the cache folder and compared with their checksum at every use. HF_ENDPOINT and
MODELSCOPE_ENDPOINT name a mirror, HF_TOKEN and MODELSCOPE_API_TOKEN a key.
"""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from quantkit.common.atomic_write import new_file
from quantkit.common.errors import QuantkitError

_DATA = re.compile(r"\.(?:jsonl|jsonl\.gz|json|csv|parquet)$")
_NOT_DATA = re.compile(r"^/|(?:^|/)(?:\.|dataset_infos?\.json|configuration\.json|README)")
TIMEOUT_S = 60.0
_MIRROR = "set HF_ENDPOINT or MODELSCOPE_ENDPOINT to a mirror, or use --data-dir"


@dataclass(frozen=True)
class HubFile:
    """sha256: of its bytes; git: the id of its blob, where the hub gives no SHA-256."""

    path: str
    sha256: str | None
    git: str | None = None

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one; they may have gigabytes."""
        if not path.is_file():
            return False
        head = b"blob %d\0" % path.stat().st_size
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(head, usedforsecurity=False)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: digest).hexdigest()
        return found == (self.sha256 or self.git)


@dataclass(frozen=True)
class Hub:
    """{repo} and {path} are filled in; `files` reads a listing; `variables` name its address and a
    key in the environment."""

    usual: str
    tree: str
    file: str
    files: Callable[[Any], list[HubFile]]
    variables: tuple[str, str]

    @property
    def address(self) -> str:
        return os.environ.get(self.variables[0], self.usual)

    @property
    def headers(self) -> dict[str, str]:
        key = os.environ.get(self.variables[1])
        return {"Authorization": f"Bearer {key}"} if key else {}


def _hugging_face(listing: Any) -> list[HubFile]:
    return [
        HubFile(one["path"], (one.get("lfs") or {}).get("oid"), one["oid"])
        for one in listing
        if one["type"] == "file"
    ]


def _modelscope(listing: Any) -> list[HubFile]:
    return [
        HubFile(one["Path"], one["Sha256"]) for one in listing["Data"]["Files"] if one.get("Sha256")
    ]


HUBS = {
    "huggingface": Hub(
        "https://huggingface.co",
        "/api/datasets/{repo}/tree/main?recursive=true",
        "/datasets/{repo}/resolve/main/{path}",
        _hugging_face,
        ("HF_ENDPOINT", "HF_TOKEN"),
    ),
    "modelscope": Hub(
        "https://www.modelscope.cn",
        "/api/v1/datasets/{repo}/repo/tree?Revision=master&Recursive=True&PageSize=500",
        "/api/v1/datasets/{repo}/repo?Revision=master&FilePath={path}",
        _modelscope,
        ("MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN"),
    ),
}


def hub_name() -> str:
    name = os.environ.get("QUANTKIT_HUB", "huggingface")
    if name not in HUBS:
        raise QuantkitError(f"QUANTKIT_HUB is {name!r}", f"use {' or '.join(HUBS)}")
    return name


def split_files(files: list[HubFile], name: str | None, split: str) -> list[HubFile]:
    """The data files of a configuration and split, a pattern, by the names that hubs' repositories
    use: main/test-00000-of-00001.parquet, test.jsonl, val/law.csv, gpqa_diamond.csv."""
    data = [one for one in files if _DATA.search(one.path) and not _NOT_DATA.search(one.path)]
    part = re.compile(rf"(?:^|[/_-])(?:{split})(?:[/_.-]|$)")
    found = [one for one in data if part.search(one.path)]
    if name:
        whole = [one for one in data if one.path.rpartition("/")[2].split(".")[0] == name]
        found = [one for one in found if name in one.path.split("/")] or found or whole
    return sorted(found or (data if len(data) == 1 else []), key=lambda one: one.path)


def download(repo: str, name: str | None, split: str, cache: Path, hub: str) -> list[Path]:
    """The files of a split in `cache`. Raises QuantkitError where the hub does not answer, has no
    such split, or sends other bytes than it lists."""
    at = HUBS[hub]
    paths = []
    try:
        with httpx.Client(
            base_url=at.address, headers=at.headers, timeout=TIMEOUT_S, follow_redirects=True
        ) as client:
            listing = client.get(at.tree.format(repo=repo)).raise_for_status().json()
            wanted = split_files(at.files(listing), name, split)
            if not wanted:
                raise QuantkitError(
                    f"{repo} on {hub} has no files of {name or ''} {split}", "use --data-dir"
                )
            for one in wanted:
                path = cache / hub / repo / one.path
                if not one.is_at(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    url = at.file.format(repo=repo, path=one.path)
                    with client.stream("GET", url) as answer, new_file(path) as file:
                        for piece in answer.raise_for_status().iter_bytes():
                            file.write(piece)
                    if not one.is_at(path):
                        path.unlink()
                        raise QuantkitError(
                            f"{one.path} of {repo} is not what {hub} lists: its checksum differs",
                            "try again, or use --data-dir",
                        )
                paths.append(path)
    except httpx.TransportError as error:
        raise QuantkitError(
            f"{repo} cannot be downloaded: {hub} at {at.address} is not reached", _MIRROR
        ) from error
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (
            401,
            403,
        )
        key = f"set {at.variables[1]} to a key whose owner may read it, or use --data-dir"
        raise QuantkitError(
            f"{repo} cannot be loaded from {hub} at {at.address} ({type(error).__name__}: {error})",
            key if refused else _MIRROR,
        ) from error
    return paths
