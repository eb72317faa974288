"""The Python API for checkpoints: `quantize`, `plan`, `convert` and `inspect` (docs/python.md).

A model is a directory, a built-in name (tiny-r1) or a hub id; a scheme is a name such as
"awq-w4a16" or a `Scheme`. Options are keywords, a value of the options class, or both; a path may
be a str. Bytes are integers, times are in seconds. Every function raises QuantkitError, one line
with a remedy, before any long work that its input cannot pass. What a function needs is imported
when it is called.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.common.options import documented, read_options
from quantkit.common.progress import Event, OnEvent, Progress, ignore_event
from quantkit.planning.options import PlanOptions
from quantkit.quantization.options import QuantizeOptions

if TYPE_CHECKING:
    from quantkit.calibrate.recipe import Recipe
    from quantkit.diagnosis.inspect import Inspection
    from quantkit.grids.schemes import Scheme
    from quantkit.planning.plan import Plan
    from quantkit.quantization.convert import ConversionReport
    from quantkit.quantization.result import QuantizationReport


@documented(QuantizeOptions)
def quantize(
    model: str | Path,
    out: str | Path | None = None,
    scheme: "str | Scheme | None" = None,
    *,
    options: QuantizeOptions | None = None,
    on_event: OnEvent | None = None,
    **keywords: Any,
) -> "QuantizationReport":
    """Quantize `model` into the directory `out`, which appears when it is complete, with
    report.html in it.

    out: MODEL-SCHEME in the working directory by default. scheme: the recipe's by default, else
    awq-w4a16. on_event: is called with progress; by default a notebook or an
    interactive session shows it. A run that was stopped resumes when it is called again with the
    same arguments.
    """
    from quantkit.calibrate.documents import listed_records
    from quantkit.checkpoint.hub import find_model, model_basename
    from quantkit.common.sizes import parse_bytes
    from quantkit.quantization import run
    from quantkit.quantization.request import read_request, read_scheme

    options = read_options(QuantizeOptions, options, keywords)
    chosen, recipe, mixture = read_scheme(scheme, options)
    recipe = recipe.with_given(seed=options.seed)
    # Before a hub model is downloaded.
    read_request(chosen, options.format, options.engine, recipe, mixture)
    name = "-".join((model_basename(str(model)), chosen.name, *mixture.words()))
    source, memory, text = find_model(str(model)), options.memory, options.calibration
    records = None
    if text is not None and not isinstance(text, str | Path):
        records = listed_records(text)
        text = f"{len(records)} records given in Python"
    with _listening(f"quantizing {model}", on_event) as listen:
        return run.quantize(
            source,
            Path(name if out is None else out),
            chosen,
            options.format,
            load_settings(source, recipe, calibration=text),
            engine=options.engine,
            mixture=mixture,
            device=options.device,
            memory=parse_bytes(memory) if isinstance(memory, str) else memory,
            overwrite=options.overwrite,
            records=records,
            on_event=listen,
        )


def load_settings(
    source: Path, recipe: "Recipe", *, calibration: str | Path | None = None
) -> "Recipe":
    """The recipe with its calibration text: the one given ("builtin" for quantkit's own), else the
    recipe's, else the one that `source` ships, if any."""
    from quantkit.calibrate.data import BUILTIN, SHIPPED_TEXT

    shipped = source / SHIPPED_TEXT
    text = recipe.calibration if calibration is None else calibration
    if text == BUILTIN:
        return recipe.model_copy(update={"calibration": None})
    if text is None and shipped.exists():
        text = shipped
    return recipe if text is None else recipe.with_given(calibration=str(text))


@documented(PlanOptions)
def plan(
    model: str | Path,
    scheme: "str | Scheme | None" = None,
    *,
    options: PlanOptions | None = None,
    **keywords: Any,
) -> "Plan":
    """What quantize() with the same arguments will write and need, and whether the result serves
    `context` tokens on `devices`.

    Only headers are read: no weight of a hub model is downloaded.
    """
    from quantkit.planning.plan import plan

    return plan(model, scheme, read_options(PlanOptions, options, keywords))


def convert(
    model: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> "ConversionReport":
    """Write `model` to the directory `out` in another format without calibration, or unquantized in
    `dtype` (bfloat16, float16, float32).

    Exactly one of the two is given. The report says, for every part of the model, how far any
    stored value is from the source's.
    """
    from quantkit.checkpoint.hub import find_model
    from quantkit.quantization import convert as conversion

    source = find_model(str(model))
    with _listening(f"converting {model}", on_event) as listen:
        return conversion.convert(
            source, Path(out), format=format, dtype=dtype, overwrite=overwrite, on_event=listen
        )


def inspect(model: str | Path, *, engine: str | None = None) -> "Inspection":
    """What is in a checkpoint, from headers alone: format, scheme, tensors, bytes, what is missing
    or unknown.

    engine: adds `problems`: what prevents that engine from loading the checkpoint, or is lost
    there.
    """
    from quantkit.checkpoint.reader import open_headers
    from quantkit.diagnosis.inspect import describe
    from quantkit.engines.check import check_checkpoint

    checkpoint = open_headers(str(model))
    about = describe(checkpoint)
    if engine is None:
        return about
    return replace(about, engine=engine, problems=tuple(check_checkpoint(engine, checkpoint)))


@contextmanager
def _listening(name: str, on_event: OnEvent | None) -> Iterator[OnEvent]:
    """The caller's listener; without one a progress line in an interactive session."""
    from quantkit.common.progress import ProgressLine, is_interactive

    if on_event is not None or not is_interactive():
        yield on_event or ignore_event
        return
    with ProgressLine(name) as meter:

        def show(event: Event) -> None:
            if isinstance(event, Progress):
                meter.show(event.share, event.unit, found=event.found)

        yield show
