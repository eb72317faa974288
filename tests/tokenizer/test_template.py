"""Chat templates that run for ever, grow without end, or do what they should not: told in one line,
and the next rendering works."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from damage import TEMPLATES
from refused import refused

from quantkit.tokenizer.template import ChatTemplate

VARIABLES = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": None,
    "bos_token": "<s>",
    "add_generation_prompt": True,
}
_NO_TEXT = (
    "1 / 0",
    "raise_exception",
    "macro f",
    "range(10**9)",
    "range(99999) %}{% for",
    "10**10",
    "ns.s + ns.s",
    "__mro__",
)


@pytest.mark.parametrize(
    "source", [one for one in TEMPLATES if any(part in one for part in _NO_TEXT)]
)
def test_a_template_that_has_no_end_is_refused(source):
    template = ChatTemplate(source, "chat_template.jinja")
    with refused(r"the chat template in chat_template\.jinja") as told:
        template.render(VARIABLES)
    assert "\n" not in str(told.value)


def test_rendering_goes_on_after_one_that_had_to_be_ended():
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    endless = "{% if messages | length > 1 %}" + loop + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(endless, "here")
    assert template.render(VARIABLES) == "hi"
    with refused("takes too long"):
        template.render({**VARIABLES, "messages": VARIABLES["messages"] * 2})
    assert template.render(VARIABLES) == "hi"


def test_time_is_counted_for_each_rendering():
    """A process that has served for long is not ended for what it did before."""
    template = ChatTemplate(
        "{% for i in range(60000) %}{% for j in range(4) %}{{ '' }}{% endfor %}{% endfor %}x",
        "here",
    )
    start = time.process_time()
    assert all(template.render(VARIABLES) == "x" for _ in range(30))
    assert time.process_time() - start < 5  # none of it in this process


def test_threads_get_their_own_texts():
    template = ChatTemplate("{{ messages[0].content }}", "here")
    texts = [f"text {number} " * (number * 50) for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        rendered = pool.map(
            lambda text: template.render({"messages": [{"role": "user", "content": text}]}), texts
        )
        assert list(rendered) == texts


def test_long_conversations_pass():
    text = "a line of text\n" * 400_000
    assert (
        ChatTemplate("{{ messages[0].content }}", "here").render({"messages": [{"content": text}]})
        == text
    )


def test_what_is_no_json_is_refused():
    with refused("cannot be written as JSON"):
        ChatTemplate("x", "here").render({"messages": [{"content": {1, 2}}]})


def test_a_fork_has_a_process_of_its_own():
    template = ChatTemplate("{{ messages[0].content }}", "here")
    assert template.render(VARIABLES) == "hi"
    child = os.fork()
    if child == 0:
        os._exit(0 if template.render({"messages": [{"content": "child"}]}) == "child" else 1)
    assert template.render(VARIABLES) == "hi"
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(VARIABLES) == "hi"
