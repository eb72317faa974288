"""KL beside a server: our own server over loopback, and one that tells nothing."""

import math
import shutil

import pytest
import torch
from edited import edited_tensor
from refused import refused
from running_server import Running, load

from quantkit.checkpoint.hub import find_model
from quantkit.common.assets import asset
from quantkit.evaluation.distance.documents import Window
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.distance.quality import Sums
from quantkit.evaluation.distance.replies import (
    TOP,
    ScoredReply,
    _ids_by_text,
    _scored_reply,
    add_reply,
    measure_endpoint,
)
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.options import PerplexityOptions
from quantkit.tokenizer.chat import ChatTokenizer


@pytest.fixture(scope="module")
def server():
    running = Running(load(find_model("tiny-r1")))
    yield running.url
    running.stop()


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """tiny-r1 with the last norm's gains smaller, so that it is less certain."""
    copy = shutil.copytree(find_model("tiny-r1"), tmp_path_factory.mktemp("changed") / "model")
    with edited_tensor(copy, "model.norm.weight") as gains:
        gains *= 0.3
    return copy


def compared(model, baseline):
    options = PerplexityOptions(baseline=baseline, sampled="tiny-math", limit=3, max_tokens=40)
    return measure(model, options=options)


def test_a_model_is_no_distance_from_itself_behind_a_server(server):
    told = compared(server, "tiny-r1")
    assert told.documents == 3
    assert told.tokens > 60
    assert told.kl < 1e-4
    assert told.top1_agree > 0.99
    assert told.ppl == pytest.approx(told.baseline_ppl, rel=1e-3)
    assert 0.99 < told.named_share <= 1


def test_which_side_the_server_is(server, changed):
    as_baseline, as_model = compared(str(changed), server), compared(server, str(changed))
    assert as_baseline.baseline_ppl == pytest.approx(as_model.ppl)
    assert as_baseline.ppl == pytest.approx(as_model.baseline_ppl)
    assert as_baseline.kl > 1e-3
    assert as_model.kl > 1e-3
    assert as_baseline.kl != as_model.kl


@pytest.mark.parametrize("has_bytes", [True, False])
def test_parts_of_characters_are_known_by_their_bytes(tiny_checkpoint, has_bytes):
    """Their text is one and the same; a server that does not say their bytes ends the reply."""
    tokenizer = ChatTokenizer(tiny_checkpoint)
    ids = tokenizer.encode("aé😀b")
    entries = [
        {
            "token": tokenizer.token_text(token),
            "bytes": list(tokenizer.token_bytes(token)) if has_bytes else None,
            "logprob": -1.0,
        }
        for token in ids
    ]
    places = tuple({**entry, "top_logprobs": entries} for entry in entries)
    scored = _scored_reply(ModelReply(0, logprobs=places), [1], _ids_by_text(tokenizer))
    assert scored.window.ids.tolist() == [1, *(ids if has_bytes else ids[:1])]
    assert set(scored.top[0]) == (set(ids) if has_bytes else {ids[0], ids[-1]})


def test_the_divergence_is_a_lower_bound_that_named_tokens_close():
    logs = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    theirs = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    exact = (theirs.exp() * (theirs - logs)).sum(-1).tolist()
    window = Window(torch.tensor([0, 1, 2, 3, 4]), 1)
    found = {}
    for named in (2, TOP, 50):
        own = [float(theirs[row, row + 1]) for row in range(4)]
        top = [
            dict(zip(row.topk(named).indices.tolist(), row.topk(named).values.tolist()))
            | {number + 1: own[number]}
            for number, row in enumerate(theirs)
        ]
        sums = Sums()
        add_reply(sums, ScoredReply(window, top, own), logs, is_baseline=True)
        (found[named],) = (one["kl"].tolist() for one in sums.documents)
    for row in range(4):
        assert found[2][row] <= found[TOP][row] + 1e-6
        assert found[TOP][row] <= exact[row] + 1e-6
        assert math.isclose(found[50][row], exact[row], rel_tol=1e-3, abs_tol=2e-5)


def test_what_cannot_be_compared_is_told(server, tiny_checkpoint):
    with refused("two servers cannot"):
        measure(server, options=PerplexityOptions(baseline=server, sampled="tiny-math"))
    with refused("replies only; give --sampled TASK"):
        measure(server, asset("eval", "data", "tiny-heldout.jsonl"))
    with refused("applies to a model loaded here"):
        measure(
            server, options=PerplexityOptions(baseline="tiny-r1", sampled="tiny-math", cache="int8")
        )
    with refused(r"1 of 1 replies of .* cannot be compared"):
        measure_endpoint(
            str(tiny_checkpoint),
            server,
            PerplexityOptions(sampled="tiny-math", limit=1, max_tokens=8),
            is_baseline=False,
        )
