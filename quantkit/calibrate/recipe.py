"""A quantization recipe: all settings of a run besides the model, as one YAML file.

Rounding methods of your own: registered by name, used by that name in a recipe's methods in
place of gptq (docs/python.md, "A method of your own").
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from quantkit.common.errors import QuantkitError
from quantkit.common.settings import Strict, find_yaml, read_yaml
from quantkit.grids.names import Method

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.base import Quantizer, Scales
    from quantkit.quant.gptq import Curvature

Rounding = Callable[["Tensor", "Quantizer", "Curvature"], "tuple[Tensor, Scales]"]
"""From a linear's weight float32 [..., N, K], its grid and the curvature of its inputs (`diagonal`
[..., K]: mean square of each channel) to values on the grid [..., N, K] and their scales
[..., N, G]. Leading dimensions are experts."""

RotationKind = Literal["residual", "values", "latents", "down"]
"""Of the residual stream, of each head's values, of the latents of latent attention, and, as the
model runs, of what down projections read."""

ROUNDINGS: dict[str, Rounding] = {}


def register_rounding(name: str, rounding: Rounding) -> None:
    """Let recipes name `rounding` among their methods; a second one of the name replaces the first.
    A resumed run knows it by its name alone. Raises QuantkitError for a name of quantkit's own."""
    if name in get_args(Method) or not name.isidentifier():
        raise QuantkitError(f"a method cannot be registered as {name!r}", "choose another name")
    ROUNDINGS[name] = rounding


def check_methods(methods: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Raises ValueError for a method that does not exist, or that rounds as another does."""
    known = [*get_args(Method), *ROUNDINGS]
    for name in methods or ():
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    rounding = [name for name in methods or () if name in ROUNDINGS or name == "gptq"]
    if len(rounding) > 1:
        raise ValueError(f"{' and '.join(rounding)} both round: keep one")
    return methods


class SequenceSizes(TypedDict):
    """What `load_sequences` takes of a recipe."""

    samples: int
    held_out: int
    seq_len: int
    seed: int


class Recipe(Strict):
    """`methods` None selects the scheme's own. Lengths are in tokens."""

    scheme: str
    methods: Annotated[tuple[str, ...] | None, AfterValidator(check_methods)] = None
    calibration: str | None = None
    samples: int = Field(128, ge=1, description="calibration sequences")
    held_out: int = Field(
        16,
        ge=0,
        description="further sequences for evaluation, on which nothing is calibrated",
    )
    seq_len: int = Field(512, ge=8)
    seed: int = 0
    group_size: int | None = Field(None, ge=1, description="overrides the scheme's group_size")
    scale_points: int = Field(
        11,
        ge=2,
        description="points of the scale search, for each of its two families of candidates",
    )
    weight_points: int = Field(
        0,
        ge=0,
        description="exponents of the weight magnitude tried with each exponent of the activations",
    )
    search_rows: int = Field(
        64, ge=16, description="output rows of a linear used by the scale search"
    )
    exact_router: bool = Field(
        False,
        description="restrict scales folded into 16-bit weights to powers of two, which are exact",
    )
    damping: float = Field(
        0.05, gt=0, description="added to the Hessian's diagonal, as a share of its mean"
    )
    shrinkage: float = Field(
        0.2, ge=0, description="added to the Hessian's diagonal, as a share of each entry"
    )
    output_curvature: bool = Field(
        True,
        description="GPTQ weights errors in the residual stream by their cost downstream",
    )
    output_damping: float = Field(
        0.5, gt=0, description="added to the diagonal of that cost, as a share of its mean"
    )
    fit_points: int = Field(3, ge=1, description="scales tried for each group when it is rounded")
    sweeps: int = Field(
        4,
        ge=1,
        description="sweeps of coordinate descent over a linear's columns, if it is among the "
        "methods",
    )
    min_expert_tokens: int = Field(
        256,
        ge=0,
        description="experts with fewer routed tokens rely on statistics of the whole layer",
    )

    prune: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of every layer's routed experts that is removed, those that contribute "
        "least",
    )
    rotation: tuple[RotationKind, ...] = Field(
        (), description="rotations folded into the weights before they are quantized"
    )
    ignore: tuple[str, ...] = Field((), description="modules left at 16 bits, as --ignore")
    override: dict[str, dict[str, str | int]] = Field(
        {}, description="other grids by pattern, as --override"
    )
    least_quantized: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the weights of an unknown architecture that must be quantized",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_replaced_keys(cls, settings: object) -> object:
        for old in ("expert_damping", "expert_shrinkage"):
            if isinstance(settings, dict) and old in settings:
                new = old.removeprefix("expert_")
                raise ValueError(
                    f"{old}: damping and shrinkage are those of every Hessian now, routed experts' "
                    f"included; give {new}, or leave it out for the default"
                )
        return settings

    @property
    def sizes(self) -> SequenceSizes:
        return SequenceSizes(
            samples=self.samples, held_out=self.held_out, seq_len=self.seq_len, seed=self.seed
        )

    def with_given(self, **values: object) -> "Recipe":
        """The recipe with those of the values that are not None. Raises QuantkitError for an
        invalid value."""
        given = {key: value for key, value in values.items() if value is not None}
        try:
            return Recipe.model_validate(self.model_dump() | given)
        except ValidationError as error:
            fault = error.errors()[0]
            name = ".".join(map(str, fault["loc"]))
            raise QuantkitError(
                f"{name} = {fault['input']!r}: {fault['msg']}",
                "see docs/quantize.md for what it may be",
            ) from error

    @property
    def fingerprint(self) -> str:
        """sha256 of all settings, but for patterns, of which the grids are known, and an empty
        rotation, which older versions do not have."""
        left_out = {"ignore", "override"} | ({"rotation"} if not self.rotation else set())
        settings = self.model_dump_json(exclude=left_out)
        return hashlib.sha256(settings.encode()).hexdigest()


def load_recipe(name_or_path: str) -> Recipe:
    """A recipe shipped with quantkit, by name, or a YAML file."""
    path = find_yaml(name_or_path, "recipes")
    if path is None:
        raise QuantkitError(
            f"recipe {name_or_path} does not exist",
            "give a YAML file or the name of a recipe in recipes/",
        )
    return read_yaml(path, Recipe, "see docs/quantize.md for its keys")
