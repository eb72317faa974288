"""Results folders that anyone could hand over: each is read, or refused in one line; nothing is
written elsewhere, and no page can act."""

import re
import shutil
import time

import pytest
from hostile_results import changes
from sample_sizes import sized
from two_runs import write_runs

from quantkit import QuantkitError
from quantkit.evaluation.regrading import regrade
from quantkit.evaluation.results.baseline import compare_runs, write_page

CPU_S = 20.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


def _tree(folder):
    return {path for path in folder.rglob("*") if "hostile" not in path.parts}


def test_each_is_read_or_refused_in_one_line(runs):
    (runs / "outside").write_text("mine")
    hostile, faults, outcomes = runs / "hostile", [], {"read": 0, "refused": 0}
    before = _tree(runs.parent)
    for change in changes(20261129, sized(40, 200)):
        for action in ("regrade", "compare", "baseline"):
            shutil.rmtree(hostile, ignore_errors=True)
            shutil.copytree(runs / "good", hostile)
            name, started = change.apply(hostile), time.process_time()
            try:
                if action == "regrade":
                    regrade(hostile)
                else:
                    folders = [runs / "poor", hostile]
                    table = compare_runs(
                        folders if action == "compare" else folders[::-1], margin=0.01
                    )
                    write_page(hostile / "page", table)
                outcomes["read"] += 1
            except QuantkitError as error:
                outcomes["refused"] += 1
                if "\n" in str(error) or not str(error).isprintable():
                    faults.append((change, name, action, repr(error)))
            except Exception as error:
                faults.append((change, name, action, repr(error)))
            if time.process_time() - started > CPU_S:
                faults.append((change, name, action, "took too long"))
            for page in hostile.rglob("*.html") if hostile.exists() else ():
                text = page.read_text()
                if "<b>evil" in text or re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text):
                    faults.append((change, name, action, f"{page.name} can act"))
    assert not faults, "\n".join(map(str, [len(faults), *faults]))
    assert min(outcomes.values()) > 10, outcomes
    assert _tree(runs.parent) == before
    assert (runs / "outside").read_text() == "mine"
