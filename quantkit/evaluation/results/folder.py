"""The output folder of an evaluation: its lock, and what a resumed run reuses from it.

  completions/TASK-FINGERPRINT.jsonl   journal of replies, one line each, from which a run resumes
  completions/order.json               names of the journals, the last used last
  looks.json                           sample counts of every comparison made here
  samples.jsonl                        every sample of the last run with its grade
  prompts.jsonl                        every problem's prompt
  results.json, then report.html       written last

A fingerprint covers what determines a reply: model, task, prompt, data, sampling. It excludes
limit, repeats and concurrency, so a larger run reuses existing replies; any other change starts a
new journal and is reported.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from quantkit.checkpoint.journal import Lock
from quantkit.checkpoint.output_dir import check_results_folder
from quantkit.common.assets import BUILTIN_MODELS, builtin_model
from quantkit.common.atomic_write import make_folder, write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import open_file
from quantkit.common.result import JsonObject
from quantkit.evaluation.generators.generator import ModelReply, Prompt
from quantkit.evaluation.results.stored import read_journal_head, read_journal_rows, read_list

Key = tuple[str, int]  # problem id, repeat


def fingerprint(facts: JsonObject) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ModelProbe:
    """A greedy prompt with its reply, to recognise the model later."""

    prompt: Prompt
    reply: ModelReply


class ReplyJournal:
    """Replies of one task under one fingerprint. Failed requests are not stored, so they are
    retried.

    `probe` is None where none was stored. Opening it cuts off an incomplete last line (killed
    process), and changes nothing else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed: list[str] = []
        self.kept: dict[Key, ModelReply] = {}
        self.probe: ModelProbe | None = None
        _cut_torn_line(path)
        read_journal_head(path)
        for key, reply in read_journal_rows(path):
            if isinstance(key, Prompt):
                self.probe = ModelProbe(key, reply)
            else:
                self.kept[key] = reply

    @classmethod
    def of(
        cls, out: Path, task: str, facts: JsonObject, request: JsonObject | None = None
    ) -> "ReplyJournal":
        """The journal of these facts, made where there is none; it becomes the last used one.
        request: stored for regrading (task file, data folder)."""
        folder = out / "completions"
        make_folder(folder)
        path = folder / f"{task}-{fingerprint(facts)}.jsonl"
        used = [one.name for one in _in_order(folder)]
        changed = []
        if not path.exists():
            before = next((name for name in reversed(used) if name[:-23] == task), None)
            if before is not None:
                known, _ = read_journal_head(folder / before)
                changed = [name for name in facts if known.get(name) != facts[name]]
            write_atomic(path, json.dumps({"facts": facts, "request": request or {}}) + "\n")
        if used[-1:] != [path.name] or not (folder / _ORDER).exists():
            names = [name for name in used if name != path.name] + [path.name]
            write_atomic(folder / _ORDER, json.dumps(names, indent=1) + "\n")
        journal = cls(path)
        journal.changed = changed
        return journal

    def add(self, key: Key, completion: ModelReply) -> None:
        if completion.error is not None:
            return
        self.kept[key] = completion
        self._write({"problem": key[0], "repeat": key[1]} | _row(completion))

    def add_probe(self, prompt: Prompt, reply: ModelReply) -> None:
        self.probe = ModelProbe(prompt, reply)
        self._write({"probe": _row(reply), "prompt": asdict(prompt)})

    def _write(self, row: JsonObject) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _row(reply: ModelReply) -> JsonObject:
    return {name: value for name, value in asdict(reply).items() if name not in ("index", "error")}


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line that is JSON; the rest of the file is not touched."""
    with os.fdopen(open_file(path), "rb") as file:
        data = file.read()
    end = data.rfind(b"\n") + 1
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        try:
            json.loads(data[start:end])
            break
        except (ValueError, RecursionError):
            end = start
    if 0 < end < len(data):
        os.truncate(path, end)


def journals(out: Path) -> dict[str, list[Path]]:
    """The journals of every task in `out`, by task, the last used last."""
    found: dict[str, list[Path]] = {}
    for path in _in_order(out / "completions"):
        found.setdefault(path.stem[:-17], []).append(path)
    return dict(sorted(found.items()))


_ORDER = "order.json"


def _in_order(folder: Path) -> list[Path]:
    """Journals by last use."""
    path = folder / _ORDER
    names = read_list(path, list[str]) if path.exists() else []
    found = folder.glob(f"*-{'[0-9a-f]' * 16}.jsonl")
    return sorted(found, key=lambda one: names.index(one.name) if one.name in names else -1)


class Looks:
    """Comparisons made in `out`, stored in looks.json: for each pair of runs the numbers of
    samples compared."""

    def __init__(self, out: Path | None) -> None:
        self._path = out / "looks.json" if out is not None else None
        self._made: dict[str, list[list[int]]] = {}
        if self._path is not None and self._path.exists():
            self._made = read_list(self._path, dict[str, list[list[int]]])

    def number(self, ours: JsonObject, theirs: JsonObject, samples: tuple[int, int]) -> int:
        """Index, from 1, of this look at the two runs with these facts. Repeating the same
        sample counts is not a new look."""
        made = self._made.setdefault(f"{fingerprint(ours)}-{fingerprint(theirs)}", [])
        look = list(samples)
        if look not in made:
            made.append(look)
            if self._path is not None:
                write_atomic(self._path, json.dumps(self._made, indent=1) + "\n")
        return made.index(look) + 1


def write_samples(path: Path, samples: list[JsonObject]) -> None:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))


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
