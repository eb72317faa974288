"""What is mutated of the Ascend side, and the tests that should notice: ascend.yaml."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Area:
    """A file and its tests, as ascend.yaml says."""

    name: str
    path: str
    tests: tuple[str, ...]
    words: dict[str, list[str]] = field(default_factory=dict, compare=False)
    ruled: bool = True
    loaded_once: bool = False
    apart: bool = False

    def has(self, test, function):
        """Whether a test, by its node's name, may notice a change in a function, "" for none."""
        file, _, name = test.partition("::")
        words = self.words.get(function.partition(".")[0], self.words.get("", []))
        return file in self.tests and (not words or any(word in name for word in words))


_SAID = yaml.safe_load(Path(__file__).with_name("ascend.yaml").read_text())
AREAS = tuple(Area(**{**one, "tests": tuple(one["tests"])}) for one in _SAID["areas"])
EXPLAINED = {(one["path"], one["function"], one["rule"]): one["why"] for one in _SAID["explained"]}
"""Why mutants survive that do: by path, function and rule."""
