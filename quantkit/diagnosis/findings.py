"""What a diagnosis says: findings by name, most harmful first, and a verdict of three words."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.diagnosis.catalogue import CATALOGUE, Severity

Verdict = Literal["good", "doubtful", "bad"]
EXIT_CODES: dict[Verdict, int] = {"good": 0, "doubtful": 1, "bad": 2}
_SHOWN = 4
"""Names that stand in a finding; the rest is counted."""


@dataclass(frozen=True)
class Finding:
    """One fault. where: names of modules, tensors or files. evidence: what was seen there. remedy:
    what to do about it."""

    name: str
    severity: Severity
    where: str
    evidence: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """name, severity, where, evidence, remedy."""
        return dict(vars(self))


@dataclass
class DiagnosisFindings:
    """Collected while looking. A name of the catalogue may be found once for each kind of
    evidence."""

    found: list[Finding] = field(default_factory=list)

    def add(self, name: str, where: str | Iterable[str], evidence: str, remedy: str = "") -> None:
        """where: one name, or all of those that share the evidence. remedy: in the place of the
        catalogue's."""
        kind = CATALOGUE[name]
        places = where if isinstance(where, str) else listed(where)
        self.found.append(Finding(name, kind.severity, places, evidence, remedy or kind.remedy))

    def has(self, *names: str) -> bool:
        return any(finding.name in names for finding in self.found)

    @property
    def ordered(self) -> list[Finding]:
        """Errors first, then in the order of the catalogue, which is that of harm."""
        rank = {"error": 0, "warning": 1, "note": 2}
        place = {name: number for number, name in enumerate(CATALOGUE)}
        return sorted(self.found, key=lambda finding: (rank[finding.severity], place[finding.name]))

    @property
    def verdict(self) -> Verdict:
        """bad with an error, doubtful with a warning; notes do not count."""
        severities = {finding.severity for finding in self.found}
        return "bad" if "error" in severities else "doubtful" if "warning" in severities else "good"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """verdict, and findings in order."""
        return {
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.ordered],
        }


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
