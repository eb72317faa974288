"""Tool calls in five formats: read however the text is cut, and forced by grammars that take what
the models' templates write."""

import json
import random

import numpy as np
import pytest
from refused import refused

from quantkit.executor.sampling.grammar import Grammars
from quantkit.executor.server.stream_parser import ToolCallSplitter, joined
from quantkit.executor.server.tools.formats import (
    FORMATS,
    ToolTemplate,
    declared_tools,
    named_format,
    template_format,
)
from quantkit.executor.server.tools.parsers import takes_text
from quantkit.executor.server.tools.tool_choice import calls_grammar
from quantkit.tokenizer.chat import ChatTemplate, ChatTokenizer

TOOLS = json.loads("""[
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}
        }}}},
    {"type": "function", "function": {"name": "now"}}
]""")
ARGUMENTS = '{"city": "Köln {\\"x\\"}", "days": 3}'
# As each model's own chat template writes them.
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln "
    '{"x"}\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
}


def use(choice="auto", parallel=True, tools=TOOLS):
    return declared_tools(tools, choice, parallel)


def read(name, pieces, asked):
    splitter = ToolCallSplitter(named_format(name), asked)
    found = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    deltas = [call for _, calls in found for call in calls]
    for index in {call.index for call in deltas}:
        named = [call.name is not None for call in deltas if call.index == index]
        assert named == [True] + [False] * (len(named) - 1), "a call is named once, first"
    return "".join(said for said, _ in found), joined(deltas)


def cut(text, draw):
    places = sorted(draw.sample(range(1, len(text)), draw.randint(1, min(len(text) - 1, 40))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)])]


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_however_the_text_is_cut(name):
    text, draw = f"Let me look.\n{WRITTEN[name]}\n", random.Random(name)
    for pieces in [[text], list(text), *(cut(text, draw) for _ in range(200))]:
        said, calls = read(name, pieces, use())
        assert said == "Let me look."
        assert [(one.name, json.loads(one.arguments)) for one in calls] == [
            ("get_weather", json.loads(ARGUMENTS)),
            ("now", {}),
        ]
        assert [one.id for one in calls] == (
            ["functions.get_weather:0", "functions.now:1"]
            if name == "kimi_k2"
            else [one.id for one in calls]
        )
    assert len({one.id for one in calls}) == 2
    only = read(name, [text], use(parallel=False))[1]
    assert [one.name for one in only] == ["get_weather"]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_only_looks_like_a_call_is_said(name):
    for text in ("a < b, <tool and <｜tool and <|tool_ \n\n", "  two  words \n"):
        assert read(name, list(text), use()) == (text, [])
    call = named_format(name).call
    text = WRITTEN[name].partition(call[0])[0] + call[0] + "nothing" + call[1]
    said, calls = read(name, list(text), use())
    assert calls == []
    assert said == f"{call[0]}nothing{call[1]}"


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_that_is_cut_keeps_what_was_called(name):
    begin = WRITTEN[name].partition("Köln")[0] + "Köln"
    _, calls = read(name, list(begin), use())
    assert [one.name for one in calls] == ["get_weather"]


def test_hermes_in_another_order_and_as_text():
    turned = '<tool_call>{"arguments": {"a": "}"}, "name": "now"}</tool_call> then'
    assert [(one.name, one.arguments) for one in read("hermes", list(turned), use())[1]] == [
        ("now", '{"a": "}"}')
    ]
    assert read("hermes", list(turned), use())[0] == "then"
    quoted = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert [(one.name, one.arguments) for one in read("hermes", list(quoted), use())[1]] == [
        ("now", '{"a": 1}')
    ]


def test_which_parameters_are_text():
    text = """
        {"type": "string"} | {"anyOf": [{"type": "integer"}, {"type": "string"}]}
        | {"enum": ["a", 2]} | {} | null"""
    other = """{"type": ["integer", "null"]} | {"enum": [1, 2]} | {"$ref": "#/x"}"""
    for schemas, expected in ((text, True), (other, False)):
        for schema in map(json.loads, schemas.split("|")):
            assert takes_text(schema) is expected, schema


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return ChatTokenizer(tiny_checkpoint)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_forced_grammar_is_what_the_template_writes(name, tokenizer):
    grammars = Grammars(tokenizer.tokenizer, 320, tokenizer.eos_ids)

    def taken(text, asked, answer=None):
        """Characters of `text` that the grammar lets an answer begin with."""
        grammar = calls_grammar(named_format(name), asked, tokenizer.tokenizer, answer)
        guide, count = grammars.guide(grammar, None), 0
        executor, bits = guide.new_executor(1), np.full((1, guide.words), -1, dtype=np.int32)
        for character in text:
            for token in tokenizer.tokenizer.encode(character, add_special_tokens=False).ids:
                guide.write(executor, bits, 0, [])
                if not bits[0, token >> 5] >> (token & 31) & 1:
                    return count
                guide.advance(token)
            count += 1
        return count

    text = WRITTEN[name]
    second = text.index(named_format(name).call[0], text.index("get_weather"))
    assert taken(text, use("required")) == len(text)
    assert taken(f"x{text}", use("required")) == 0
    for once in (use("required", parallel=False), use(function(name="get_weather"))):
        assert taken(text, once) < second + len(named_format(name).call[0])
    assert taken(text, use(function(name="now"))) < text.index("get_weather") + 3
    assert taken(text, use(), {"type": "object"}) == len(text)
    assert taken('{"a": 1}', use(), {"type": "object"}) == 8
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    assert taken(f"Well, <t {text}", use(tools=strict)) == len(text) + len("Well, <t ")
    spoilt = text.replace('"days": 3', '"days": x').replace("\n3\n", "\nx\n")
    assert taken(spoilt, use(tools=strict)) == next(
        place for place, (one, other) in enumerate(zip(spoilt, text)) if one != other
    )
    assert calls_grammar(named_format(name), use(), tokenizer.tokenizer, None) is None, (
        "nothing is forced"
    )


_CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments "
    "%}HERE{% endfor %}{% endfor %}"
)
TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>" + _CALLS.replace("HERE", "{{ a | tojson }}"),
    "qwen3_coder": "{{ tools }}<function=<parameter="
    + _CALLS.replace("HERE", "{% for k, v in a | items %}{{ k }}{% endfor %}"),
    "deepseek_v3": "{{ tools }}<｜tool▁calls▁begin｜>"
    + _CALLS.replace("HERE", "{{ '```json' + a }}"),
    "deepseek_v31": "{{ tools }}<｜tool▁calls▁begin｜>" + _CALLS.replace("HERE", "{{ '' + a }}"),
    "kimi_k2": "{{ tools }}<|tool_calls_section_begin|>"
    + _CALLS.replace("HERE", "{{ a if a is string else a | tojson }}"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_its_format_and_how_it_wants_arguments(name, tiny_checkpoint):
    tokenizer = ChatTokenizer(tiny_checkpoint)
    tokenizer.templates = {"default": ChatTemplate(TEMPLATES[name], "here")}
    template = ToolTemplate(tokenizer)
    assert template.form.name == name
    call = function(name="now", arguments='{"a": 1}')
    (message,) = template.messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    wanted = '{"a": 1}' if name.startswith("deepseek") else {"a": 1}
    assert message["tool_calls"][0]["function"]["arguments"] == wanted
    assert ToolTemplate(tokenizer, "kimi_k2").form.name == "kimi_k2"


def test_a_template_without_tools_and_names_that_are_none(tokenizer):
    with refused("shows it no tools"):
        _ = ToolTemplate(tokenizer).form
    with refused("there is no tool parser 'x'; use one of qwen3_coder, hermes"):
        ToolTemplate(tokenizer, "x")
    assert template_format("nothing") is None
    assert {one.name for one in FORMATS} == set(WRITTEN)


def function(**about):
    return {"type": "function", "function": about}


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        (TOOLS * 65, "auto", "tools holds 130"),
        ([TOOLS[0], TOOLS[0]], "auto", "get_weather twice"),
        ([function(name="a b")], "auto", "tools.0.function.name"),
        ([function(name="a", parameters=[1])], "auto", "tools.0.function.parameters"),
        ([{"type": "code_interpreter"}], "auto", "tools.0 is no function"),
        (TOOLS, "sometimes", "'sometimes' is not supported"),
        (TOOLS, function(name="other"), "'other', which tools does not hold"),
        (TOOLS, {"type": "allowed_tools"}, "is not supported"),
        ([], "required", "tools holds none"),
    ],
)
def test_tools_are_checked(tools, choice, said):
    with refused(said):
        declared_tools(tools, choice, True)


def test_a_tool_may_have_no_parameters():
    found = declared_tools([function(name="a", parameters=[])], "auto", True).tools[0]
    assert found.parameters["properties"] == {}
