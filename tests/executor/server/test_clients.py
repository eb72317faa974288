"""What the openai client offers beyond plain chats: tools, schemas, responses, echo; the model says
what is written here."""

import json
from typing import Literal

import httpx
import openai
import pytest
import scripted_model
from pydantic import BaseModel
from running_server import KEY, Running, load

from quantkit import __version__
from quantkit.executor.sampling.params import SamplingParams

CALL = [
    "<|call|>",
    "Let me look.",
    "\n<tool_call>\n",
    '{"name": "get_weather", ',
    '"arguments": {"city": "Os',
    'lo"}}',
    "\n</tool_call>",
]
ANSWER = ["<|answer|>", "It is", " sunny", " in Oslo."]
THOUGHT = ["<|think|>", "<think>", "Well.\n", "</think>"]
TEMPLATE = scripted_model.TEMPLATE.replace(
    "'<|answer|>' if", "'<|think|><think>' if think else '<|answer|>' if"
)
LOGGED = []

WEATHER = json.loads("""{
    "type": "function", "function": {
        "name": "get_weather", "description": "The weather of a city.", "parameters": {
            "type": "object", "properties": {
                "city": {"enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9}
            }, "required": ["city", "days"], "additionalProperties": false
        }}}""")
NOW = {"type": "function", "function": {"name": "now"}}
QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    warm: bool


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return scripted_model.write(
        tmp_path_factory.mktemp("models") / "scripted", [CALL, ANSWER, THOUGHT], TEMPLATE
    )


@pytest.fixture(scope="module")
def running(path):
    server = Running(load(path), api_key=KEY, log=LOGGED.append)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(running):
    return running.client()


@pytest.fixture(scope="module")
def peer(path):
    return load(path)


def streamed(chunks):
    """Text, [id, name, arguments] of each call, and why it ended."""
    text, calls, reason = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls)
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments
    return text, calls, reason


def test_a_tool_is_called_and_its_result_answered(client):
    """The openai client's own example: call, run, answer."""
    asked = {"model": "tiny", "tools": [WEATHER, NOW], "temperature": 0}
    first = client.chat.completions.create(messages=QUESTION, **asked).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me look."
    (call,) = first.message.tool_calls or []
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Oslo"},
    )
    chunks = client.chat.completions.create(messages=QUESTION, stream=True, **asked)
    text, calls, reason = streamed(chunks)
    assert (text, reason) == ("Let me look.", "tool_calls")
    assert [one[1:] for one in calls] == [["get_weather", call.function.arguments]]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    told = [*QUESTION, first.message, result]
    second = client.chat.completions.create(messages=told, **asked).choices[0]
    assert (second.finish_reason, second.message.tool_calls) == ("stop", None)
    assert second.message.content == "It is sunny in Oslo."
    silent = client.chat.completions.create(messages=QUESTION, tool_choice="none", **asked)
    assert silent.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is(client, stream):
    asked = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER, NOW]}
    asked |= {"temperature": 1.3, "seed": 5, "parallel_tool_calls": False}

    def called(choice):
        made = client.chat.completions.create(**asked, tool_choice=choice, stream=stream)
        if stream:
            _, found, reason = streamed(made)
            ((_, name, arguments),) = found
        else:
            ((call,), reason) = made.choices[0].message.tool_calls, made.choices[0].finish_reason
            name, arguments = call.function.name, call.function.arguments
            assert made.choices[0].message.content is None
        assert reason == "tool_calls"
        return name, json.loads(arguments)

    name, arguments = called({"type": "function", "function": {"name": "get_weather"}})
    assert (name, arguments["city"] in ("Oslo", "Rome")) == ("get_weather", True)
    assert 1 <= arguments["days"] <= 9
    assert called("required")[0] in ("get_weather", "now")


def test_strict_arguments_fit_although_the_model_calls_of_itself(client):
    """What it would say lacks `days`."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    asked = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    made = client.chat.completions.create(tools=[strict], parallel_tool_calls=False, **asked)
    (call,) = made.choices[0].message.tool_calls or []
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


def test_an_answer_fits_a_schema(client):
    asked = {"model": "tiny", "messages": QUESTION, "temperature": 1.0, "seed": 3}

    def parsed_message(**more):
        made = client.chat.completions.parse(response_format=Weather, **asked, **more)
        return made.choices[0].message

    parsed = parsed_message().parsed
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(response_format=Weather, **asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    other = parsed_message(tools=[openai.pydantic_function_tool(Weather)])
    assert (other.parsed is None) != (not other.tool_calls), "a call, or an answer that fits"
    chosen = client.chat.completions.create(**asked, extra_body={"guided_choice": ["yes", "no"]})
    assert chosen.choices[0].message.content in ("yes", "no")
    form = {"structured_outputs": {"regex": "x{4}"}}
    text = client.completions.create(model="tiny", prompt="a", max_tokens=30, extra_body=form)
    assert text.choices[0].text == "xxxx"


def test_a_schema_holds_behind_the_thoughts(client):
    asked = {
        "model": "tiny",
        "messages": QUESTION,
        "temperature": 0,
        "extra_body": {"chat_template_kwargs": {"think": True}},
    }
    message = client.chat.completions.parse(response_format=Weather, **asked).choices[0].message
    assert message.reasoning_content == "Well."
    assert isinstance(message.parsed, Weather)


def test_responses(client):
    asked = {"model": "tiny", "temperature": 0, "input": "How is the weather?"}
    whole = client.responses.create(instructions="Be short.", **asked)
    assert (whole.status, whole.output_text) == ("completed", "It is sunny in Oslo.")
    assert whole.usage.output_tokens == len(ANSWER)
    events = list(client.responses.create(instructions="Be short.", stream=True, **asked))
    assert deltas(events, "output_text") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    cut = client.responses.create(max_output_tokens=2, **asked)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert ([item.status for item in whole.output], [item.status for item in cut.output]) == (
        ["completed"],
        ["incomplete"],
    )


def deltas(events, kind):
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


def test_responses_call_tools_think_and_fit_schemas(client):
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    asked = {"model": "tiny", "temperature": 0, "tools": [tool]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is the weather in Oslo?"}]}
    ]
    first = client.responses.create(input=items, **asked)
    assert [item.type for item in first.output] == ["message", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    events = list(client.responses.create(input=items, stream=True, **asked))
    assert deltas(events, "function_call_arguments") == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    done = [*items, *first.output, result]
    assert client.responses.create(input=done, **asked).output_text == "It is sunny in Oslo."
    asked = {"model": "tiny", "input": "Weather?", "temperature": 0}
    parsed = client.responses.parse(text_format=Weather, **asked)
    assert isinstance(parsed.output_parsed, Weather)


def post(running, path, **body):
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{running.url}/{path}", json=body, headers=headers)


@pytest.mark.parametrize(
    "case",
    [
        '{"previous_response_id": "resp_1"} -> previous_response_id is not supported',
        '{"reasoning": {"effort": "high"}} -> reasoning is not supported',
        '{"tools": [{"type": "web_search"}]} -> tools of type web_search',
        '{"input": [{"type": "item_reference", "id": "x"}]} -> item_reference',
        '{"input": [{"role": "user", "content": [{"type": "input_image"}]}]} -> input_image',
        '{"input": []} -> input',
        '{"text": {"verbosity": "low"}} -> text.verbosity is not supported',
        '{"max_output_tokens": 0} -> max_output_tokens',
    ],
)
def test_responses_refuse_by_name(running, case):
    change, said = case.split(" -> ")
    body = {"model": "tiny", "input": "x"} | json.loads(change)
    answer = post(running, "v1/responses", **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_echo_and_the_log_probabilities_of_prompts(client, peer):
    prompt = "It is sunny"
    ids = peer.tokenizer.encode(prompt)
    params = SamplingParams(max_new_tokens=1, logprobs=1, prompt_logprobs=1)
    (expected,) = peer.generate([ids], params)
    scores = [None, *(one.logprob for one in [*expected.prompt_logprobs, *expected.logprobs])]
    asked = {"model": "tiny", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    choice = client.completions.create(prompt=ids, **asked).choices[0]
    assert choice.text == prompt + expected.text
    assert choice.logprobs.token_logprobs == pytest.approx(scores, abs=1e-4)
    assert choice.logprobs.top_logprobs[0] is None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    chunks = [
        one.choices[0]
        for one in client.completions.create(prompt=prompt, stream=True, **asked)
        if one.choices
    ]
    assert "".join(one.text for one in chunks) == choice.text
    again = [score for one in chunks if one.logprobs for score in one.logprobs.token_logprobs or []]
    assert again == pytest.approx(scores, abs=1e-4)
    alone = client.completions.create(prompt=prompt, **{**asked, "max_tokens": 0})
    assert (alone.choices[0].text, alone.usage.completion_tokens) == (prompt, 0)
    assert len(alone.choices[0].logprobs.tokens or []) == len(ids)
    form = {"max_tokens": 1, "extra_body": {"prompt_logprobs": 2}}
    entries = (
        client.completions.create(model="tiny", prompt=prompt, **form).choices[0].prompt_logprobs
    )
    assert entries[0] is None
    assert entries[1][str(ids[1])]["logprob"] == pytest.approx(scores[1], abs=1e-4)


def test_options_of_sampling_reach_the_engine(client, peer):
    prompt = peer.tokenizer.encode("one two")
    same = {"temperature": 0.9, "seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    more = {"repetition_penalty": 1.4, "min_p": 0.02, "stop_token_ids": [7], "ignore_eos": True}
    params = SamplingParams(
        **same,
        **(more | {"stop_token_ids": (7,)}),
        max_new_tokens=24,
        min_new_tokens=8,
        logit_bias=((40, 3.0),),
        top_p=0.95,  # the model's own default
    )
    (expected,) = peer.generate([prompt], params)
    asked = {**same, "max_tokens": 24, "logit_bias": {"40": 3}}
    answer = client.completions.create(
        model="tiny", prompt=prompt, extra_body=more | {"min_tokens": 8}, **asked
    )
    assert answer.choices[0].text.rstrip("\ufffd") == expected.text.rstrip("\ufffd")


def test_tokens_version_and_one_model(running, client):
    tokenizer = running.engine.tokenizer
    found = post(running, "tokenize", prompt="It is fine", return_token_strs=True).json()
    ids = tokenizer.encode("It is fine")
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert ("".join(found["token_strs"]), found["max_model_len"]) == ("It is fine", 1024)
    chat = post(running, "tokenize", messages=QUESTION, tools=[WEATHER]).json()
    assert chat["tokens"] == tokenizer.encode_chat(QUESTION, tools=[WEATHER])
    assert post(running, "detokenize", tokens=ids).json() == {"prompt": "It is fine"}
    assert "outside" in post(running, "detokenize", tokens=[100_000]).json()["error"]["message"]
    refused = post(running, "tokenize", prompt="a", add_stuff=1).json()["error"]
    assert "add_stuff is not supported" in refused["message"]
    assert httpx.get(f"{running.url}/version").json() == {"version": __version__}
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_a_developer_is_heard_like_the_system(running):
    developer, system, user = (
        post(running, "tokenize", messages=[{"role": role, "content": "Be short."}, *QUESTION])
        for role in ("developer", "system", "user")
    )
    assert developer.json() == system.json() != user.json()
