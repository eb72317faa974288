"""All findings by name, in the order of harm. docs/check.md explains each; a test keeps the two in
sync."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantkit import __version__
from quantkit.checkpoint.containers import STACKED_REMEDY
from quantkit.common.atomic_write import write_atomic
from quantkit.common.pages import render_page

Severity = Literal["error", "warning", "note"]
"""error: it does not load, or computes something else. warning: something is lost, or an engine may
fail. note: worth knowing."""

_AGAIN = "download the file again, or ask the publisher"
_REPAIR = "quantkit check --repair OUT writes a corrected copy"
_FROM_SOURCE = "quantkit check --source SRC --repair OUT takes it from the source"
_ASK = "quantize again, or ask the publisher"


@dataclass(frozen=True)
class Kind:
    """Severity and remedy of a finding."""

    severity: Severity
    remedy: str


CATALOGUE: dict[str, Kind] = {
    # files
    "config-unreadable": Kind("error", _AGAIN),
    "shard-missing": Kind("error", "download the missing shard"),
    "shard-damaged": Kind("error", "download that shard again"),
    "index-wrong": Kind("error", _REPAIR),
    "index-missing": Kind("error", _REPAIR),
    "tensor-twice": Kind("error", "keep one of the two shards"),
    "shards-disagree": Kind(
        "error", "if the index is right, " + _REPAIR + "; else correct the index first"
    ),
    # what the model needs
    "config-field": Kind("error", "use the config.json that came with the model"),
    "class-wrong": Kind("error", _FROM_SOURCE),
    "names-wrong": Kind("error", _REPAIR),
    "experts-fused": Kind("error", STACKED_REMEDY),
    "tensors-missing": Kind(
        "error", "download the missing tensors, or use the config.json of these weights"
    ),
    "head-missing": Kind("error", _FROM_SOURCE),
    "shape-wrong": Kind("error", "use the config.json of these weights, or download them again"),
    "layers-beyond": Kind("error", "use the config.json of these weights"),
    "architecture-wrong": Kind("error", "use the config.json of these weights"),
    # what is quantized, and how it is described
    "description-missing": Kind(
        "error", "copy quantization_config from the writer's output into config.json"
    ),
    "description-wrong": Kind("error", "correct quantization_config in config.json"),
    "description-unreadable": Kind("error", "correct the file"),
    "descriptions-disagree": Kind("error", "keep the file that is right"),
    "description-old-key": Kind("warning", _REPAIR),
    "group-size-wrong": Kind("error", _REPAIR),
    "nothing-quantized": Kind(
        "error", "remove quantization_config from config.json, or quantize again"
    ),
    "part-missing": Kind("error", _AGAIN),
    "part-orphan": Kind("error", _AGAIN),
    "part-malformed": Kind("error", _AGAIN),
    "listed-but-quantized": Kind("error", _REPAIR),
    "plain-not-listed": Kind("error", _REPAIR),
    "experts-mixed": Kind("error", _ASK),
    "siblings-mixed": Kind("error", "quantize all linears that engines fuse, or none of them"),
    "list-matches-nothing": Kind("warning", _REPAIR),
    "cache-scales-missing": Kind(
        "warning", "quantize again, or remove kv_cache_scheme: engines take 1 for every scale"
    ),
    "experts-plain": Kind("warning", "quantize again: the experts hold nearly all of the weights"),
    "router-quantized": Kind("warning", "quantize again and keep the router in 16 bits"),
    "embedding-quantized": Kind(
        "warning", "quantkit convert MODEL OUT --dtype bf16 writes it unquantized"
    ),
    "mtp-incomplete": Kind("error", _FROM_SOURCE),
    "mtp-missing": Kind(
        "warning",
        "without speculative decoding set num_nextn_predict_layers to 0; else " + _FROM_SOURCE,
    ),
    "mtp-not-announced": Kind("warning", _REPAIR),
    "tensors-unknown": Kind(
        "warning",
        "use the config.json of these weights; engines stop at such tensors, or leave them out",
    ),
    # codes and scales
    "values-not-finite": Kind(
        "error", ("download those shards again; if the published ones are the same, quantize again")
    ),
    "values-absurd": Kind(
        "error", ("download those shards again; if the published ones are the same, quantize again")
    ),
    "head-ignored": Kind("error", "set tie_word_embeddings in config.json to the source's value"),
    "codes-unreadable": Kind("error", _AGAIN),
    "global-scale-inverted": Kind("error", _REPAIR),
    "zero-points-off": Kind("error", _REPAIR),
    **dict.fromkeys(
        (
            *("packing-order", "codes-shifted", "zero-points-foreign", "act-order-wrong"),
            *("transposed", "gate-up-exchanged", "linears-exchanged", "experts-exchanged"),
            *("layers-exchanged", "linears-equal", "codes-constant", "scales-zero"),
            *("scales-absurd", "codes-saturated"),
        ),
        Kind("error", _ASK),
    ),
    "global-scales-differ": Kind(
        "warning",
        "quantize again with a writer that gives linears which engines fuse one global scale",
    ),
    "router-not-compensated": Kind(
        "error", "quantize again with a writer that scales the router, such as quantkit"
    ),
    "folding-broken": Kind("error", "quantize again: a scale was folded into one side only"),
    "error-large": Kind("error", _ASK),
    # behaviour
    "router-strays": Kind(
        "error", "quantize again with a writer that scales the router, such as quantkit"
    ),
    "sublayer-off": Kind("error", _ASK),
    "tokens-differ": Kind(
        "warning", "measure it on tasks (quantkit eval), and quantize again if it lost"
    ),
    # settings
    "config-differs": Kind(
        "error", "take these values from the source's config.json: --source SRC --repair OUT does"
    ),
    "tokenizer-broken": Kind("error", _FROM_SOURCE),
    "tokenizer-too-large": Kind("error", "use the tokenizer of these weights"),
    "tokenizer-differs": Kind("error", _FROM_SOURCE),
    "eos-outside": Kind("error", _FROM_SOURCE),
    "template-broken": Kind("error", _FROM_SOURCE),
    "token-outside": Kind("error", _FROM_SOURCE),
    "sampling-wrong": Kind("error", "correct generation_config.json; " + _FROM_SOURCE),
    "class-missing": Kind("warning", _FROM_SOURCE),
    "tokenizer-missing": Kind("warning", _FROM_SOURCE),
    "text-cut": Kind("warning", _FROM_SOURCE),
    "adapter-beside": Kind(
        "warning", "merge the adapter, or move adapter_config.json to a folder of its own"
    ),
    "eos-lost": Kind(
        "warning", f"{_FROM_SOURCE}; where that has none, write it into generation_config.json"
    ),
    "eos-differs": Kind(
        "warning",
        "make config.json, generation_config.json and the tokenizer agree on the end of a text",
    ),
    "special-token-unknown": Kind("warning", "use the tokenizer files that belong together"),
    "template-foreign": Kind("warning", _FROM_SOURCE),
    "templates-disagree": Kind("warning", "keep the one that is right in both places"),
    "template-missing": Kind("warning", _FROM_SOURCE),
    "template-differs": Kind("warning", _FROM_SOURCE),
    "sampling-differs": Kind("warning", _FROM_SOURCE),
    "unlike-source": Kind("error", "give the source that it was made from"),
    # engines
    "engine-refuses": Kind("error", "see the engine's profile in docs/formats.md"),
    "engine-loses": Kind("warning", "see the engine's profile in docs/formats.md"),
    "not-loadable": Kind("error", _AGAIN),
    # notes
    "engine-unknown": Kind(
        "note",
        "try it there, or quantkit convert it to a format that docs/formats.md has for the engine",
    ),
    "tokenizer-cuts": Kind(
        "note",
        "set truncation and padding in tokenizer.json to null: programs that read it by themselves "
        "obey them",
    ),
    "copies-differ": Kind(
        "note", "copy the model's own tensor: some engines load the copy, and others share"
    ),
    "expert-silent": Kind("note", "nothing, if the source is the same: check with --source SRC"),
    "values-on-grid": Kind(
        "note", "nothing: an unquantized tensor holds values that were rounded to few levels"
    ),
    "dtype-differs": Kind(
        "note", "nothing if the engine computes in the dtype that config.json names"
    ),
    "shards-unused": Kind(
        "note", "remove them if they are of another save: engines leave them out"
    ),
    "not-read": Kind(
        "note",
        "give the model that it was made from: quantkit has no reader for this format, so codes and "
        "scales were not checked",
    ),
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
        kind = CATALOGUE[name]
        places = where if isinstance(where, str) else join_names(where)
        self.found.append(Finding(name, kind.severity, places, evidence, remedy or kind.remedy))

    def add_groups(self, faults: Mapping[str, list[tuple[str, str]]]) -> None:
        """faults: places and evidence by name. One finding per name, with the first evidence."""
        for name, entries in faults.items():
            if entries:
                self.add(name, [place for place, _ in entries], entries[0][1])

    def has(self, *names: str) -> bool:
        return any(finding.name in names for finding in self.found)

    @property
    def ordered(self) -> list[Finding]:
        """Errors first, then by the order of the catalogue, which is that of harm."""
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
        return {
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.ordered],
        }


def join_names(names: Iterable[str]) -> str:
    """The first few names and the number of others."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MAX_NAMES} more" if len(every) > _MAX_NAMES else ""
    return ", ".join(every[:_MAX_NAMES]) + more


def write_report(path: Path, model: str, about: dict[str, Any]) -> None:
    """Write the findings as one self-contained HTML page.

    about: verdict and findings, as in Findings.to_json. Raises QuantkitError if the page cannot be
    written.
    """
    page = render_page(
        Path(__file__).with_name("report.html.j2"), model=model, version=__version__, about=about
    )
    write_atomic(path, page)
