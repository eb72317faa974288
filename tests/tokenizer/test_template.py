"""Chat templates that run for ever, grow without end, or do what they should not: told in one line,
and the next rendering works."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from damage import TEMPLATES
from refused import refused

from quantkit.tokenizer.chat import ChatTemplate

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
    "xxxxxxxx{% endfor",
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
    template = ChatTemplate("{% if tools %}" + loop + "{% endif %}hi", "here")
    for tools in (None, True, None):
        if tools:
            with refused("takes too long"):
                template.render(VARIABLES | {"tools": tools})
        else:
            assert template.render(VARIABLES) == "hi"


def test_time_is_counted_for_each_rendering():
    """A process that has served for long is not ended for what it did before."""
    template = ChatTemplate(
        "{% for i in range(60000) %}{% for j in range(4) %}{{ '' }}{% endfor %}{% endfor %}x",
        "here",
    )
    start = time.process_time()
    assert all(template.render(VARIABLES) == "x" for _ in range(20))
    assert time.process_time() - start < 5  # none of it in this process


def test_texts_are_their_threads_own_and_may_be_long():
    template = ChatTemplate("{{ messages[0].content }}", "here")
    texts = [f"text {number} " * (number * 50) for number in range(60)] + ["a line\n" * 400_000]
    with ThreadPoolExecutor(8) as pool:
        rendered = pool.map(lambda text: template.render({"messages": [{"content": text}]}), texts)
        assert list(rendered) == texts


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
