"""Jobs, shared by quantize() and plan(): a request for one model, validated.

    request = read_request(scheme, format, engine, recipe)      refuses what is invalid for any model
    job = open_job(request, checkpoint)                         refuses what is invalid for this model

Only headers and small files are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from quantkit.calibrate.source_model import units_of
from quantkit.checkpoint.formats import compressed_mixed, modelslim
from quantkit.checkpoint.formats.base import HEAD, Format
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.engines.cache_scales import check_cache
from quantkit.engines.check import check_model, loaded_schemes
from quantkit.engines.profiles import (
    FormatChoice,
    find_choice,
    find_engine,
    scheme_option,
)
from quantkit.engines.rule_check import check_rotations
from quantkit.grids.base import Grid, grid_label
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import SCHEMES, Scheme
from quantkit.models import is_known
from quantkit.models.architecture import KeyValueCache
from quantkit.models.cache_scales import cache_scale_specs, supports_cache_scales
from quantkit.models.stored_parameters import check_stored_head, read_model
from quantkit.models.table import Parameter
from quantkit.quantization.checks import (
    Coverage,
    Inventory,
    check_companions,
    check_given_groups,
    check_length,
    coverage,
    take_inventory,
)
from quantkit.quantization.fitting import (
    GROUP_SIZES,
    NEARLY_ALL,
    Allowed,
    FittedGrids,
    describe_fit,
    fit_grids,
    share_fitted,
)
from quantkit.quantization.mixed_precision import (
    check_fits,
    engine_subset,
    kept_grids,
    matcher,
    overridden_grids,
)
from quantkit.quantization.pruning import open_pruned
from quantkit.quantization.request import MIXING, WITHOUT_CACHE, JobRequest
from quantkit.quantization.rotation import RotatedCheckpoint, has_head, open_rotated


@dataclass(frozen=True)
class Job:
    """A request for one model. target: the format. grids: of every linear that the output holds
    packed, by module. fit: what sizes of the model changed in that, in a line."""

    request: JobRequest
    checkpoint: Checkpoint
    inventory: Inventory
    target: Format
    grids: Mapping[str, Grid]
    fit: str = ""

    @property
    def note(self) -> str:
        """Remarks for the user."""
        return "; ".join(filter(None, (self.inventory.note, self.fit)))

    @property
    def rows(self) -> list[Parameter]:
        return self.inventory.rows

    @cached_property
    def linears(self) -> list[Parameter]:
        """Linears to quantize."""
        return [
            row
            for row in self.rows
            if row.module in self.grids
            and not self.checkpoint.is_on(row.module, self.grids[row.module])
        ]

    def stored_bytes(self, row: Parameter, grid: Grid | None) -> int:
        """Bytes of the tensors of a parameter on a grid, extra tensors included; with grid None it
        keeps its dtype, BF16 if the source packs it."""
        extra_specs = sum(spec.nbytes for spec in self.extra_specs.get(row.name, ()))
        if grid is not None:
            return extra_specs + sum(
                spec.nbytes
                for spec in self.target.specs(row.module, (row.shape[0], row.shape[1]), grid)
            )
        packed = row.module in self.checkpoint.linears
        return extra_specs + (
            2 * math.prod(row.shape) if packed else self.checkpoint.tensors[row.name].nbytes
        )

    @cached_property
    def extra_specs(self) -> Mapping[str, tuple[TensorSpec, ...]]:
        """Tensors added to a parameter, by its name: the scales of an 8-bit cache, in calibrated
        layers. An MTP layer without quantized linears is not calibrated."""
        calibrated = {row.layer for row in self.linears}
        rows = [row for row in self.rows if row.layer in calibrated or not row.mtp]
        return (
            cache_scale_specs(self.inventory.config.cache, rows, codes)
            if (codes := self.request.scheme.cache)
            else {}
        )

    @cached_property
    def coverage(self) -> Coverage:
        """How much of it that is."""
        return coverage(self.rows, self.grids, self.checkpoint.config)

    @cached_property
    def units(self) -> dict[str, list[Parameter]]:
        """Work units, by name."""
        layers = sorted({row.layer for row in self.rows if row.layer is not None})
        architecture, config = self.inventory.architecture, self.inventory.config
        return units_of(
            self.rows,
            [group for layer in layers for group in architecture.scale_groups(config, layer)],
        )


def open_job(request: JobRequest, checkpoint: Checkpoint) -> Job:
    """Raises QuantkitError if the checkpoint is damaged, cannot be quantized with this scheme, or
    does not fit the format.

    Of a checkpoint without weights the tokenizer and auxiliary files are not checked, nor whether a
    tied head equals the embedding. If the recipe prunes, the job's checkpoint is the pruned one
    (`pruning.open_pruned`).
    """
    model_type, path = checkpoint.config.get("model_type"), checkpoint.path
    request = _of_model(request, model_type)
    prune = request.recipe.prune
    if checkpoint.has_weights:
        check_companions(path, calibrated=bool(request.methods or prune))
    if prune:
        checkpoint = open_pruned(checkpoint, prune)
    rotation, untie = request.recipe.rotation, _unties(request, checkpoint)
    if rotation or untie:
        checkpoint = open_rotated(checkpoint, rotation, request.recipe.seed, untie=untie)
    inventory = take_inventory(checkpoint, calibrated=bool(request.methods))
    if isinstance(checkpoint, RotatedCheckpoint):
        notes = filter(None, (inventory.note, checkpoint.note))
        inventory = replace(inventory, note="; ".join(notes))
    if request.methods:
        check_length(inventory, request.recipe.seq_len)
    if checkpoint.has_weights:
        check_stored_head(checkpoint, inventory.rows)
    target = request.target
    if request.choice is not None:
        profile = find_engine(request.choice.engine)
        unfits = check_model(profile, checkpoint, request.format, target.variant)
        unfits += check_cache(profile, checkpoint, request.scheme.cache)
        for unfit in unfits:
            raise QuantkitError(unfit.problem, unfit.remedy)
        target = engine_subset(target, request.choice, inventory.rows)
    scheme = request.scheme
    grids: dict[str, Grid] = {
        row.module: scheme.grid(expert=row.expert is not None, mtp=row.mtp)
        for row in inventory.rows
        if target.quantizes(row.module, row.role, mtp=row.mtp)
    }
    # Formats of sources hold kv_b and indexers, too, which are copied and never rounded.
    grids = {
        row.module: grids[row.module]
        for row in inventory.rows
        if row.module in grids
        and (row.role == "linear" or checkpoint.is_on(row.module, grids[row.module]))
    }
    if scheme.outside is not None and all(row.expert is None for row in inventory.rows):
        raise QuantkitError(
            f"{scheme.name} is for routed experts, and the model has none",
            "use int8-a8w8c16, or a scheme of 4 bits for all",
        )
    _check_cache(request.scheme, inventory)
    job = Job(request, inventory.cut or checkpoint, inventory, target, grids)
    _check_choice(job)
    if grids and not job.linears:
        raise QuantkitError(
            f"every linear of {path} is in {grid_label(scheme.weight)} already",
            "use it as it is, or another scheme; convert --format writes it in another format",
        )
    scheme_has = set(job.grids)
    if request.mixture.keep or request.mixture.preset:
        job = _without_kept(job)
    if request.mixture.ignore or request.mixture.override:
        job = _overridden(job)
    meant = scheme_has - job.grids.keys()  # to stay at 16 bits
    if not request.mixture.chooses:  # otherwise the chosen grids fit
        job = _fitted(job)
    if (chosen := job.request.choice) is not None:
        for unfit in check_rotations(chosen.engine, chosen.rule, job.checkpoint, job.rows):
            raise QuantkitError(unfit.problem, unfit.remedy)
    others = [row for row in job.rows if row.module not in meant]
    share = coverage(others, job.grids, job.checkpoint.config).share
    if inventory.by_name and share < request.recipe.least_quantized:
        message = (
            f"model_type {model_type!r} of {path / 'config.json'} is not one that quantkit has "
            f"a table of ({inventory.note})"
        )
        raise QuantkitError(
            f"{message}, and the run would quantize {job.coverage}",
            "set least_quantized in the recipe to less where that is meant",
        )
    return job


def _of_model(request: JobRequest, model_type: object) -> JobRequest:
    """With what the engine's code of this model quantizes."""
    choice, mixed = request.choice, request.mixed_choice
    return replace(
        request,
        choice=None if choice is None else choice.of_model(model_type),
        mixed_choice=None if mixed is None else mixed.of_model(model_type),
    )


def _unties(request: JobRequest, checkpoint: Checkpoint) -> bool:
    """Whether an override means a head that is tied to the embedding: it needs a tensor of its
    own."""
    meant = [one for one in request.mixture.override if matcher(one.pattern)(HEAD)]
    if not meant or not is_known(checkpoint.config):
        return False
    rows = read_model(checkpoint).rows
    linears = [row.module for row in rows if row.role == "linear"]
    return not has_head(rows) and any(
        one.bits != 16 and not any(map(matcher(one.pattern), linears)) for one in meant
    )


def outer_grids(job: Job) -> dict[str, Grid]:
    """The grids from which overrides of the head and of the embedding start. Engines read the latter
    in integers without zero points alone."""
    scheme, found = job.request.scheme, dict[str, Grid]()
    tables = [row for row in job.rows if row.role == "embedding"]
    for row in job.rows:
        named = row.module.rpartition(".")[2] == HEAD or not job.inventory.by_name
        if row.role == "head" and row.layer is None and named:
            found[row.module] = scheme.grid(expert=False, mtp=False)
        elif row.role == "embedding" and len(tables) == 1 and named and has_head(job.rows):
            found[row.module] = IntGrid(4, 128, symmetric=True)
    return found


def _fitted(job: Job) -> Job:
    """The job with linears of sizes that the scheme's grid does not fit in smaller groups, in int8
    or in 16 bits."""
    request, rows, choice = job.request, job.linears, job.request.choice
    if not rows:
        return job
    given = request.recipe.group_size
    if given is not None and not job.inventory.by_name:
        check_given_groups(rows, job.grids)
    engine = None if choice is None else find_engine(choice.engine)

    def kernels(format: str, row: Parameter, grid: Grid) -> bool:
        if engine is None:
            return True
        rules = engine.shape_rules(format, grid, None) if row.expert is None else []
        return not engine.unsupported_group_size(grid) and all(
            rule.launch or row.shape[1] % rule.inputs == 0 for rule in rules
        )

    mixed_choice, mixture = request.mixed_choice, None
    allows = None if mixed_choice is None else mixed_choice.allows

    def fitted(mixture: Format | None) -> FittedGrids:
        alone, several = (
            partial(kernels, format.name) for format in (job.target, mixture or job.target)
        )
        return fit_grids(
            rows,
            job.grids,
            request.scheme.weight,
            GROUP_SIZES if given is None else (given,),
            Allowed(job.target, alone),
            None
            if mixture is None
            else Allowed(
                mixture,
                lambda row, grid: several(row, grid) and (allows is None or allows(row, grid)),
            ),
        )

    name = request.mixed_format
    mixes = name in request.scheme.formats and (choice is None or mixed_choice is not None)
    other = MIXING[name] if mixes and request.named_format is None else None
    if job.target.writes_mixtures or MIXING.get(request.format) is modelslim.FORMAT:
        mixture, other = job.target, None
    elif request.format == name and mixes:
        mixture, other = MIXING[name], None
    try:
        fit = fitted(mixture)
    except QuantkitError:
        if other is None:
            raise
        fit = None
    share = 0.0 if fit is None else share_fitted(rows, job.grids, fit)
    if fit is None or (share < NEARLY_ALL and other is not None):
        mixture = other  # the scheme's first format does not hold them, this one may
        fit = fitted(mixture)
        share = share_fitted(rows, job.grids, fit)
    if fit.grids == dict(job.grids):
        return job
    note = describe_fit(rows, job.grids, fit.grids)
    if share < NEARLY_ALL:
        note += f"; that is {share:.0%} of the weights in {request.scheme.weight.kind}"
        if choice is not None and (others := _as_many_bits(choice.engine, request.scheme)):
            note += f", and {choice.engine} may take more of them in {' or '.join(others)}"
        elif mixes and request.named_format not in (None, name):
            note += f", and --format {name} takes more of them"
    if fit.mixed and mixture is not job.target:
        job = _as_mixture(job, fit.grids)
    else:
        scheme = replace(request.scheme, weight=fit.base)
        choice = None if choice is None else replace(choice, grid=fit.base)
        request = replace(request, scheme=scheme, choice=choice)
        job = replace(job, request=request, grids=fit.grids)
    return replace(job, fit=note)


def _as_many_bits(engine: str, scheme: Scheme) -> list[str]:
    """Other schemes of as many bits that the engine loads."""
    return [
        other.name
        for other in SCHEMES.values()
        if other.weight.bits == scheme.weight.bits
        and other.name != scheme.name
        and not (other.outside or other.cache)
        and find_choice(engine, other) is not None
    ]


def _without_kept(job: Job) -> Job:
    """The job without linears to keep; in a mixed-precision format if the rest is on more grids
    than the scheme's."""
    request, mixed_choice = job.request, job.request.mixed_choice
    name = request.mixed_format
    free = (
        request.choice is None
        and request.named_format in (None, name)
        and name in request.scheme.formats
    )
    grids = kept_grids(
        request.mixture,
        job.rows,
        job.grids,
        job.checkpoint,
        mixed_choice,
        fp8=mixed_choice is not None or free,
    )
    if set(grids.values()) <= set(job.grids.values()):
        return replace(job, grids=grids)
    return _as_mixture(job, grids)


def _overridden(job: Job) -> Job:
    """The job with the grids that patterns give; in a mixed-precision format if they are several.
    Raises QuantkitError for a pattern that matches nothing, or a grid that cannot be written or
    loaded."""
    request, mixture, mixed_choice = job.request, job.request.mixture, job.request.mixed_choice
    outer = outer_grids(job)
    grids = overridden_grids(mixture.ignore, mixture.override, job.rows, job.grids, outer)
    held = job.target.writes_mixtures or MIXING.get(request.format) is modelslim.FORMAT
    if held or set(grids.values()) <= set(job.grids.values()):
        changed = replace(job, grids=grids)
    elif request.choice is not None and mixed_choice is None:
        raise QuantkitError(
            f"{request.choice.engine} loads no several grids with {request.scheme.name}",
            "leave out --override, or --engine",
        )
    elif request.named_format not in (None, compressed_mixed.FORMAT.name):
        raise QuantkitError(
            f"format {request.format} does not hold several grids",
            "use --format compressed-tensors",
        )
    else:
        changed = _as_mixture(job, grids)
    allows = None if mixed_choice is None else mixed_choice.allows
    named = [row for row in job.rows if grids.get(row.module) != job.grids.get(row.module)]
    allowed = Allowed(changed.target, lambda row, grid: allows is None or allows(row, grid))
    check_fits(named, grids, allowed, changed.request.scheme.weight)
    return changed


def _as_mixture(job: Job, grids: Mapping[str, Grid]) -> Job:
    """The job in the format of mixed precision, on these grids."""
    request, mixed_choice = job.request, job.request.mixed_choice
    base = mixed_choice.grid if mixed_choice else request.scheme.weight
    grids = {
        module: base if grid == request.scheme.weight else grid for module, grid in grids.items()
    }
    request = replace(
        request,
        target=MIXING[request.mixed_format],
        choice=mixed_choice,
        scheme=replace(request.scheme, weight=base),
    )
    target = (
        engine_subset(request.target, mixed_choice, job.rows) if mixed_choice else request.target
    )
    return replace(job, request=request, target=target, grids=grids)


def _check_cache(scheme: Scheme, inventory: Inventory) -> None:
    """Raise QuantkitError if the scheme has an 8-bit cache that does not fit the model."""
    if scheme.cache is None:
        return
    if inventory.by_name:
        raise QuantkitError(
            f"{scheme.name} has an {scheme.cache} cache, whose scales need an architecture with a "
            "table, and quantkit has none of this model's",
            WITHOUT_CACHE[scheme.cache],
        )
    if (
        inventory.config.recurrent is not None
        or not supports_cache_scales(inventory.config.cache)
        or (scheme.cache == "fp8" and not isinstance(inventory.config.cache, KeyValueCache))
    ):
        kept = "latents, or of keys" if scheme.cache == "int8" else "keys"
        message = (
            f"{scheme.name} has an {scheme.cache} cache of {kept} and values in every layer, and "
            "this model keeps another"
        )
        raise QuantkitError(message, WITHOUT_CACHE[scheme.cache])


def _check_choice(job: Job) -> None:
    """Raise QuantkitError if the engine loads nothing of this model quantized in this format, or no
    routed experts of a model that is calibrated."""
    choice = job.request.choice
    if not isinstance(choice, FormatChoice):
        return
    message = (
        f"{choice.engine} takes {', '.join(choice.parts).replace('_', ' ')} quantized in "
        f"{choice.format} {choice.rule.variant}"
    )
    if not job.linears:
        raise QuantkitError(
            f"{message}, and the model has none of these",
            f"use {scheme_option(others, job.request.scheme.weight.bits)}"
            if (others := loaded_schemes(choice.engine, job.checkpoint))
            else "use another engine",
        )
    routed = any(row.expert is not None for row in job.rows)
    if job.request.methods and routed and all(row.expert is None for row in job.linears):
        raise QuantkitError(
            f"{message}, not routed experts, and calibration cannot leave those out",
            "choose another format or engine",
        )
