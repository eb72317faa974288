"""Requests, shared by quantize() and plan(): what to quantize to and how, before a model is known.

scheme, recipe, mixture = read_scheme(name, options)
request = read_request(scheme, format, engine, recipe, mixture)   refuses what no model allows
"""

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.checkpoint.formats import compressed_mixed, find_format, modelslim
from quantkit.checkpoint.formats.base import Format
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.sizes import parse_share
from quantkit.engines.profiles import (
    FormatChoice,
    MixtureChoice,
    choose,
    choose_mixture,
    find_engine,
)
from quantkit.grids.schemes import SCHEMES, Scheme, check_pair, find_scheme
from quantkit.quantization.mixed_precision import Mixture, read_mixture
from quantkit.quantization.options import SchemeOptions

NO_MIXTURE = Mixture()
WITHOUT_CACHE = {"int8": "use --scheme int8-a8w8c16", "fp8": "leave --kv-cache out"}
"""The remedy where a scheme's 8-bit cache cannot be, by its codes."""
MIXING: dict[str, Format] = {
    format.name: format for format in (compressed_mixed.FORMAT, modelslim.FORMAT)
}
"""Formats that can hold linears on several grids, by command-line name."""


@dataclass(frozen=True)
class JobRequest:
    """What to quantize to, before a model is known.

    scheme: on the grid that the engine loads, with the recipe's group size. target: the format.
    choice: what the engine loads; None if no engine was named. mixture: mixed precision;
    mixed_choice: what the engine loads on several grids, None if no engine was named or it loads no
    such checkpoint. named_format: the format given by the user, if any.
    """

    scheme: Scheme
    target: Format
    recipe: Recipe
    choice: FormatChoice | MixtureChoice | None
    mixture: Mixture = NO_MIXTURE
    mixed_choice: MixtureChoice | None = None
    named_format: str | None = None

    @property
    def format(self) -> str:
        """The format's command-line name."""
        return self.target.name

    @property
    def mixed_format(self) -> str:
        """In which linears would be on several grids."""
        return self.mixed_choice.format if self.mixed_choice else compressed_mixed.FORMAT.name

    @property
    def methods(self) -> tuple[str, ...]:
        """Empty for a run without calibration."""
        return self.scheme.methods if self.recipe.methods is None else self.recipe.methods


def read_scheme(
    scheme: str | Scheme | None, options: SchemeOptions
) -> tuple[Scheme, Recipe, Mixture]:
    """What `options` say is quantized, and how: the scheme that is named, else the recipe's, else
    awq-w4a16; and the recipe, or the scheme's own, with the values given."""
    found, share = options.recipe, options.prune
    recipe = load_recipe(str(found)) if isinstance(found, str | Path) else found
    mixture = options.mixture or read_mixture(
        keep=options.keep,
        preset=options.preset,
        bits=options.bits,
        size=options.size,
        read_weight=options.read_weight,
        ignore=options.ignore or (recipe.ignore if recipe is not None else None),
        override=options.override or (recipe.override if recipe is not None else None),
    )
    if options.sensitivities is not None:
        mixture = replace(mixture, sensitivities=options.sensitivities)
    named = scheme or (recipe.scheme if recipe is not None else "awq-w4a16")
    chosen = find_scheme(named) if isinstance(named, str) else named
    if not isinstance(chosen, Scheme):
        raise UsageError(
            f"scheme is {named!r}, a {type(named).__name__}", "give its name or a Scheme"
        )
    if recipe is None:  # a scheme given by value has no recipe of its own
        registered = chosen.name in SCHEMES
        recipe = (
            load_recipe(chosen.name)
            if registered
            else Recipe.model_validate({"scheme": chosen.name})
        )
    if options.kv_cache not in (None, "fp8"):
        raise UsageError(
            f"--kv-cache {options.kv_cache!r} is not known",
            "use --kv-cache fp8; int8 is part of --scheme int8-a8w8c8",
        )
    if options.kv_cache is not None:
        chosen = replace(chosen, cache="fp8")
    settings = recipe.with_given(
        prune=parse_share(share) if isinstance(share, str) else share,
        samples=options.samples,
        seq_len=options.seq_len,
        group_size=options.group_size,
    )
    return chosen, settings, mixture


def read_request(
    scheme: Scheme, format: str, engine: str | None, recipe: Recipe, mixture: Mixture = NO_MIXTURE
) -> JobRequest:
    """format: a command-line name, or "auto" for the scheme's first. Raises QuantkitError if no
    engine, or not `engine`, loads it."""
    if scheme.cache == "fp8":
        name = compressed_mixed.FORMAT.name
        if format not in ("auto", name) or name not in scheme.formats:
            raise QuantkitError(
                f"FP8 scales of a KV cache are written in {name}, not with {scheme.name} in "
                f"{scheme.formats[0] if format == 'auto' else format}",
                f"use --format {name}, with a scheme that has it, or leave --kv-cache out",
            )
        format = name
    named_format = None if format == "auto" else format
    if scheme.weight.has_input_scales and recipe.methods == ():
        message = (
            f"{scheme.name} has input scales, which calibration determines, and the "
            "recipe has no methods"
        )
        raise QuantkitError(message, "leave methods out of the recipe, or use --scheme fp4-w4a16")
    if scheme.cache and not (scheme.methods if recipe.methods is None else recipe.methods):
        who = scheme.name if recipe.methods is None else "the recipe"
        raise QuantkitError(
            f"an {scheme.cache} cache has cache scales, which calibration determines, and {who} "
            "has no methods",
            WITHOUT_CACHE[scheme.cache]
            + (", or --scheme awq-w4a16" if recipe.methods is None else ", or give it methods"),
        )
    for method, before in (("drift", "gptq"), ("descent", "gptq"), ("steps", "descent")):
        if method in (recipe.methods or ()) and before not in (recipe.methods or ()):
            raise QuantkitError(
                f"the recipe's methods have {method} without {before}, on which it is based",
                f"add {before} before it",
            )
    if recipe.rotation and (recipe.prune or mixture.chooses):
        raise QuantkitError(
            "a model that is pruned, or whose grids are chosen, is not rotated",
            "leave out rotation, or --prune, --bits and --size",
        )
    if mixture.chooses:
        return _mixed_request(scheme, named_format, engine, recipe, mixture)
    choice = choose(engine, scheme, format=named_format) if engine else None
    if choice is not None:
        scheme = replace(scheme, weight=choice.grid)
    name = choice.format if choice else scheme.formats[0] if format == "auto" else format
    check_pair(scheme, name)
    if "down" in recipe.rotation and (name, scheme.activation_bits) != ("compressed-tensors", 8):
        raise QuantkitError(
            f"inputs of down projections are not rotated for {scheme.name} in {name}",
            "leave down out of rotation, or use a scheme with 8-bit activations and --format "
            "compressed-tensors",
        )
    scheme = _with_group_size(scheme, recipe, engine)
    mixed_choice = _mixed_choice(engine, scheme, named_format, mixture) if engine else None
    return JobRequest(
        scheme, find_format(name, scheme), recipe, choice, mixture, mixed_choice, named_format
    )


def _mixed_request(
    scheme: Scheme, format: str | None, engine: str | None, recipe: Recipe, mixture: Mixture
) -> JobRequest:
    """With a grid chosen for every linear."""
    if recipe.prune:
        raise QuantkitError(
            "grids are not chosen for a model that is pruned",
            "use --prune with --scheme, --keep or --preset",
        )
    if scheme.activation_bits == 4:
        raise QuantkitError(
            "grids are chosen to save bytes, and quantizing activations saves none",
            "use --scheme fp4-w4a16, or awq-w4a16",
        )
    if not (scheme.methods if recipe.methods is None else recipe.methods):
        raise QuantkitError(
            f"{scheme.name} has no calibration, which is needed to choose grids",
            "use --scheme awq-w4a16 or fp4-w4a16",
        )
    choice = choose_mixture(engine, scheme, format=format) if engine else None
    if choice is not None:
        scheme = replace(scheme, weight=choice.grid)
    name = (
        choice.format
        if choice
        else format
        or (compressed_mixed.FORMAT.name if scheme.outside is None else scheme.formats[0])
    )
    target = MIXING.get(name)
    if target is None or name not in scheme.formats:
        able = [one for one in MIXING if one in scheme.formats]
        remedy = f"use --format {' or '.join(able)}" if able else "use --scheme awq-w4a16"
        raise QuantkitError(
            f"format {name} does not support mixed precision with the grids of {scheme.name}",
            remedy,
        )
    return JobRequest(
        _with_group_size(scheme, recipe, engine),
        target,
        recipe,
        choice,
        mixture,
        choice,
        format,
    )


def _mixed_choice(
    engine: str, scheme: Scheme, format: str | None, mixture: Mixture
) -> MixtureChoice | None:
    try:
        return choose_mixture(engine, scheme, format=format)
    except QuantkitError:
        if mixture.preset == "int8-attention":
            raise
        return None  # kept linears have 16 bits


def _with_group_size(scheme: Scheme, recipe: Recipe, engine: str | None) -> Scheme:
    """The scheme with the recipe's group size, if given. Raises QuantkitError if the scheme has
    none to set."""
    if recipe.group_size is None:
        return scheme
    weight = scheme.weight.with_group_size(recipe.group_size)
    if weight is None or scheme.weight.group_size is None:
        raise QuantkitError(
            f"a group size of {recipe.group_size} is given, and {scheme.name} has none to choose",
            "leave it out",
        )
    if engine and (reason := find_engine(engine).unsupported_group_size(weight)):
        raise QuantkitError(reason, "give another --group-size")
    return replace(scheme, weight=weight)
