"""How it is known that an engine loads something, or that its commands serve: run, loaded by its
own loader on a CPU, or by its sources.

recipes/engines/loaded.json is what tests/judges/loaders/judge.py found. For each format on one
weight grid that an engine's released package was given it has the models, how many loads there were
(a model on a rank) and how many were right, and how many of the faults that were made in such
checkpoints were found.

recipes/deploy/run.json is what tests/judges/vllm_topologies.py found: the commands of a layout,
run, and tokens compared with quantkit's.
"""

from functools import cache

from quantkit.common.assets import asset
from quantkit.common.settings import Strict, read_yaml
from quantkit.engines.profiles import Device, EngineProfile, LoadRule, MixtureRule
from quantkit.grids.names import CacheCodes, GridName


class Loaded(Strict):
    """One format on one grid, as an engine's loader took it on a CPU. ranks: as "0 and 3 of 4".
    cache: codes whose steps it took, too."""

    engine: str
    release: str
    device: Device
    format: str
    variant: str
    grid: GridName
    models: tuple[str, ...]
    ranks: str
    loads: int
    right: int
    faults: int
    found: int
    cache: CacheCodes | None = None

    @property
    def holds(self) -> bool:
        """Whether every load was right, and every fault found."""
        return self.loads == self.right > 0 and self.faults == self.found > 0


class LayoutRun(Strict):
    """A layout's commands, run with one checkpoint on `ranks` cards, or processes, of `machine`.
    device: of the recipe that they are of.
    guesses: of the MTP layer. options: those that were added and change what is run, or "2-of-each"
    where there were two servers of each kind.

    equal of compared tokens were quantkit's; `passed` says whether they are enough. said: why there
    are none.
    """

    engine: str
    release: str
    device: Device = "cuda"
    machine: str
    layout: str
    ranks: int
    guesses: int = 0
    options: str = ""
    model: str
    format: str
    compared: int = 0
    equal: int = 0
    passed: bool
    said: str = ""


@cache
def layout_runs() -> tuple[LayoutRun, ...]:
    """What the judge wrote."""
    return read_yaml(
        asset("recipes", "deploy", "run.json"),
        tuple[LayoutRun, ...],
        "run make test-vllm-topologies, or restore that file",
    )


def layout_evidence(engine: str, device: Device, layout: str, guesses: int = 0) -> str:
    """Such as "run on CPU, vllm 0.32.0 (awq, ct-w8a8)": where, and with which formats, tokens were
    quantkit's; or "by source"."""
    found: dict[str, set[str]] = {}
    for run in layout_runs():
        if (run.engine, run.device, run.layout, bool(run.guesses)) == (
            engine,
            device,
            layout,
            bool(guesses),
        ) and run.passed:
            found.setdefault(f"{run.machine}, {run.engine} {run.release}", set()).add(run.format)
    said = [f"{where} ({', '.join(sorted(formats))})" for where, formats in found.items()]
    return f"run on {'; '.join(said)}" if said else "by source"


@cache
def loaded() -> tuple[Loaded, ...]:
    """What the judge wrote."""
    return read_yaml(
        asset("recipes", "engines", "loaded.json"),
        tuple[Loaded, ...],
        "run make test-loaders, or restore that file",
    )


def loads_of(profile: EngineProfile, load: LoadRule) -> tuple[Loaded, ...]:
    """What the judge found of a rule: a result for each of its grids and devices that it tried."""
    about = [
        one
        for one in loaded()
        if (one.engine, one.format, one.variant) == (profile.engine, load.format, load.variant)
    ]
    return tuple(one for one in about if one.grid in load.grids and one.device in load.devices)


def cache_evidence(profile: EngineProfile, codes: CacheCodes) -> str:
    """Of a cache by steps of a checkpoint, such as "loaded by vllm-ascend 0.23.0 on a CPU
    (deepseek_v3, qwen3)"; or "by source"."""
    found = [one for one in loaded() if (one.engine, one.cache) == (profile.engine, codes)]
    if not found or not all(one.holds for one in found):
        return "by source"
    models = sorted({model for one in found for model in one.models})
    return f"loaded by {profile.engine} {found[0].release} on a CPU ({', '.join(models)})"


def evidence(profile: EngineProfile, load: LoadRule | MixtureRule) -> str:
    """In a few words: "run on H200, vLLM 0.22.1", "loaded by vllm-ascend 0.23.0, ranks 0 and 3 of
    4", or "by source"."""
    if load.run:
        return f"run on {load.run_on}" if load.run_on else "run"
    found = loads_of(profile, load) if isinstance(load, LoadRule) else []
    if found and all(one.holds for one in found):
        return f"loaded by {profile.engine} {found[0].release} on a CPU, ranks {found[0].ranks}"
    return "by source"
