"""README.md next to an output: what it was made from and how, what it lost, how to serve and to
upload it, as the Hugging Face Hub shows it."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import join

from quantkit import __version__
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_model
from quantkit.engines.layouts import find_recipe
from quantkit.engines.profiles import find_engine
from quantkit.grids.base import Grid

NAME = "README.md"
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
