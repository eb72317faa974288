"""Every scheme on models of published sizes, for every engine: planned at those sizes, and quantized
at narrow ones that the same powers of two divide.

    python tests/judges/gallery.py [--only NAME ...] [--plans] [--processes N]

Prints a line for each model, and every refusal; exits with 1 where a size is refused, or where less
than 98 % of the linears' weights are in the scheme's grid.
"""

import argparse
import sys
import tempfile
import traceback
from multiprocessing import Pool
from pathlib import Path

import published_shapes
import torch
from letters import write_letters
from size_coverage import covered, refused_for_size
from small_recipe import SMALL

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.diagnose import diagnose
from quantkit.engines.check import check_checkpoint
from quantkit.engines.profiles import engine_names
from quantkit.grids.schemes import SCHEMES
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization.job import open_job
from quantkit.quantization.request import read_request
from quantkit.quantization.run import quantize

LEAST = 0.98


def planned(name, folder):
    """(what was planned, "" or what is wrong with it)."""
    source = published_shapes.write_headers(folder / "headers", published_shapes.config(name))
    for scheme in SCHEMES:
        for engine in (None, *engine_names()):
            label = f"plan {scheme} {engine or ''}"
            try:
                plan(source, scheme, PlanOptions(engine=engine))
                recipe = Recipe(scheme=scheme)
                request = read_request(SCHEMES[scheme], "auto", engine, recipe)
                share = covered(open_job(request, Checkpoint.open(source)))
            except QuantkitError as error:
                yield label, str(error) if refused_for_size(error) else "other"
                continue
            yield label, "" if share >= LEAST else f"{share:.1%} of the weights in the grid"


def quantized(name, folder):
    source = published_shapes.write(folder / "source", published_shapes.narrow(name))
    text = write_letters(folder / "text.txt", 4000)
    for scheme in SCHEMES:
        for engine in (None, *engine_names()):
            label, out = f"quantize {scheme} {engine or ''}", folder / f"{scheme}-{engine}"
            recipe = Recipe(scheme=scheme, calibration=str(text), **SMALL)
            try:
                quantize(source, out, SCHEMES[scheme], "auto", recipe, engine=engine)
            except QuantkitError as error:
                yield label, str(error) if refused_for_size(error) else "other"
                continue
            found = [
                str(one) for one in diagnose(str(out)).findings.found if one.severity == "error"
            ]
            if engine:
                checkpoint = Checkpoint.open(out)
                problems = check_checkpoint(engine, checkpoint)
                found += [one.problem for one in problems if one.severity == "error"]
            yield label, "; ".join(found)


def judge(job):
    """(model, cells, cells that another reason refuses, faults)."""
    name, plans = job
    torch.set_num_threads(1)
    cells, others, faults = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        for step in (planned,) if plans else (planned, quantized):
            try:
                for label, fault in step(name, Path(folder)):
                    cells += 1
                    others += fault == "other"
                    faults += [f"{label}: {fault}"] if fault not in ("", "other") else []
            except Exception:  # of this model alone
                faults.append(f"{step.__name__}: {traceback.format_exc(limit=-3)}")
    return name, cells, others, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=published_shapes.NAMES)
    parser.add_argument("--plans", action="store_true", help="do not quantize")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    wrong = 0
    with Pool(given.processes, maxtasksperchild=1) as pool:
        for name, cells, others, faults in pool.imap_unordered(
            judge, [(name, given.plans) for name in given.only]
        ):
            print(f"{name}: {cells} cells, {others} refused for other reasons, {len(faults)} wrong")
            for fault in faults:
                print(f"    {fault}", flush=True)
            wrong += bool(faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
