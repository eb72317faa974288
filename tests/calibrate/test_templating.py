"""Conversations as a model's template writes them: thoughts are kept, refusals are got round, base
models get plain text."""

import json

from refused import refused

from quantkit.calibrate.documents import Document, Templating, plain_text, read_document
from quantkit.common.assets import calibration_text
from quantkit.tokenizer.chat import ChatTemplate, ChatTokenizer

THOUGHT = read_document(
    {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "reasoning_content": "easy", "content": "4"},
        ]
    }
)
CALLED = read_document(
    {
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "messages": [
            {"role": "system", "content": "Be exact."},
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
            },
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "It is 4."},
        ],
    }
)


def templating(checkpoint, template):
    tokenizer = ChatTokenizer(checkpoint)
    tokenizer.templates = {"default": ChatTemplate(template, "here")} if template else {}
    return Templating(tokenizer)


def test_a_thought_that_the_template_drops_is_put_behind_the_prompt(tiny_checkpoint):
    """make_model's template is R1's: it cuts replies at </think>, and opens <think> itself."""
    text = Templating(ChatTokenizer(tiny_checkpoint)).text(THOUGHT)
    assert text.endswith(
        "<｜User｜>2+2?<｜Assistant｜><think>\neasy\n</think>\n\n4<｜end▁of▁sentence｜>"
    )
    tagged = [THOUGHT.messages[0], {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"}]
    assert (
        Templating(ChatTokenizer(tiny_checkpoint)).text(
            Document("messages", messages=tuple(tagged))
        )
        == text
    )


def test_a_thought_that_the_template_writes_is_left_to_it(tiny_checkpoint):
    writes = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    assert templating(tiny_checkpoint, writes).text(THOUGHT) == "[|2+2?][easy|4]"


def test_arguments_are_given_as_the_template_wants_them(tiny_checkpoint):
    body = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ ARGUMENTS }}{% endfor %}{{ "
        "m.content }};{% endfor %}"
    )
    as_object = templating(
        tiny_checkpoint, body.replace("ARGUMENTS", "c.function.arguments | tojson")
    )
    as_text = templating(
        tiny_checkpoint, body.replace("ARGUMENTS", "'```' + c.function.arguments + '```'")
    )
    assert as_object.text(CALLED) == 'Be exact.;2+2?;{"a": 2};4;It is 4.;'
    assert as_text.text(CALLED) == 'Be exact.;2+2?;```{"a": 2}```;4;It is 4.;'
    assert (as_object.simplified, as_text.simplified) == (0, 0)


def test_a_strict_template_gets_user_and_assistant_in_turn(tiny_checkpoint):
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
        "raise_exception('roles must alternate') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    found = templating(tiny_checkpoint, strict)
    assert found.text(CALLED).startswith("<user>Be exact.\n\n2+2?<assistant>")
    assert (found.simplified, "roles must alternate" in found.refusal) == (1, True)


def test_a_template_that_refuses_everything_is_told(tiny_checkpoint):
    with refused("not today"):
        templating(tiny_checkpoint, "{{ raise_exception('not today') }}").text(CALLED)


def test_a_base_model_gets_plain_text(tiny_checkpoint):
    assert templating(tiny_checkpoint, None).text(THOUGHT) == "2+2?\n\neasy\n\n4"
    assert "It is 4." in plain_text(CALLED)


def test_every_document_of_our_own_passes_a_strict_template(tiny_checkpoint):
    """Each is rendered whole: nothing of what is said is lost."""
    strict = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ "
        "raise_exception('who?') }}{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    found = templating(tiny_checkpoint, strict)
    for line in calibration_text().read_text(encoding="utf-8").splitlines():
        document = read_document(json.loads(line))
        text = found.text(document)
        assert all(one["content"].strip() in text for one in document.messages)
        assert "None" not in text or "None" in line
    assert found.simplified > 70
