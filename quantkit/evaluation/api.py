"""The Python API for accuracy: `evaluate` and `perplexity` (docs/python.md)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quantkit.common.options import documented, read_options
from quantkit.common.progress import ProgressLine, is_interactive
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.distance.quality import Quality
from quantkit.evaluation.options import EvaluateOptions, PerplexityOptions
from quantkit.evaluation.results.folder import results_folder
from quantkit.evaluation.results.task_results import EvalResults
from quantkit.evaluation.run import run_evaluation


@documented(EvaluateOptions)
def evaluate(
    model: str | Path,
    tasks: str | Sequence[str],
    *,
    options: EvaluateOptions | None = None,
    **keywords: Any,
) -> EvalResults:
    """Score `model`, which may also be the URL of an OpenAI-compatible server, on one task or
    several. A task is a name from eval/tasks or a YAML file."""
    options = read_options(EvaluateOptions, options, keywords)
    baseline = None if options.baseline is None else str(options.baseline)
    with results_folder(options.out, str(model), baseline), _counting("replies") as show:
        progress = (
            None
            if show is None
            else lambda p: show(f"{p.model} {p.task} {p.stage}", p.done, p.total, p.share)
        )
        return run_evaluation(
            str(model),
            [tasks] if isinstance(tasks, str) else list(tasks),
            options,
            progress=progress,
        )


@documented(PerplexityOptions)
def perplexity(
    model: str | Path,
    text: str | Path | None = None,
    *,
    options: PerplexityOptions | None = None,
    **keywords: Any,
) -> Quality:
    """Perplexity over the documents of `text` (.txt, .jsonl of {"text": ...}, or the output folder
    of `evaluate`, whose replies are scored); with a baseline also how far `model` is from it. If a
    task is `sampled`, one of the two may be the URL of a server."""
    options = read_options(PerplexityOptions, options, keywords)
    with _counting(f"tokens through {model}") as show:
        progress = None if show is None else lambda p: show(p.stage, p.done, p.total)
        return measure(
            str(model), Path(text) if text is not None else None, options, progress=progress
        )


@contextmanager
def _counting(name: str) -> Iterator[Callable[..., None] | None]:
    """A function that shows (stage, done, total, share of the work), one line per stage; None
    outside interactive sessions."""
    if not is_interactive():
        yield None
        return
    with ExitStack() as shown:
        meters: dict[str, ProgressLine] = {}

        def show(stage: str, done: int, total: int, share: float | None = None) -> None:
            if stage not in meters:
                meters[stage] = shown.enter_context(ProgressLine(f"{name}, {stage}"))
            part = done / max(total, 1) if share is None else share
            meters[stage].show(part, f"{done:,} of {total:,}")

        yield show
