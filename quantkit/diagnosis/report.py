"""The findings as one self-contained HTML page."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from quantkit import __version__
from quantkit.common.atomic_write import write_atomic

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ verdict }}: {{ model }}</title>
<style>
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 60em; color: #222 }
h1 span { padding: 0 .4em; color: #fff; background: {{ colours[verdict] }} }
section { border-left: 4px solid #bbb; margin: 1em 0; padding: 0 1em }
section.error { border-color: #b3261e } section.warning { border-color: #c7761a }
code { overflow-wrap: anywhere } .remedy { color: #1f5fa8 } footer { color: #888 }
</style></head><body>
<h1><span>{{ verdict }}</span> {{ model }}</h1>
{% if not findings %}<p>Nothing was found.</p>{% endif %}
{% for finding in findings %}
<section class="{{ finding.severity }}"><h2>{{ finding.severity }}: {{ finding.name }}</h2>
<p><code>{{ finding.where }}</code></p><p>{{ finding.evidence }}</p><p class="remedy">{{
finding.remedy }}</p></section> {% endfor %}
<footer>quantkit {{ version }} check</footer></body></html>
"""
_COLOURS = {"good": "#2e7d32", "doubtful": "#c7761a", "bad": "#b3261e"}


def write_report(path: Path, model: str, about: dict[str, Any]) -> None:
    """about: verdict and findings, as DiagnosisFindings.to_json has them. Raises QuantkitError
    where the page cannot be written."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(_PAGE).render(
        model=model,
        colours=_COLOURS,
        version=__version__,
        verdict=about["verdict"],
        findings=about["findings"],
    )
    write_atomic(path, page)
