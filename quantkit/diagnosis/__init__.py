"""Diagnosis of checkpoints written by other tools: findings with evidence and remedy, and repair.

`checkpoint/check.py` rejects an invalid file at its first fault, and `engines/check.py` checks
whether an engine loads a sound checkpoint. This package continues after a fault and reports all of
them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from quantkit import __version__
from quantkit.checkpoint.containers import STACKED_REMEDY
from quantkit.common.assets import asset
from quantkit.common.atomic_write import write_atomic
from quantkit.common.pages import render_page
from quantkit.common.result import JsonObject
from quantkit.common.settings import Strict, read_yaml

Severity = Literal["error", "warning", "note"]
"""error: it does not load, or computes something else. warning: something is lost, or an engine may
fail. note: worth knowing."""


@dataclass(frozen=True)
class Kind:
    """Severity and remedy of a finding. shared_remedy: where the source has the same fault."""

    severity: Severity
    remedy: str
    shared_remedy: str

    @property
    def from_source(self) -> bool:
        """Whether the remedy is to take something from the source."""
        return self.remedy != self.shared_remedy


class _File(Strict):
    remedies: dict[str, str]
    kinds: dict[str, tuple[Severity, str]]


@cache
def catalogue() -> dict[str, Kind]:
    """All findings by name, in the order of harm. docs/check.md explains each; a test keeps the two
    in sync."""
    read = read_yaml(asset("recipes", "check", "findings.yaml"), _File, "restore that file")
    texts = {**read.remedies, "stacked": STACKED_REMEDY}
    shared = {**texts, "source": texts["source_too"]}
    return {
        name: Kind(severity, remedy.format_map(texts), remedy.format_map(shared))
        for name, (severity, remedy) in read.kinds.items()
    }


_CONSEQUENCES = (
    *("tensors-missing", "head-missing", "mtp-missing", "mtp-incomplete", "part-missing"),
    *("part-orphan", "nothing-quantized", "experts-mixed", "siblings-mixed", "experts-plain"),
)
"""Findings that say nothing of a checkpoint of which tensors are known to be lost."""

Verdict = Literal["good", "doubtful", "bad"]
EXIT_CODES: dict[Verdict, int] = {"good": 0, "doubtful": 1, "bad": 2}
_MAX_NAMES = 4
"""Number of names join_names in a finding; the rest is counted."""


@dataclass(frozen=True)
class Finding:
    """One fault. where: names of modules, tensors or files; evidence: what was observed; remedy:
    what to do about it."""

    name: str
    severity: Severity
    where: str
    evidence: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        return dict(vars(self))


@dataclass
class Findings:
    """Findings collected during a diagnosis. A name of the catalogue may occur once for each kind
    of evidence."""

    found: list[Finding] = field(default_factory=list)
    are_lost: bool = False
    """Whether tensors that the index or the shards' numbers promise could not be read."""

    def add(self, name: str, where: str | Iterable[str], evidence: str, remedy: str = "") -> None:
        """where: one name, or all that share the evidence. remedy: replaces that of the
        catalogue."""
        if name in _CONSEQUENCES and self.are_lost:
            return
        self.are_lost |= name in ("shard-missing", "shard-damaged")
        kind = catalogue()[name]
        places = where if isinstance(where, str) else join_names(where)
        self.found.append(Finding(name, kind.severity, places, evidence, remedy or kind.remedy))

    def add_groups(self, faults: Mapping[str, list[tuple[str, str]]]) -> None:
        """faults: places and evidence by name. One finding per name, with the first evidence."""
        for name, entries in faults.items():
            if entries:
                self.add(name, [place for place, _ in entries], entries[0][1])

    def replace_remedies(self, shared: Iterable[str]) -> None:
        """shared: names of findings that the source has too, and cannot cure."""
        for number, one in enumerate(self.found):
            kind = catalogue()[one.name]
            if one.name in shared and one.remedy == kind.remedy:
                self.found[number] = replace(one, remedy=kind.shared_remedy)

    def has(self, *names: str) -> bool:
        return any(finding.name in names for finding in self.found)

    @property
    def ordered(self) -> list[Finding]:
        """Errors first, then by the order of the catalogue, which is that of harm."""
        rank = {"error": 0, "warning": 1, "note": 2}
        place = {name: number for number, name in enumerate(catalogue())}
        return sorted(self.found, key=lambda finding: (rank[finding.severity], place[finding.name]))

    @property
    def verdict(self) -> Verdict:
        """bad with an error, doubtful with a warning; notes do not count."""
        severities = {finding.severity for finding in self.found}
        return "bad" if "error" in severities else "doubtful" if "warning" in severities else "good"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> JsonObject:
        return {
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.ordered],
        }


def join_names(names: Iterable[str]) -> str:
    """The first few names and the number of others."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MAX_NAMES} more" if len(every) > _MAX_NAMES else ""
    return ", ".join(every[:_MAX_NAMES]) + more


def write_report(path: Path, model: str, about: JsonObject) -> None:
    """Write the findings as one self-contained HTML page.

    about: verdict and findings, as in Findings.to_json. Raises QuantkitError if the page cannot be
    written.
    """
    page = render_page(
        Path(__file__).with_name("report.html.j2"), model=model, version=__version__, about=about
    )
    write_atomic(path, page)
