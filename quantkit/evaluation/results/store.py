"""The output folder of an evaluation, and what may be reused from it.

  completions/TASK-FINGERPRINT.jsonl   replies as they arrive, appended line by line: the journal that a run resumes from
  samples.jsonl                        every sample of the last run with its grade
  results.json, report.html            written last
A fingerprint covers what makes a reply: model, task, prompt, data, sampling. It leaves out how many (limit, repeats, concurrency), so that
growing a run reuses what is there, and a change of anything else starts a new file beside the old one and is told.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.evaluation.generators.generator import ModelReply

Key = tuple[str, int]  # problem id, repeat


def fingerprint(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class ReplyJournal:
    """Replies of one task under one fingerprint. Failed requests are not kept: they are asked again."""

    def __init__(self, out: Path, task: str, facts: dict[str, Any]) -> None:
        folder = out / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        mark = fingerprint(facts)
        self.path = folder / f"{task}-{mark}.jsonl"
        self.changed = [] if self.path.exists() else _changes(folder, task, facts)
        self.kept: dict[Key, ModelReply] = {}
        if not self.path.exists():
            self.path.write_text(json.dumps({"facts": facts}) + "\n")
        self._read()

    def _read(self) -> None:
        """A last line cut by a kill is dropped, and cut off the file so that the next one starts clean."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self.path.write_bytes(whole)
        for line in whole.splitlines()[1:]:
            row = json.loads(line)
            key = (row.pop("problem"), row.pop("repeat"))
            self.kept[key] = ModelReply(index=-1, **row)

    def add(self, key: Key, completion: ModelReply) -> None:
        if completion.error is not None:
            return
        self.kept[key] = completion
        row = asdict(completion)
        del row["index"], row["error"]
        with self.path.open("a") as file:
            file.write(json.dumps({"problem": key[0], "repeat": key[1]} | row, ensure_ascii=False) + "\n")


def _changes(folder: Path, task: str, facts: dict[str, Any]) -> list[str]:
    """Which facts differ from the most recent other journal of this task."""
    others = sorted(folder.glob(f"{task}-{'[0-9a-f]' * 16}.jsonl"), key=lambda path: path.stat().st_mtime)
    if not others:
        return []
    with others[-1].open() as file:
        before = json.loads(file.readline())["facts"]
    return [name for name in facts if before.get(name) != facts[name]]


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_samples(path: Path, samples: list[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))


def read_samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]  # not at U+2028
