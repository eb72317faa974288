"""The command that makes an output again, for its report and its card."""

import shlex
from pathlib import Path
from typing import Any

from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.grids.schemes import SCHEMES
from quantkit.quantization.request import JobRequest

_OPTIONS = {"scheme", "calibration", "samples", "seq_len", "seed", "group_size", "prune"}
_OPTIONS |= {"ignore", "override"}
RECIPE = "recipe.yaml"
"""The file of `own_settings`, as the command names it."""


def own_settings(request: JobRequest) -> dict[str, Any]:
    """The recipe that says what no option of quantize gives; empty where the scheme's own does."""
    name, given = request.scheme.name, request.recipe.model_dump(mode="json", exclude=_OPTIONS)
    defaults = Recipe.model_validate({"scheme": name})
    own = load_recipe(name) if name in SCHEMES else defaults
    if given == own.model_dump(mode="json", exclude=_OPTIONS):
        return {}
    usual = defaults.model_dump(mode="json")
    return {"scheme": name} | {key: one for key, one in given.items() if one != usual[key]}


def own_command(request: JobRequest, source: Path, out: Path, engine: str | None) -> str:
    """`quantkit quantize ...`; where there are own settings, with a recipe of them."""
    recipe, words = request.recipe, ["quantkit", "quantize", str(source)]
    words += ["--scheme", request.scheme.name]
    words += ["--recipe", RECIPE] if own_settings(request) else []
    words += ["--engine", engine] if engine else ["--format", request.format]
    words += request.mixture.options()
    words += ["--kv-cache", "fp8"] if request.scheme.cache == "fp8" else []
    if request.methods or recipe.prune:
        words += ["--calibration", recipe.calibration] if recipe.calibration else []
        words += ["--samples", str(recipe.samples), "--seq-len", str(recipe.seq_len)]
    words += ["--group-size", str(recipe.group_size)] if recipe.group_size else []
    if recipe.prune:
        words += ["--prune", f"{recipe.prune:.6%}".replace("%", "").rstrip("0").rstrip(".") + "%"]
    return shlex.join([*words, "--seed", str(recipe.seed), "--out", str(out)])
