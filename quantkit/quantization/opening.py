"""The opening that quantize() and plan() share: what is asked for, and of which model, with nothing known to be wrong.

    request = read_request(scheme, format, engine, recipe)      refuses what no model could be quantized to
    job = open_job(request, checkpoint)                         refuses what this model cannot

Only headers and small files are read.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from quantkit.calibrate.units import units_of
from quantkit.checkpoint.formats import find_format
from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_model
from quantkit.engines.choice import FormatChoice, choose
from quantkit.engines.profiles import find_engine
from quantkit.errors import QuantkitError
from quantkit.models.table import Parameter
from quantkit.models.tied import check_stored_head
from quantkit.quantization.checks import Inventory, check_companions, check_groups, take_inventory
from quantkit.quantization.coverage import Coverage, coverage
from quantkit.quantization.for_engine import narrowed
from quantkit.quantization.pruning import open_pruned
from quantkit.recipe import Recipe
from quantkit.schemes import IntGrid, Method, Scheme, check_pair


@dataclass(frozen=True)
class JobRequest:
    """What is asked for, before a model is looked at.

    scheme: on the grid that the engine takes, with the recipe's group size. target: the format, `format` its command-line name.
    choice: what the engine loads; None where none was named.
    """

    scheme: Scheme
    format: str
    target: Format
    recipe: Recipe
    choice: FormatChoice | None

    @property
    def methods(self) -> tuple[Method, ...]:
        """None for a run without calibration."""
        return self.scheme.methods if self.recipe.methods is None else self.recipe.methods


@dataclass(frozen=True)
class Job:
    """A request of one model. target: the format, which leaves alone what the engine does not take quantized."""

    request: JobRequest
    checkpoint: Checkpoint
    inventory: Inventory
    target: Format

    @property
    def rows(self) -> list[Parameter]:
        return self.inventory.rows

    @property
    def linears(self) -> list[Parameter]:
        """Those that the output holds quantized."""
        return [row for row in self.rows if self.target.quantizes(row.module, row.role, mtp=row.mtp)]

    @cached_property
    def coverage(self) -> Coverage:
        """How much of it that is."""
        return coverage(self.rows, {row.module for row in self.linears}, self.checkpoint.config)

    @cached_property
    def units(self) -> dict[str, list[Parameter]]:
        """What is written together, by name."""
        layers = sorted({row.layer for row in self.rows if row.layer is not None})
        architecture, config = self.inventory.architecture, self.inventory.config
        return units_of(self.rows, [group for layer in layers for group in architecture.scale_groups(config, layer)])


def read_request(scheme: Scheme, format: str, engine: str | None, recipe: Recipe) -> JobRequest:
    """format: a command-line name, or "auto" for the scheme's first. Raises QuantkitError where no engine, or not `engine`, loads that."""
    choice = choose(engine, scheme, format=None if format == "auto" else format) if engine else None
    if choice is not None:
        scheme = replace(scheme, weight=choice.grid)
    name = choice.format if choice else scheme.formats[0] if format == "auto" else format
    check_pair(scheme, name)
    scheme = _with_group_size(scheme, recipe)
    return JobRequest(scheme, name, find_format(name, scheme), recipe, choice)


def open_job(request: JobRequest, checkpoint: Checkpoint) -> Job:
    """Raises QuantkitError where the checkpoint is damaged, is no source for this scheme, or does not fit the format.

    Of a checkpoint without weights the tokenizer and the files beside it are not checked, nor whether a tied head is the embedding. Where
    the recipe prunes, the job's checkpoint is what is left (`pruning.open_pruned`).
    """
    model_type, path = checkpoint.config.get("model_type"), checkpoint.path
    prune = request.recipe.prune
    if checkpoint.has_weights:
        check_companions(path, calibrated=bool(request.methods or prune))
    if prune:
        checkpoint = open_pruned(checkpoint, prune)
    inventory = take_inventory(checkpoint, calibrated=bool(request.methods))
    if checkpoint.has_weights:
        check_stored_head(checkpoint, inventory.rows)
    target = request.target
    if request.choice is not None:
        for unfit in check_model(find_engine(request.choice.engine), checkpoint, request.format):
            raise QuantkitError(unfit.problem, unfit.remedy)
        target = narrowed(target, request.choice, inventory.rows)
    check_groups(inventory.rows, request.scheme, target)
    job = Job(request, inventory.cut or checkpoint, inventory, target)
    _check_choice(job)
    if inventory.by_name and job.coverage.share < request.recipe.least_quantized:
        told = f"model_type {model_type!r} of {path / 'config.json'} is not one that quantkit has a table of ({inventory.told})"
        fault = f"{told}, and the run would quantize {job.coverage}"
        raise QuantkitError(fault, "set least_quantized in the recipe to less where that is meant")
    return job


def _check_choice(job: Job) -> None:
    """What the engine takes quantized of this format leaves something to do, and the experts of a model that is calibrated among it."""
    choice = job.request.choice
    if choice is None:
        return
    told = f"{choice.engine} takes {', '.join(choice.parts).replace('_', ' ')} quantized in {choice.format} {choice.variant}"
    if not job.linears:
        raise QuantkitError(f"{told}, and the model has none of these", "choose another scheme, such as int8-a8w8c16, or another engine")
    routed = any(row.expert is not None for row in job.rows)
    if job.request.methods and routed and all(row.expert is None for row in job.linears):
        raise QuantkitError(f"{told}, not routed experts, and calibration cannot leave those out", "choose another format or engine")


def _with_group_size(scheme: Scheme, recipe: Recipe) -> Scheme:
    """The scheme with the recipe's group size, where it sets one. Raises QuantkitError where there is none to set."""
    if recipe.group_size is None:
        return scheme
    if not isinstance(scheme.weight, IntGrid) or scheme.weight.group_size is None:
        raise QuantkitError(f"the recipe sets group_size, and {scheme.name} has none to choose", "remove group_size from the recipe")
    return replace(scheme, weight=replace(scheme.weight, group_size=recipe.group_size))
