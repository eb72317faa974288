"""The Python API: what `import quantkit` offers (docs/python.md). Each function opens what it is
given and calls a room's own line.

A model is a directory, a built-in name (tiny-r1) or a hub id; a scheme is a name such as
"awq-w4a16" or a `Scheme`. Bytes are integers, times are in seconds. Every function raises
QuantkitError, one line with a remedy, before any long work that its input cannot come through.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.calibrate.data import SHIPPED_TEXT
from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.checkpoint.hub import find_model, model_basename
from quantkit.checkpoint.remote import open_headers
from quantkit.common.errors import QuantkitError
from quantkit.common.progress import (
    Event,
    OnEvent,
    Progress,
    ProgressLine,
    ignore_event,
    is_interactive,
)
from quantkit.common.sizes import parse_bytes, parse_share
from quantkit.diagnosis.inspect import Inspection, describe
from quantkit.engines.check import check_checkpoint
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.distance.quality import Quality
from quantkit.evaluation.results.folder import results_folder
from quantkit.evaluation.results.task_results import EvalResults
from quantkit.evaluation.run import run_evaluation
from quantkit.grids.schemes import SCHEMES, Scheme, find_scheme
from quantkit.planning import plan as planning
from quantkit.planning.plan import Plan
from quantkit.quantization import convert as conversion
from quantkit.quantization import run as quantization
from quantkit.quantization.convert import ConversionReport
from quantkit.quantization.job import NO_MIXTURE, read_request
from quantkit.quantization.mixed_precision import Mixture
from quantkit.quantization.run import QuantizationReport


def quantize(
    model: str | Path,
    out: str | Path | None = None,
    scheme: str | Scheme | None = None,
    *,
    format: str = "auto",
    engine: str | None = None,
    mixture: Mixture = NO_MIXTURE,
    sensitivities: str | Path | None = None,
    recipe: str | Path | Recipe | None = None,
    calibration: str | Path | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    group_size: int | None = None,
    prune: str | float | None = None,
    device: str = "auto",
    memory: str | int | None = None,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> QuantizationReport:
    """Quantize `model` into the directory `out`, which appears when it is complete, with
    report.html in it.

    out: None is MODEL-SCHEME in the working directory. scheme: None is the recipe's, and that of a
    mixture awq-w4a16. format: "auto" is the scheme's first. engine: write what this engine loads,
    or refuse. mixture: which linears stay as they are, or are on other grids;
    sensitivities: the file that an earlier run measured for that. recipe: a name, a YAML file or a
    value; None is the scheme's own, and calibration (a file or a data set), samples (sequences),
    seq_len (tokens of each), seed and group_size (input channels of int4 that share a scale)
    replace what it says. Where nothing is named, the text that the model ships is taken, else
    quantkit's own. memory: of the host, bytes or "16GiB", to keep under. prune: the share of every
    layer's routed experts to leave out, those that add least, 0.25 or "25%". on_event is called
    with progress; without it a notebook or an interactive session shows it. A run that was stopped
    goes on when it is called again alike.
    """
    given = {"samples": samples, "seq_len": seq_len, "seed": seed, "group_size": group_size}
    chosen, asked = _asked(scheme, recipe, mixture, prune=prune, **given)
    read_request(chosen, format, engine, asked, mixture)  # before a hub model is downloaded
    measured = None if sensitivities is None else Path(sensitivities)
    target = Path(
        out
        if out is not None
        else "-".join((model_basename(str(model)), chosen.name, *mixture.words()))
    )
    options: dict[str, Any] = {
        "engine": engine,
        "mixture": mixture,
        "sensitivities": measured,
        "device": device,
        "overwrite": overwrite,
    }
    options["memory"] = parse_bytes(memory) if isinstance(memory, str) else memory
    source = find_model(str(model))
    settings = load_settings(source, asked, calibration=calibration)
    with _listening(f"quantizing {model}", on_event) as listen:
        return quantization.quantize(
            source, target, chosen, format, settings, **options, on_event=listen
        )


def load_settings(source: Path, recipe: Recipe, *, calibration: str | Path | None = None) -> Recipe:
    """The recipe with the text that it is calibrated on: the one named, else the recipe's, else the
    one that `source` ships, if it does."""
    shipped = source / SHIPPED_TEXT
    text = recipe.calibration if calibration is None else calibration
    if text is None and shipped.exists():
        text = shipped
    return recipe if text is None else recipe.with_given(calibration=str(text))


def plan(
    model: str | Path,
    scheme: str | Scheme | None = None,
    *,
    format: str = "auto",
    engine: str | None = None,
    mixture: Mixture = NO_MIXTURE,
    sensitivities: str | Path | None = None,
    recipe: str | Path | Recipe | None = None,
    devices: str | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    group_size: int | None = None,
    prune: str | float | None = None,
    context: int = 4096,
    redundant: int = 0,
    cache: str | None = None,
    dp: int = 1,
    draft: str | Path | None = None,
    layout: str | None = None,
) -> Plan:
    """What quantize() with the same arguments will write and need, and whether the result serves
    `context` tokens on `devices`.

    Headers alone are read: no weight of a hub model is downloaded. devices: number and memory of
    each (8x64GiB without), tensor parallel over all, or "8x910B1" for predicted decoding times as
    well. redundant: copies of routed experts in a layer. cache: int8 or fp8 counts
    a cache of 8 bits. dp: the number of devices, where each has requests of its own and shares
    routed experts alone. draft: a draft model, which every device holds whole. layout: of the
    engine, such as "four-boxes"; `devices` are those of one of its machines then.
    """
    chosen, asked = _asked(
        scheme,
        recipe,
        mixture,
        prune=prune,
        samples=samples,
        seq_len=seq_len,
        group_size=group_size,
    )
    measured = None if sensitivities is None else Path(sensitivities)
    options: dict[str, Any] = {
        "engine": engine,
        "mixture": mixture,
        "sensitivities": measured,
        "recipe": asked,
        "devices": devices,
    }
    options |= {
        "context": context,
        "redundant": redundant,
        "cache": cache,
        "dp": dp,
        "draft": draft,
        "layout": layout,
    }
    return planning.plan(model, chosen, format, **options)


def convert(
    model: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> ConversionReport:
    """Write `model` to the directory `out` in another format without calibration, or plain in
    `dtype` (bfloat16, float16, float32).

    The report says, for every part of the model, how far any stored value is from the source's.
    Exactly one of the two is given.
    """
    source = find_model(str(model))
    with _listening(f"converting {model}", on_event) as listen:
        return conversion.convert(
            source, Path(out), format=format, dtype=dtype, overwrite=overwrite, on_event=listen
        )


def inspect(model: str | Path, *, engine: str | None = None) -> Inspection:
    """What is in a checkpoint, from headers alone: format, scheme, tensors, bytes, what is missing
    or unknown.

    engine: adds `problems`, what keeps that engine from loading the checkpoint or loses something
    there.
    """
    checkpoint = open_headers(str(model))
    about = describe(checkpoint)
    return (
        about
        if engine is None
        else replace(about, engine=engine, problems=tuple(check_checkpoint(engine, checkpoint)))
    )


def evaluate(
    model: str | Path,
    tasks: str | Sequence[str],
    *,
    data_dir: str | Path | None = None,
    limit: int | None = None,
    repeats: int | None = None,
    protocol: str | None = None,
    baseline: str | Path | None = None,
    out: str | Path | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    margin: float = 0.01,
    seed: int = 0,
    concurrency: int = 64,
    allow_code_exec: bool = False,
    served_model: str | None = None,
    api_key: str | None = None,
    model_revision: str | None = None,
    timeout: float = 600.0,
    retries: int = 5,
    trust_kept: bool = False,
    device: str = "auto",
    backend: str = "auto",
    cache: str | None = None,
) -> EvalResults:
    """Score `model`, which may also be the URL of an OpenAI-compatible server, on one task or
    several.

    A task is a name of eval/tasks or a YAML file; limit: so many of its problems; repeats: replies
    per problem. baseline: a model, or the
    `out` folder of an earlier run, to compare with; a loss of `margin` (0.01: one point) counts as
    lost. out: the folder for samples and report, in which an interrupted run resumes. temperature,
    top_p and max_tokens replace those of the protocol (r1, evalscope, lm-eval).
    allow_code_exec: run programs that the model wrote, in the sandbox. concurrency: prompts in a
    batch, or requests in flight. cache: int8 or fp8 keeps keys and values of a model that is loaded
    here in 8 bits. Of a server: timeout, the longest wait for the next piece of a reply in seconds;
    retries, further tries of a request; model_revision, what it serves if it does not say so;
    trust_kept, reuse replies in `out` without asking whether it is still the same model.
    """
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    folder = Path(out) if out is not None else None
    against = str(baseline) if baseline is not None else None
    options: dict[str, Any] = {
        "data_dir": Path(data_dir) if data_dir is not None else None,
        "limit": limit,
        "repeats": repeats,
    }
    options |= {
        "protocol": protocol,
        "baseline": against,
        "out": folder,
        "seed": seed,
        "margin": margin,
        "concurrency": concurrency,
    }
    options |= {
        "generation": {name: value for name, value in given.items() if value is not None},
        "allow_code_exec": allow_code_exec,
    }
    options |= {
        "model_name": served_model,
        "api_key": api_key,
        "model_revision": model_revision,
        "trust_kept": trust_kept,
    }
    options |= {
        "timeout_s": timeout,
        "retries": retries,
        "device": device,
        "backend": backend,
        "cache": cache,
    }
    with results_folder(folder, str(model), against), _counting("replies") as show:
        progress = (
            None
            if show is None
            else lambda p: show(f"{p.model} {p.task} {p.stage}", p.done, p.total)
        )
        return run_evaluation(
            str(model),
            [tasks] if isinstance(tasks, str) else list(tasks),
            progress=progress,
            **options,
        )


def perplexity(
    model: str | Path,
    text: str | Path | None = None,
    *,
    baseline: str | Path | None = None,
    seq_len: int = 2048,
    stride: int | None = None,
    limit: int | None = None,
    sampled: str | None = None,
    data_dir: str | Path | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    served_model: str | None = None,
    api_key: str | None = None,
    device: str = "auto",
    backend: str = "auto",
    cache: str | None = None,
) -> Quality:
    """Perplexity over the documents of `text` (.txt, or .jsonl of {"text": ...}); with `baseline`
    also how far `model` is from it.

    seq_len: tokens of the longest document; longer ones are cut into pieces, or with `stride` slid
    over in windows that far apart. limit: the first documents, or problems, only. sampled: instead
    of a text, the task on whose prompts the baseline samples reasoning (at most `max_tokens`, with
    `seed`), read from `data_dir`; one of the two models may then be the URL of a server. cache:
    int8 or fp8 lets `model` attend to keys and values, or latents, in 8 bits, and the baseline not.
    """
    against = str(baseline) if baseline is not None else None
    options: dict[str, Any] = {
        "seq_len": seq_len,
        "stride": stride,
        "limit": limit,
        "sampled": sampled,
        "max_tokens": max_tokens,
    }
    options |= {
        "data_dir": Path(data_dir) if data_dir is not None else None,
        "seed": seed,
        "device": device,
        "backend": backend,
    }
    options |= {"cache": cache, "served_model": served_model, "api_key": api_key}
    with _counting(f"tokens through {model}") as show:
        progress = None if show is None else lambda p: show(p.stage, p.done, p.total)
        return measure(
            str(model),
            Path(text) if text is not None else None,
            baseline=against,
            progress=progress,
            **options,
        )


@contextmanager
def _listening(name: str, on_event: OnEvent | None) -> Iterator[OnEvent]:
    """Who is told of a quantization or conversion: the caller's function, else a line where
    somebody looks."""
    if on_event is not None or not is_interactive():
        yield on_event or ignore_event
        return
    with ProgressLine(name) as meter:

        def show(event: Event) -> None:
            if isinstance(event, Progress):
                meter.show(event.share, event.unit, found=event.found)

        yield show


@contextmanager
def _counting(name: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """Who is told how many of a stage's things are done: a line for each stage where somebody
    looks."""
    if not is_interactive():
        yield None
        return
    with ExitStack() as shown:
        meters: dict[str, ProgressLine] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in meters:
                meters[stage] = shown.enter_context(ProgressLine(f"{name}, {stage}"))
            meters[stage].show(done / max(total, 1), f"{done:,} of {total:,}")

        yield show


def _asked(
    scheme: str | Scheme | None,
    recipe: str | Path | Recipe | None,
    mixture: Mixture,
    *,
    prune: str | float | None,
    **given: int | None,
) -> tuple[Scheme, Recipe]:
    """The scheme that is named, the recipe's, or that of mixtures; and the recipe, or the scheme's
    own, with what is given."""
    found = load_recipe(str(recipe)) if isinstance(recipe, str | Path) else recipe
    if scheme is None and found is None and not mixture.words():
        raise QuantkitError("no scheme is named", "give one, or a recipe or a mixture")
    named = scheme if scheme is not None else found.scheme if found is not None else "awq-w4a16"
    chosen = find_scheme(named) if isinstance(named, str) else named
    if found is None:  # a scheme that is not one of quantkit's has no recipe of its own
        registered = chosen.name in SCHEMES
        found = (
            load_recipe(chosen.name)
            if registered
            else Recipe.model_validate({"scheme": chosen.name})
        )
    share = parse_share(prune) if isinstance(prune, str) else prune
    return chosen, found.with_given(prune=share, **given)
