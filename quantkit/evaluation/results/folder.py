"""The output folder of an evaluation: its lock, and what a resumed run reuses from it.

  completions/TASK-FINGERPRINT.jsonl   journal of replies, one line each, from which a run resumes
  looks.json                           sample counts of every comparison made here
  samples.jsonl                        every sample of the last run with its grade
  prompts.jsonl                        every problem's prompt
  results.json, report.html            written last

A fingerprint covers what determines a reply: model, task, prompt, data, sampling. It excludes
limit, repeats and concurrency, so a larger run reuses existing replies; any other change starts a
new journal and is reported.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.lock import Lock
from quantkit.checkpoint.output_dir import check_results_folder
from quantkit.common.assets import BUILTIN_MODELS, builtin_model
from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generators.generator import ModelReply, Prompt

Key = tuple[str, int]  # problem id, repeat


def fingerprint(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ModelProbe:
    """A greedy prompt with its reply, to recognise the model later."""

    prompt: Prompt
    reply: ModelReply


class ReplyJournal:
    """Replies of one task under one fingerprint. Failed requests are not stored, so they are
    retried.

    `request` is stored in the header of a new journal for regrading (task file, data folder).
    `probe` is None where none was stored.
    """

    def __init__(
        self, out: Path, task: str, facts: dict[str, Any], request: dict[str, Any] | None = None
    ) -> None:
        folder = out / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{task}-{fingerprint(facts)}.jsonl"
        self.changed = [] if self.path.exists() else _changes(folder, task, facts)
        self.kept: dict[Key, ModelReply] = {}
        self.probe: ModelProbe | None = None
        if not self.path.exists():
            write_atomic(self.path, json.dumps({"facts": facts, "request": request or {}}) + "\n")
        self.path.touch()  # regrading uses the most recently used journal of a task
        self._read()

    def _read(self) -> None:
        """Read all rows; an incomplete last line (killed process) is truncated from the file."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self.path.write_bytes(whole)
        for line in whole.split(b"\n")[1:-1]:
            row = json.loads(line)
            if "probe" in row:
                prompt = row["prompt"] | {"messages": tuple(row["prompt"]["messages"])}
                self.probe = ModelProbe(Prompt(**prompt), ModelReply(index=-1, **row["probe"]))
            else:
                key = (row.pop("problem"), row.pop("repeat"))
                self.kept[key] = ModelReply(index=-1, **row)

    def add(self, key: Key, completion: ModelReply) -> None:
        if completion.error is not None:
            return
        self.kept[key] = completion
        self._write({"problem": key[0], "repeat": key[1]} | _row(completion))

    def add_probe(self, prompt: Prompt, reply: ModelReply) -> None:
        self.probe = ModelProbe(prompt, reply)
        self._write({"probe": _row(reply), "prompt": asdict(prompt)})

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _row(reply: ModelReply) -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(reply).items()
        if name not in ("index", "error", "logprobs")
    }


def read_journal_header(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(facts, request) of a journal. Raises QuantkitError where the file is not a journal."""
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
        return head["facts"], head.get("request", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuantkitError(
            f"{path} holds no replies ({type(error).__name__})",
            "give the --out folder of an evaluation",
        ) from error


def journals(out: Path) -> list[Path]:
    """The most recently used journal of every task in `out`, in order of the file names."""
    last: dict[str, Path] = {}
    for path in sorted(
        (out / "completions").glob(f"*-{'[0-9a-f]' * 16}.jsonl"),
        key=lambda path: path.stat().st_mtime,
    ):
        last[path.stem[:-17]] = path
    return [last[task] for task in sorted(last)]


class Looks:
    """Comparisons made in `out`, stored in looks.json: for each pair of runs the numbers of
    samples compared."""

    def __init__(self, out: Path | None) -> None:
        self._path = out / "looks.json" if out is not None else None
        self._made: dict[str, list[list[int]]] = {}
        if self._path is not None and self._path.exists():
            self._made = json.loads(self._path.read_text())

    def number(self, ours: dict[str, Any], theirs: dict[str, Any], samples: tuple[int, int]) -> int:
        """Index, from 1, of this look at the two runs with these facts. Repeating the same
        sample counts is not a new look."""
        made = self._made.setdefault(f"{fingerprint(ours)}-{fingerprint(theirs)}", [])
        if list(samples) not in made:
            made.append(list(samples))
            if self._path is not None:
                write_atomic(self._path, json.dumps(self._made, indent=1) + "\n")
        return made.index(list(samples)) + 1


def _changes(folder: Path, task: str, facts: dict[str, Any]) -> list[str]:
    """Names of the facts that differ from the most recent other journal of this task."""
    others = sorted(
        folder.glob(f"{task}-{'[0-9a-f]' * 16}.jsonl"), key=lambda path: path.stat().st_mtime
    )
    if not others:
        return []
    before, _ = read_journal_header(others[-1])
    return [name for name in facts if before.get(name) != facts[name]]


def write_samples(path: Path, samples: list[dict[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))


def read_samples(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line
    ]  # splitlines would also split at U+2028


@contextmanager
def results_folder(out: Path | None, *models: str | None) -> Iterator[None]:
    """Lock the folder for this process; None does nothing. Raises QuantkitError where `out`
    contains a model's files."""
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
    """Paths of those models that are local directories."""
    paths = [
        builtin_model(name) if name in BUILTIN_MODELS else Path(name).expanduser()
        for name in names
        if name
    ]
    return [path for path in paths if (path / "config.json").exists()]
