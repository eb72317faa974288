"""Every scheme on models of published sizes, for every engine.

    python tests/judges/gallery.py [--only NAME ...] [--plans | --runs] [--processes N]

Plans: at published sizes, from headers, each scheme without an engine and for each engine. Runs: of
a cut model awq-w4a16 and two other schemes in turn, one with an engine that loads it, calibrated on
short documents, then checked, asked, measured beside its source and converted.

Prints a table for each, and every fault: a refusal for a size, less than 98 % of the linears'
weights in the scheme's grid where no line says so, and whatever of a run fails. Exits with 1 then.
"""

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import published_shapes
import torch
from commands import command
from size_coverage import covered

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.engines.profiles import engine_names
from quantkit.grids.schemes import SCHEMES
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization.fitting import NEARLY_ALL
from quantkit.quantization.job import open_job
from quantkit.quantization.request import read_request

ENGINES = (None, *engine_names())
UNLOADED = {
    "scheme": r"does not load|not routed experts|model has none of these",
    "model": r"is not known to run| loads \S+ in .* only|reads no scales of an int8 cache of",
    "config.json": r"^config.json has |in config.json, which it lacks",
    "no such part": r"is for routed experts, and the model has none|this model keeps another|"
    "need an architecture with a table",
}
"""Why something is refused that no size decides."""
OTHERS = [name for name in SCHEMES if name != "awq-w4a16"]
FEW = ("int8-a8w8c8", "int4-w4a8")
"""Schemes that fewer models take: first where there is a choice."""
SCHEMES_EACH = 3
"""Of each model, awq-w4a16 among them."""
DOCUMENTS, TOKENS = 6, 48


def planned(name, folder):
    """(scheme, engine, result, text) of every cell."""
    source = published_shapes.write_headers(folder / "headers", published_shapes.config(name))
    for scheme, engine in ((scheme, engine) for scheme in SCHEMES for engine in ENGINES):
        try:
            request = read_request(SCHEMES[scheme], "auto", engine, Recipe(scheme=scheme))
            share = covered(open_job(request, Checkpoint.open(source)))
            said = plan(source, scheme, PlanOptions(engine=engine)).description
        except QuantkitError as error:
            why = (kind for kind, words in UNLOADED.items() if re.search(words, str(error)))
            yield scheme, engine, next(why, "fault"), str(error)
            continue
        told = f"{share:.0%} of the weights" in said
        result = "whole" if share >= NEARLY_ALL else "in part" if told else "fault"
        yield scheme, engine, result, said


def ran(name, folder):
    """The same of runs."""
    source, text = folder / "source", folder / "text.jsonl"
    published_shapes.write(source, published_shapes.cut(name))
    lines = [
        f"Letter {i}: rain fell on {i * 7} roofs, and the train left." for i in range(DOCUMENTS)
    ]
    text.write_text("".join(json.dumps({"text": line * 3}) + "\n" for line in lines))
    place, used = published_shapes.NAMES.index(name), 0
    first, few = 2 * place % len(OTHERS), () if place % 3 else FEW
    for scheme in dict.fromkeys(("awq-w4a16", *few, *OTHERS[first:], *OTHERS[:first])):
        engines = [engine for engine in ENGINES if _opens(source, scheme, engine)]
        if not engines:
            continue  # by the plans
        engine = engines[(place + used) % len(engines)]
        out = folder / scheme
        try:
            _use(source, text, out, scheme, engine)
            yield scheme, engine, "whole", ""
        except AssertionError as fault:
            yield scheme, engine, "fault", str(fault)
        shutil.rmtree(out, ignore_errors=True)
        used += 1
        if used == SCHEMES_EACH:
            return


def _opens(source, scheme, engine):
    recipe = Recipe(scheme=scheme, seq_len=TOKENS)
    try:
        request = read_request(SCHEMES[scheme], "auto", engine, recipe)
        open_job(request, Checkpoint.open(source))
    except QuantkitError:
        return False
    return True


def _use(source, text, out, scheme, engine):
    """What a user does with a model; AssertionError where something is wrong."""

    def typed(*words, codes=(0,)):
        answer = command(*map(str, words))
        assert answer.code in codes, f"{' '.join(map(str, words))}: {answer.err[-600:]}"
        return answer

    short = ("--seq-len", TOKENS)
    named = () if engine is None else ("--engine", engine)
    typed(
        *("quantize", source, "--scheme", scheme, "--out", out, "--calibration", text),
        *("--samples", 4, *short, *named),
    )
    checked = typed("check", out, "--source", source, *named, "--json", codes=(0, 1, 2)).json
    serious = [one for one in checked["findings"] if one["severity"] == "error"]
    assert not serious, serious
    typed("run", out, "--prompt", "What is 3 + 4?", "--max-new-tokens", 4)
    measured = typed("ppl", out, "--text", text, *short, "--baseline", source, "--json").json
    assert all(map(math.isfinite, (measured["ppl"], measured["kl"]))), measured
    written = Checkpoint.open(out)
    one_grid = len({linear.grid for linear in written.linears.values()} - {None}) == 1
    others = {SCHEMES[scheme].formats[-1]} - {written.format.name} if one_grid else ()
    for form in (*(("--format", other) for other in others), ("--dtype", "bf16")):
        typed("convert", out, out.with_name("converted"), *form)
        shutil.rmtree(out.with_name("converted"))


def judge(step, name):
    """(model, its cells)."""
    torch.set_num_threads(1)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            cells.extend(step(name, Path(folder)))
        except Exception:  # of this model alone
            cells.append((None, None, "fault", traceback.format_exc(limit=-3)))
    return name, cells


def table(found):
    """Of each scheme and engine how many models are quantized, of those with a part not on the
    grid how many, and for how many the command is refused."""
    print(f"{'':18}" + "".join(f"{engine or 'no engine':>15}" for engine in ENGINES))
    for scheme in SCHEMES:
        cells = []
        for engine in ENGINES:
            counts = Counter(cell[2] for cell in found if cell[:2] == (scheme, engine))
            part = f" ({counts['in part']} in part)" if counts["in part"] else ""
            cells.append(f"{counts['whole'] + counts['in part']}{part}")
        print(f"{scheme:18}" + "".join(f"{cell:>15}" for cell in cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=published_shapes.NAMES)
    parser.add_argument("--plans", action="store_true", help="do not quantize")
    parser.add_argument("--runs", action="store_true", help="quantize alone")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    wrong = 0
    steps = [step for step, left in ((planned, given.runs), (ran, given.plans)) if not left]
    for step in steps:
        found = []
        with get_context("spawn").Pool(given.processes) as pool:
            for name, cells in pool.imap_unordered(partial(judge, step), given.only):
                found += cells
                faults = [cell for cell in cells if cell[2] == "fault"]
                print(f"{name}: {len(cells)} cells, {len(faults)} wrong", flush=True)
                for scheme, engine, _, text in faults:
                    print(f"    {scheme} {engine or ''}: {text}", flush=True)
                wrong += len(faults)
        counts = Counter(cell[2] for cell in found)
        print(f"\n{step.__name__}, {len(given.only)} models: {dict(counts.most_common())}")
        table(found)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
