"""README.md next to an output: what it was made from and how, what it lost, how to serve and to
upload it, as the Hugging Face Hub shows it; and the command that makes the output again."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import join
from typing import Any

from quantkit import __version__
from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_model
from quantkit.engines.layouts import find_recipe
from quantkit.engines.profiles import find_engine
from quantkit.grids.base import Grid
from quantkit.grids.schemes import SCHEMES
from quantkit.quantization.request import JobRequest

NAME = "README.md"
_OPTIONS = {"scheme", "calibration", "samples", "seq_len", "seed", "group_size", "prune"}
_OPTIONS |= {"ignore", "override"}
RECIPE = "recipe.yaml"
"""The file of `own_settings`, as the command names it."""
_ENGINES = ("vllm", "sglang", "vllm-ascend")
"""Those that start with the model alone; `quantkit deploy` prints the whole launch."""


def base_model(source: Path) -> str:
    """The hub's id of a model in its cache, else the name of the folder."""
    found = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{source.absolute()}/")
    return f"{found[1]}/{found[2]}" if found else source.absolute().name


def model_card(
    source: Checkpoint,
    label: str,
    format: str,
    grids: Sequence[Grid],
    facts: Sequence[tuple[str, str]],
    command: str,
) -> bytes:
    """label: scheme or format, of which the output is named here, wherever it lies. grids: those of
    the output, none for unquantized weights. facts: names and values of a table. command: as typed,
    but for the output; the source is shown by its name."""
    base = base_model(source.path)
    name = f"{base.rpartition('/')[2]}-{label}"
    head = ["tags: [quantkit]", *([f"base_model: {base}"] if "/" in base else [])]
    head += ["base_model_relation: quantized"] if "/" in base and grids else []
    command = command.replace(str(source.path), base)
    serving = _launches(source, format, grids, name)
    text = [
        *("---", *head, "---", f"# {name}", ""),
        f"{base}, written by quantkit {__version__}.",
        *("", "| | |", "|---|---|"),
        *(f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in facts),
        *("", "Made by:", "", "```", command, "```"),
        *("", "Serve it:", "", "```", *serving, f"quantkit serve {name}", "```"),
        *("", "Upload it:", "", "```", f"hf upload USER/{name} {name}", "```", ""),
    ]
    return "\n".join(text).encode()


def _launches(source: Checkpoint, format: str, grids: Sequence[Grid], name: str) -> Iterator[str]:
    """Of engines that load this format with these grids, and the model: the words of deploy's
    recipe up to the model's name, and the options of that format."""
    names = {grid.engine_name for grid in grids} or {"dense"}
    for engine in _ENGINES:
        profile = find_engine(engine)
        rules = profile.mixtures if len(names) > 1 else profile.loads
        held = "dense" if names == {"dense"} else format
        rule = next((one for one in rules if one.format == held and names <= {*one.grids}), None)
        if rule is not None and not check_model(profile, source, rule.format, rule.variant):
            recipe = find_recipe(engine, rule.devices[0])
            words = [*recipe.start(recipe.layouts[0].roles[0].first[0]), *rule.launch]
            yield f"{join(name if word == '$model' else word for word in words)}  # {engine}"


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
    return join([*words, "--seed", str(recipe.seed), "--out", str(out)])
