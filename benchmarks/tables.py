"""The tables and pictures of the pages, made from benchmarks/results/*.json and recipes/engines/*.

    python benchmarks/tables.py             write them
    python benchmarks/tables.py --check     name every page and picture that does not agree with the results, and exit 1

A page shows a table where it has a marker, alone on a line; what follows it is written here, up to
the end of the table:

    <!-- table NAME -->                                                      every column and row
    <!-- table NAME; columns: scheme, KL -->                                 some columns in this order
    <!-- table NAME; down: linear, weights; across: tokens; value: ratio --> a column's values, by
    those of another
    <!-- table NAME; ...; bare -->                                           without the line that says machine, commit and command
    <!-- loader matrix -->                                                   what each engine loads, with its evidence
    <!-- refusals -->                                                        what each engine does not load, and why
    <!-- layouts -->                                                         deploy's layouts, and where their commands were run
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from core import RESULTS, Cell, Measured, read
from pictures import pictures

if TYPE_CHECKING:
    from quantkit.engines.profiles import EngineProfile

ROOT = Path(__file__).parent.parent
MARKER = re.compile(
    r"(?m)^<!-- (table [^\n]*|loader matrix|refusals|layouts) -->\n(?:\*\*[^\n]*\n\n)?(?:(?:\||- "
    r")[^\n]*\n)*"
)
ENGINES = ("vllm", "sglang", "vllm-ascend", "omni-infer", "chitu", "transformers")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with every marker's table as it is today."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{block(match[1])}"

    return MARKER.sub(fill, text)


def block(marker: str) -> str:
    """What comes below a marker."""
    if marker == "loader matrix":
        return loader_matrix()
    if marker == "refusals":
        return refusals()
    if marker == "layouts":
        return layouts()
    name, *options = (part.strip() for part in marker.removeprefix("table ").split(";"))
    asked = {
        key.strip(): value.strip()
        for key, _, value in (option.partition(":") for option in options)
    }
    unknown = set(asked) - {"columns", "down", "across", "value", "bare"}
    if (
        unknown
        or ("across" in asked) != ("value" in asked)
        or ("across" in asked) != ("down" in asked)
    ):
        raise ValueError(f"marker {marker!r} cannot be read")
    measured = read(name)
    if "across" in asked:
        body = across(measured, listed(asked["down"]), asked["across"], asked["value"])
    else:
        columns = listed(asked["columns"]) if "columns" in asked else list(measured.columns)
        places = [measured.position(column) for column in columns]
        body = markdown(
            [measured.heading(column) for column in columns],
            ([shown(row[place]) for place in places] for row in measured.rows),
        )
    return body if "bare" in asked else f"{caption(measured)}\n\n{body}"


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def across(measured: Measured, down: list[str], by: str, value: str) -> str:
    """A table with a row for each combination of `down`, and in it `value` for every value of the
    column `by`. An empty row is left out."""
    keys, place, wanted = (
        [measured.position(column) for column in down],
        measured.position(by),
        measured.position(value),
    )
    heads = list(dict.fromkeys(row[place] for row in measured.rows))
    found = {(tuple(row[key] for key in keys), row[place]): row[wanted] for row in measured.rows}
    lines = [
        [*map(shown, key), *(shown(found.get((key, head))) for head in heads)]
        for key in dict.fromkeys(key for key, _ in found)
        if any(found.get((key, head)) is not None for head in heads)
    ]
    first = f"{measured.heading(value)}, with {by} {shown(heads[0])}"
    return markdown(
        [*(measured.heading(column) for column in down), first, *map(shown, heads[1:])], lines
    )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, *rows]
    return "".join(
        f"| {' | '.join(line)} |\n" + (f"|{'---|' * len(heads)}\n" if line is heads else "")
        for line in lines
    )


def shown(cell: Cell) -> str:
    return "" if cell is None else f"{cell:f}" if isinstance(cell, Decimal) else str(cell)


def caption(measured: Measured) -> str:
    made = f"commit {measured.commit}, {measured.date}" if measured.commit else measured.date
    by = f", `{measured.command}`" if measured.command else ""
    notes = "".join(f" {note[0].upper() + note[1:]}." for note in measured.notes)
    return f"**{measured.title}** ({measured.machine}; {made}{by}).{notes}"


def profiles() -> list["EngineProfile"]:
    """The engines' profiles in the order of ENGINES, which must name them all."""
    from quantkit.engines.profiles import engine_names, find_engine

    if set(ENGINES) != set(engine_names()):
        raise ValueError(f"ENGINES must name {', '.join(engine_names())}")
    return [find_engine(name) for name in ENGINES]


def loader_matrix() -> str:
    def spoken(parts: Sequence[str]) -> str:
        return ", ".join(part.replace("_", " ") for part in parts)

    from quantkit.engines.layouts import cache_evidence, evidence, loader_results_of

    rows = []
    for profile in profiles():
        for load in profile.loads:
            known = evidence(profile, load)
            results = loader_results_of(profile, load)
            loaded = ""
            if results and all(one.holds for one in results):
                models: dict[str, set[str]] = {}
                for one in results:
                    models.setdefault(
                        f"{one.release} on a CPU, ranks {one.ranks}, {one.date}", set()
                    ).update(one.models)
                loaded = "; ".join(
                    f"loaded by {profile.engine} {when}: `make test-loaders` "
                    f"({', '.join(sorted(own))})"
                    for when, own in models.items()
                )
            if load.run:
                known = "; ".join(filter(None, [f"{known}: `{load.run}`", loaded]))
            else:
                sources = "<br>".join(f"`{source}`" for source in load.sources)
                known = loaded or f"{known}, {profile.read}: {sources}"
            parts = (
                "-"
                if load.format == "dense"
                else spoken(load.may)
                + (f"; int4: {spoken(load.four_bits)}" if load.four_bits else "")
            )
            rows.append(
                [
                    profile.engine,
                    ", ".join(load.devices),
                    f"{load.format} {load.variant}",
                    ", ".join(load.grids),
                    parts,
                    load.mtp,
                    known,
                ]
            )
        for rule in profile.mixtures:
            known = (
                f"run on {rule.run_on}: `{rule.run}`"
                if rule.run
                else f"by source, {profile.read}: "
                + "<br>".join(f"`{source}`" for source in rule.sources)
            )
            parts = "; ".join(f"{grid}: {spoken(parts)}" for grid, parts in rule.grids.items())
            rows.append(
                [
                    profile.engine,
                    ", ".join(rule.devices),
                    f"{rule.format} {rule.variant}",
                    "several",
                    parts,
                    rule.mtp,
                    known,
                ]
            )
        for codes, models in profile.caches.items():
            formats = ", ".join(
                f"{format} ({' '.join(options)})" if options else format
                for format, options in profile.fp8_caches.items()
            )
            where = ("cuda", formats) if codes == "fp8" else ("npu", "modelslim ascendV1")
            known = cache_evidence(profile, codes)
            rows.append(
                [
                    profile.engine,
                    *where,
                    f"cache {codes}, by scales of the checkpoint, of {', '.join(models)}",
                    "-",
                    "any",
                    f"{known}, {profile.read}" if known == "by source" else known,
                ]
            )
    return markdown(
        ["engine", "device", "format", "weights", "may be quantized", "MTP", "evidence"], rows
    )


def refusals() -> str:
    lines = []
    for profile in profiles():
        for refusal in profile.refuses:
            where = f" on {' and '.join(refusal.devices)}" if refusal.devices else ""
            lines.append(
                "- "
                f"{', '.join((profile.engine, *refusal.formats, *refusal.variants, *refusal.grids))}{where}: "
                ""
                ""
                ""
                ""
                ""
                f"{refusal.reason}\n"
            )
    return "".join(lines)


def layouts() -> str:
    """A row for each model that a layout's commands were run with, on as many ranks, and one for a
    layout that was run with none."""
    from quantkit.engines.layouts import layout_runs, recipes

    rows = []
    for recipe in recipes():
        for layout in recipe.layouts:
            runs = [
                run
                for run in layout_runs()
                if (run.engine, run.device, run.layout)
                == (recipe.engine, recipe.device, layout.name)
            ]
            found = dict[tuple[str, ...], list[str]]()
            for run in runs:
                words = [
                    word
                    for word in run.options.split()
                    if word in ("--enable-eplb", "2-of-each", "compiled")
                ]
                where = (
                    f"{run.ranks} rank{'s' if run.ranks > 1 else ''} on {run.machine}, "
                    f"{run.release}"
                )
                key = (
                    recipe.engine,
                    ", ".join([layout.name, *words]),
                    "yes" if run.guesses else "",
                    where,
                    run.model,
                )
                equal = f"{run.equal} of {run.compared}" if run.compared else run.said
                found.setdefault(key, []).append(
                    f"{run.format}: {equal}{'' if run.passed else ', **not enough**'}"
                )
            rows += [[*key, "; ".join(described)] for key, described in found.items()]
            if not found:
                rows.append(
                    [recipe.engine, f"{layout.name} ({recipe.device})", "", "by source", "", ""]
                )
    return markdown(
        ["engine", "layout", "MTP", "run on", "model", "equal tokens of those compared, by format"],
        rows,
    )


def wanted() -> dict[Path, str]:
    """Every page and picture, as it should be."""
    made = {page: filled(page.read_text()) for page in pages()}
    return made | {ROOT / "docs/pictures" / name: svg for name, svg in pictures().items()}


def unused() -> list[str]:
    """Results that no page shows and no picture is drawn from."""
    shown_there = (
        "".join(page.read_text() for page in pages())
        + Path(__file__).with_name("pictures.py").read_text()
    )
    return [
        path.stem
        for path in sorted(RESULTS.glob("*.json"))
        if not re.search(rf'(table |read\("){re.escape(path.stem)}[ ;"]', shown_there)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check: bool = parser.parse_args().check
    try:
        made, faults = (
            wanted(),
            [f"benchmarks/results/{name}.json is shown nowhere" for name in unused()],
        )
    except ValueError as error:
        sys.exit(str(error))
    for path, text in made.items():
        if path.exists() and path.read_text() == text:
            continue
        if check:
            faults.append(
                f"{path.relative_to(ROOT)} does not agree with the results: run python "
                "benchmarks/tables.py"
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
