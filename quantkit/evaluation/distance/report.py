"""ppl.json and ppl.html: the figures, the table along the text, and the plots."""

import json
import math
from pathlib import Path

from quantkit import __version__
from quantkit.checkpoint.output_dir import check_results_folder
from quantkit.common.atomic_write import check_writable, make_folder, write_atomic
from quantkit.common.pages import render_page
from quantkit.common.plots import check_drawable
from quantkit.common.result import finite
from quantkit.evaluation.distance.quality import Quality
from quantkit.evaluation.results.folder import local_models

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def check_report(out: Path, *models: str | None) -> None:
    """Before hours of work: raise QuantkitError where the report cannot be written to `out`."""
    check_drawable()
    check_results_folder(out, local_models(models))
    make_folder(out)
    check_writable(out / "ppl.json", "--out")


def write_report(out: Path, model: str, baseline: str | None, quality: Quality) -> None:
    about = {"model": model, "baseline": baseline, "quantkit": __version__}
    write_atomic(out / "ppl.json", json.dumps(finite(about | quality.to_json()), indent=1) + "\n")
    drawable = math.isfinite(quality.ppl) and math.isfinite(quality.kl or 0.0)
    page = render_page(
        _TEMPLATE,
        {"share": _share},
        about=about,
        quality=quality,
        plots=quality.pictures() if drawable else [],
    )
    write_atomic(out / "ppl.html", page)


def _share(value: float | None) -> str:
    """In percent."""
    return "-" if value is None else f"{100 * value:.2f}"
