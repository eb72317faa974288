"""A process of quality.py that stays for many runs: python quality_worker.py KIND LOG

KIND is quantkit, score or a peer of quality_peers.py; each imports what it needs once. Reads a job as
one JSON line from its standard input and answers with one JSON line on its standard output; what
else is printed goes to LOG.
"""

import importlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core import parser
from quality_peers import PACKAGES, PEERS

HEADROOMS = (1, 2, 4, 8)
"""Of nvfp4-w4a4's inputs; an output is written with that of quantkit.grids.e2m1 and judged with
each."""
SPLITS = ("tuning", "final")

Job = dict[str, Any]


def quantkit_runs() -> Callable[[Job], Job]:
    import torch

    from quantkit.calibrate.recipe import Recipe, load_recipe
    from quantkit.grids.schemes import find_scheme
    from quantkit.quantization.run import quantize

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(job: Job) -> Job:
        recipe = Recipe.model_validate(load_recipe(job["scheme"]).model_dump() | job["settings"])
        report = quantize(
            Path(job["source"]),
            Path(job["out"]),
            find_scheme(job["scheme"]),
            "auto",
            recipe,
            device=device,
            overwrite=True,
        )
        return {"reported": report.findings.next_token}

    return run


def peer_runs(kind: str) -> Callable[[Job], Job]:
    """Its package is imported at once, while judges are still trained."""
    importlib.import_module(PACKAGES[kind])

    def run(job: Job) -> Job:
        PEERS[kind](Path(job["source"]), Path(job["tokens"]), job["recipe"], Path(job["out"]))
        return {}

    return run


def scores() -> Callable[[Job], Job]:
    import torch
    from quality_evaluator import documents_of, run_model, score
    from safetensors.torch import load_file, save_file

    from quantkit.grids.nvfp4 import INPUT_HEADROOM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    judges: dict[str, Any] = {}

    def of(job: Job) -> Any:
        if job["judge"] not in judges:
            folder, name = Path(job["judges"]), job["judge"]
            judges[name] = []
            for split in SPLITS:
                kinds, own = zip(*documents_of(folder, name, split, job["documents"]), strict=True)
                judges[name].append((kinds, own, run_model(folder / name, own, device)))
        return judges[job["judge"]]

    def figures(job: Job) -> Job:
        found_of = {}
        for split, (kinds, documents, reference) in zip(SPLITS, of(job), strict=True):
            found = score(reference, run_model(Path(job["out"]), documents, device))
            found_of[split] = {
                name: [float(f"{x:.6g}") for x in getattr(found, name)]
                for name in ("kl", "top1", "tokens", "experts")
            } | {"kinds": kinds}
        return found_of

    def run(job: Job) -> Job:
        result: Job = {"scores": figures(job)}
        if (
            job["headrooms"]
            and job["scheme"] == "nvfp4-w4a4"
            and job["name"].startswith("quantkit")
        ):
            written = {path: load_file(path) for path in Path(job["out"]).glob("*.safetensors")}
            result["headroom"] = {}
            for headroom in HEADROOMS:
                for path, tensors in written.items():
                    factor = INPUT_HEADROOM / headroom
                    save_file(
                        {
                            name: t * factor if name.endswith("input_global_scale") else t
                            for name, t in tensors.items()
                        },
                        path,
                    )
                result["headroom"][headroom] = figures(job)
        if job["remove"]:
            shutil.rmtree(job["out"])
        return result

    return run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("kind", choices=("quantkit", "score", *PEERS))
    options.add_argument("log", type=Path)
    given = options.parse_args()
    kind, log = given.kind, os.open(given.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run = (
        quantkit_runs() if kind == "quantkit" else scores() if kind == "score" else peer_runs(kind)
    )
    for line in sys.stdin:
        job, start = json.loads(line), time.perf_counter()
        try:
            answer = run(job)
        except Exception as error:  # reported to the caller, which leaves the run out
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(
            json.dumps(answer | {"seconds": round(time.perf_counter() - start, 1)}),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()
