"""Long requests hold nobody else, and what cannot fit is not tokenised."""

import asyncio
import json
import threading

import pytest
from engines import note
from refused import refused

from quantkit.checkpoint.hub import find_model
from quantkit.executor.server.intake import ApiError, Intake, Lanes, Limits
from quantkit.executor.server.service import QueueFull
from quantkit.tokenizer.chat import ChatTemplate, ChatTokenizer

LONG = 1 << 20


def test_short_requests_do_not_wait_behind_long_ones():
    async def main():
        lanes, held = Lanes(10), threading.Event()
        long = [asyncio.ensure_future(lanes.run(LONG, held.wait)) for _ in range(6)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(lanes.run(100, lambda: "short"), 30) == "short"
        assert not any(one.done() for one in long)
        held.set()
        assert await asyncio.gather(*long) == [True] * 6
        lanes.close()

    asyncio.run(main())


def test_who_left_is_not_read_and_places_are_limited():
    async def main():
        lanes, held = Lanes(2), threading.Event()
        read = []
        first = asyncio.ensure_future(lanes.run(LONG, held.wait))
        second = asyncio.ensure_future(lanes.run(LONG, lambda: read.append(2)))
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull):
            await lanes.run(100, lambda: None)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        held.set()
        await first
        await lanes.run(LONG, lambda: read.append(3))
        assert read == [3]
        lanes.close()

    asyncio.run(main())


@pytest.fixture
def tokenised(monkeypatch):
    lengths = []
    note(monkeypatch, ChatTokenizer, "_ids", lambda self, text, **_: lengths.append(len(text)))
    return lengths


@pytest.mark.parametrize("text", ["x" * 1_000_000, "word " * 300, "日" * 900])
def test_what_cannot_fit_is_not_tokenised(tiny_checkpoint, tokenised, text):
    intake = Intake(
        ChatTokenizer(tiny_checkpoint), "tiny", Limits(max_input=50), context=1024, max_choices=8
    )
    with pytest.raises(ApiError, match="at most 50 tokens"):
        intake.completions(json.dumps({"prompt": text}).encode())
    assert sum(tokenised) <= 8 * 50


def test_text_of_few_tokens_a_character_passes(tiny_checkpoint):
    tokenizer = ChatTokenizer(tiny_checkpoint)
    longest = max(tokenizer.tokenizer.get_vocab(), key=len)
    intake = Intake(tokenizer, "tiny", Limits(max_input=20), context=1024, max_choices=8)
    prepared = intake.completions(json.dumps({"prompt": longest * 18}).encode())
    assert len(prepared.choices[0][0]) <= 20
    assert len(longest) * 18 > 8 * 20, "the text is not long enough to be looked at twice"


def test_who_the_template_passes_over_is_refused():
    """tiny-r1's, as DeepSeek's, knows four roles; what another said was left out without a word."""
    intake = Intake(
        ChatTokenizer(find_model("tiny-r1")), "tiny", Limits(), context=1024, max_choices=8
    )
    asked = {
        "messages": [{"role": "alien", "content": " hear me "}, {"role": "user", "content": "x"}]
    }
    with refused(r"leaves out messages of role alien; use system, user, assistant or tool$"):
        intake.chat(json.dumps(asked).encode())
    intake.tokenizer.templates = {
        "default": ChatTemplate(
            "{% for m in messages %}{{ m.role }}: {{ m.content.strip() }}\n{% endfor %}", "here"
        )
    }
    assert intake.chat(json.dumps(asked).encode()).choices


def test_a_template_that_fails_refuses_the_request(tiny_checkpoint):
    tokenizer = ChatTokenizer(tiny_checkpoint)
    tokenizer.templates = {
        "default": ChatTemplate("{{ messages[0].content | length // 0 }}", "here")
    }
    intake = Intake(tokenizer, "tiny", Limits(), context=1024, max_choices=8)
    with pytest.raises(Exception, match=r"(?i)zero"):
        intake.chat(json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode())
    tokenizer.templates = {"default": ChatTemplate("{{ '\ud800' }}", "here")}
    with refused("holds half of a character"):
        intake.chat(json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode())
