"""The playground: what it says of tokens is what the engines compute, its page shows it, and
nothing a model writes is markup."""

import json
import math
import time
from contextlib import contextmanager

import browser
import httpx
import pytest
import scripted_model
import torch
from playground_server import served
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.playground.play import Playground, PlayModel, divergence

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
CHAIN = ["<|answer|>", "One", HOSTILE, "<b>two</b>", " three", " four"]
OTHER = [*CHAIN[:3], " four", " three", "<b>two</b>"]
needs_browser = pytest.mark.skipif(
    browser.PROGRAM is None, reason="there is no Chromium on this machine"
)


def opened(*paths):
    return Playground.open([(path.name, path) for path in paths], device="cpu", context=512)


@pytest.fixture(scope="module")
def rounded(tiny_checkpoint, tiny_dense_checkpoint):
    """A random model in BF16, and the same in FP8."""
    return opened(tiny_dense_checkpoint, tiny_checkpoint)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return opened(
        *(
            scripted_model.write(folder / name, [chain])
            for name, chain in (("first", CHAIN), ("second", OTHER))
        )
    )


@pytest.fixture(scope="module")
def url(scripted):
    with served(scripted) as address:
        yield address


def told(playground, question, **options):
    events = []
    playground.play(question, **{"raw": True, "max_new_tokens": 12, **options}, send=events.append)
    return events


def test_probabilities_and_answers_are_the_engines(rounded):
    events = told(rounded, "What is 2+3?")
    done = [event for event in events if event["kind"] == "scored"]
    assert [event["side"] for event in done] == [0, 1]
    (at,) = (event["at"] for event in events if event["kind"] == "parted")
    ours, theirs = ([token["text"] for token in event["tokens"]] for event in done)
    assert ours[:at] == theirs[:at]
    assert ours[at] != theirs[at]
    ids = rounded.models[0].tokenizer.encode("What is 2+3?")
    for side, event in enumerate(done):
        assert "as" not in event, "rounding changed nothing: the test tests half"
        (answer,) = rounded.models[side].engine.generate([ids], SamplingParams(max_new_tokens=12))
        assert [token["text"] for token in event["tokens"]] == rounded.models[0].pieces(
            answer.token_ids
        )
        for number, model in enumerate(rounded.models):
            (read,) = model.engine.generate(
                [ids + answer.token_ids], SamplingParams(max_new_tokens=1, prompt_logprobs=0)
            )
            scores = [one.logprob for one in read.prompt_logprobs[len(ids) - 1 :]]
            apart = sorted(
                abs(math.log(token["p"][number]) - score)
                for token, score in zip(event["tokens"], scores, strict=True)
            )
            # In bfloat16 one token's experts may nearly tie, and a prompt be rounded otherwise than
            # steps.
            assert apart[-2] < 0.1, apart
        assert all(token["kl"] > 0 for token in event["tokens"])
        changed = torch.tensor(event["experts"]["changed"])
        assert event["experts"]["layers"] == [1, 2]
        assert changed.shape == (2, len(event["tokens"]))
        assert 0 < changed.mean() < 0.6


def test_a_model_equals_itself(tiny_checkpoint):
    events = told(opened(tiny_checkpoint, tiny_checkpoint), "What is 2+3?", max_new_tokens=5)
    scored = [event for event in events if event["kind"] == "scored"]
    assert [token["kl"] for token in scored[0]["tokens"]] == [0.0] * 5
    assert sum(map(sum, scored[0]["experts"]["changed"])) == 0
    assert scored[1] == {"kind": "scored", "side": 1, "as": 0}
    assert {"kind": "parted", "at": None} in events


def test_divergence_by_its_formula():
    p, q = (torch.tensor(one).log() for one in ([0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.5, 0.0]))
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert divergence(p, q) == pytest.approx(expected, rel=1e-6)
    assert divergence(torch.tensor([1.0, 0.0]).log(), torch.tensor([1.0, 0.0]).log()) == 0


def test_models_of_other_tokens_are_refused(tiny_checkpoint, scripted):
    engine = Engine.load(tiny_checkpoint, device="cpu", max_batch=1, max_model_len=128)
    with refused("have different tokenizers"):
        Playground([scripted.models[0], PlayModel("other", engine)])


def test_only_its_own_page_is_answered(url):
    body = json.dumps({"prompt": "a", "max_new_tokens": 2})
    for header, value, status in (
        ("Host", "evil.example", 403),
        ("Origin", "http://evil.example", 403),
        ("Content-Type", "text/plain", 400),
    ):
        headers = {"Content-Type": "application/json", header: value}
        assert httpx.post(f"{url}/play", content=body, headers=headers).status_code == status
    page = httpx.get(f"{url}/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "://" not in page.text.replace("http://127.0.0.1", "")
    assert "innerHTML" not in httpx.get(f"{url}/page.js").text


def test_bad_questions_are_refused(url):
    for body, said in (
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "max_new_tokens": 2049}, "max_new_tokens"),
        ({"prompt": "a", "temperature": 1}, "temperature"),
        ({"prompt": "x" * 1_100_000}, "larger"),
    ):
        answer = httpx.post(f"{url}/play", json=body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]


def test_a_prompt_that_is_too_long_is_reported(url):
    (line,) = httpx.post(f"{url}/play", json={"prompt": "x" * 600, "raw": True}).text.splitlines()
    assert "the context holds 512" in json.loads(line)["message"]


def test_who_goes_stops_the_work(scripted, url):
    asked = {"prompt": "zzz", "raw": True, "max_new_tokens": 400}
    with httpx.stream("POST", f"{url}/play", json=asked) as answer:
        next(answer.iter_lines())
    until = time.monotonic() + 20
    while any(model.engine.has_work for model in scripted.models):
        assert time.monotonic() < until, "it continues after the client disconnected"
        time.sleep(0.02)
    assert (
        httpx.post(f"{url}/play", json={"prompt": "a", "max_new_tokens": 2}, timeout=30).status_code
        == 200
    )


@contextmanager
def page_at(address, **options):
    page = browser.Page(**options)
    try:
        page.open(address)
        yield page
    finally:
        page.close()


TOKENS = (
    "[...document.querySelectorAll('.side')].map(side => "
    "[...side.querySelectorAll('.token')].map(one => one.textContent))"
)


@needs_browser
def test_two_models_in_the_browser(url):
    with page_at(url, width=420, height=900, dark=True) as page:
        page.wait("document.querySelectorAll('.side').length === 2")
        page.value(
            "document.getElementById('prompt').value = 'count'; "
            "document.getElementById('go').click()"
        )
        page.wait("document.body.dataset.done")
        end = "<｜end▁of▁sentence｜>"
        assert page.value(TOKENS) == [[*CHAIN[1:], end], [*OTHER[1:], end]]
        assert (
            page.value("document.getElementById('status').textContent")
            == "the greedy outputs diverge at token 3"
        )
        marked = "[...document.querySelectorAll('.parted')].map(one => one.textContent)"
        assert page.value(marked) == [CHAIN[3], OTHER[3]]
        heats = page.value(
            "[...document.querySelector('.side').querySelectorAll('.token')].map(one => "
            "+one.style.getPropertyValue('--heat'))"
        )
        assert heats[2] == 1, "they are sure of different tokens there"
        assert max(heats[:2]) < 0.1
        page.value("document.querySelector('.parted').click()")
        assert "KL" in page.value("document.querySelector('.detail').textContent")
        assert page.value("document.querySelectorAll('canvas.strip').length") == 2
        assert page.value("document.querySelectorAll('.side img, .side b').length") == 0
        assert page.value("document.title") == "quantkit playground"
        assert page.value("document.documentElement.scrollWidth") == 420
        dark = page.value("getComputedStyle(document.body).backgroundColor")
        assert page.said == []
    with page_at(f"{url}/#most=2&prompt=count") as page:
        page.wait("document.body.dataset.done")
        assert page.value(TOKENS) == [CHAIN[1:3], OTHER[1:3]]
        assert page.value("document.getElementById('status').textContent") == "both wrote the same"
        assert page.value("getComputedStyle(document.body).backgroundColor") != dark
        assert page.said == []


@needs_browser
def test_one_model_in_the_browser(scripted):
    with (
        served(Playground(scripted.models[:1])) as url,
        page_at(f"{url}/#most=3&prompt=count") as page,
    ):
        page.wait("document.body.dataset.done")
        assert page.value(TOKENS) == [CHAIN[1:4]]
        assert (
            page.value("document.getElementById('legend-title').textContent")
            == "how unlikely each token was"
        )
        assert page.value("document.querySelectorAll('.mark, canvas').length") == 0
        page.value("document.getElementById('prompt').value = 'x'.repeat(5000)")
        page.value("delete document.body.dataset.done; document.getElementById('go').click()")
        page.wait("document.body.dataset.done")
        assert "the context holds 512" in page.value(
            "document.getElementById('status').textContent"
        )
        assert page.said == []
