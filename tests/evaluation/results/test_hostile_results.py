"""Results folders that anyone could hand over: each is read, or refused in one line; nothing is
written elsewhere, and no page can act."""

import itertools
import re
import shutil
import time

import pytest
from hostile_results import changes
from sample_sizes import sized
from two_runs import write_runs

from quantkit import QuantkitError
from quantkit.common.assets import builtin_model
from quantkit.evaluation.distance.replies import read_replies
from quantkit.evaluation.regrading import regrade
from quantkit.evaluation.results.baseline import compare_runs, write_page
from quantkit.tokenizer.chat import ChatTokenizer

CPU_S = 20.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


def _tree(folder):
    return {path for path in folder.rglob("*") if "hostile" not in path.parts}


def act(action, runs, hostile):
    if action == "regrade":
        regrade(hostile)
    elif action == "replies":
        read_replies(hostile, ChatTokenizer(builtin_model("tiny-r1")), None)
    else:
        folders = [runs / "poor", hostile]
        if action == "baseline":
            folders.reverse()
        write_page(hostile / "page", compare_runs(folders, margin=0.01))


def test_each_is_read_or_refused_in_one_line(runs):
    (runs / "outside").write_text("mine")
    hostile, faults, outcomes = runs / "hostile", [], {"read": 0, "refused": 0}
    before, actions = _tree(runs.parent), ("regrade", "replies", "compare", "baseline")
    for change, action in itertools.product(changes(20261129, sized(40, 200)), actions):
        shutil.rmtree(hostile, ignore_errors=True)
        shutil.copytree(runs / "good", hostile)
        told, started = (change, change.apply(hostile), action), time.process_time()
        try:
            act(action, runs, hostile)
            outcomes["read"] += 1
        except QuantkitError as error:
            outcomes["refused"] += 1
            if "\n" in str(error) or not str(error).isprintable():
                faults.append((*told, repr(error)))
        except Exception as error:
            faults.append((*told, repr(error)))
        if time.process_time() - started > CPU_S:
            faults.append((*told, "took too long"))
        for page in hostile.rglob("*.html"):
            text = page.read_text()
            if "<b>evil" in text or re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text):
                faults.append((*told, f"{page.name} can act"))
    assert not faults, "\n".join(map(str, [len(faults), *faults]))
    assert min(outcomes.values()) > 10, outcomes
    assert _tree(runs.parent) == before
    assert (runs / "outside").read_text() == "mine"
