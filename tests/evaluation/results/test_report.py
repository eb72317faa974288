import json
from html.parser import HTMLParser

import pytest
from replay_server import ReplayServer

from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.results.report import evalscope_report
from quantkit.evaluation.run import run_evaluation

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Balance(HTMLParser):
    """Every element closed in order; collects addresses that a page would load."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.loads = []

    def handle_starttag(self, tag, attrs):
        named = [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.loads += [one for one in named if not one.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """AIME-like problems, one lost against the baseline, with a hostile text in a reply."""
    place = tmp_path_factory.mktemp("report")
    rows = [
        {"id": f"p{n}", "problem": f"What is {n} < {n + 1}?", "answer": str(n)} for n in range(6)
    ]
    (place / "aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def good(question, body):
        return f"</think>\\boxed{{{question.split()[2]}}}"

    def worse(question, body):
        return (
            "<script>alert(1)</script></think>\\boxed{77}"
            if question.startswith("What is 3")
            else good(question, body)
        )

    with (
        ReplayServer(good, models=("source",)) as source,
        ReplayServer(worse, models=("quantized",)) as quantized,
    ):
        results = run_evaluation(
            quantized.url,
            ["aime24"],
            EvaluateOptions(
                data_dir=place,
                repeats=2,
                baseline=source.url,
                out=place / "out",
                format="evalscope",
            ),
        )
    return results, place / "out"


def test_the_page_is_whole_self_contained_and_escaped(run):
    _, out = run
    page = (out / "report.html").read_text()
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.loads == []
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<svg") == 4


def test_the_page_says_what_matters(run):
    _, out = run
    page = (out / "report.html").read_text()
    assert "cannot tell: -16.7 points" in page
    assert "93.33" in page
    assert "8 x Ascend 910B1, TP8" in page
    assert "Not measured here" in page
    failure = page[page.index("<b>p3</b>") :]
    assert failure.index("answered 77") < failure.index(
        "source</b>: right, in the requested format"
    )


def test_the_export_has_evalscopes_shape(run):
    results, out = run
    told = json.loads((out / "evalscope" / "reports" / "quantized" / "aime24.json").read_text())
    assert told == evalscope_report("quantized", results.tasks["aime24"])
    accuracy, best = told["metrics"]
    assert (told["schema_version"], told["name"], told["num"]) == (2, "quantized@aime24", 12)
    said = {"name": "accuracy", "aggregation": "mean", "dimensions": {}}
    assert accuracy["identity"] == told["primary_metric_identity"] == said
    assert accuracy["score"] == pytest.approx(0.8333)
    assert best["identity"]["dimensions"] == {"k": 2}
    done = told["execution_summary"]
    assert (done["requested"], done["succeeded"], done["errored"]) == (12, 12, 0)
