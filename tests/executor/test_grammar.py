"""Answers of a random model match their grammar, with drafts and without; what is no grammar, or
too much of one, is refused."""

import json
import re

import numpy as np
import pytest
from engines import completions, load
from refused import refused

from quantkit import Engine, QuantkitError, SamplingParams
from quantkit.checkpoint.hub import find_model
from quantkit.executor.sampling import grammar

PROMPTS = [list(range(6 + i, 30 + 3 * i)) for i in range(4)]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "warm": {"type": "boolean"},
    },
    "required": ["city", "days", "warm"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    return load(tiny_checkpoint)


def answers(engine, **options):
    params = [SamplingParams(max_new_tokens=120, seed=i, **options) for i in range(4)]
    done = completions(engine, PROMPTS, params)
    assert {one.finish_reason for one in done} == {"stop"}
    return [one.text for one in done]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_fits_its_schema_with_drafts_and_without(engine, tiny_checkpoint, temperature):
    asked = {"grammar": grammar.json_schema(SCHEMA), "temperature": temperature}
    found = answers(engine, **asked)
    for text in found:
        value = json.loads(text)
        assert list(value) == ["city", "days", "warm"]
        assert value["city"] in ("Oslo", "Rome")
        assert 1 <= value["days"] <= 14
    drafting = load(tiny_checkpoint, draft_length=2)
    assert answers(drafting, **asked) == found
    assert drafting.speculation.acceptance.drafted > 0
    if temperature:
        assert len(set(found)) > 1, "everybody says the same: nothing was sampled"


def test_expressions_choices_and_grammars(engine):
    assert all(
        re.fullmatch(r"[ab]{5}-\d+", text)
        for text in answers(engine, grammar=grammar.regex(r"[ab]{5}-\d{1,3}"), temperature=1.0)
    )
    assert set(answers(engine, grammar=grammar.choice(["yes", 'no "']))) <= {"yes", 'no "'}
    text = grammar.lark('start: "(" start ")" | "x"')
    assert all(
        re.fullmatch(r"\(*x\)*", one) for one in answers(engine, grammar=text, temperature=1.0)
    )


def test_a_choice_may_hold_any_character(engine):
    texts = [
        'a"b\\c\n\t',
        "\x7fdel\b\f",
        "\x01ctl",
        "\u2028x",
        "\x85",
        "\U0001f600\u200d",
        "/a+/",
        "</think>",
        " x ",
    ]
    for text in texts:
        assert set(answers(engine, grammar=grammar.choice([text]))) == {text}


def test_texts_of_added_tokens_are_spelled_out():
    """By tiny-r1's tokenizer, which has <think> and the marks of turns; by the library alone such
    answers ended with an error."""
    options = {"max_batch": 4, "max_model_len": 256}
    model = Engine.load(find_model("tiny-r1"), device="cpu", **options)
    wanted = {
        grammar.regex("<think>[ab]</think>c"): r"<think>[ab]</think>c",
        grammar.choice(["</think>"]): "</think>",
        grammar.json_schema({"enum": ["<｜User｜> a </think>"]}): r'"<｜User｜> a </think>"',
        grammar.lark('start: "x</think>" | "</think>"'): "x?</think>",
        grammar.lark("start: /<think>b<.think>/"): "<think>b<.think>",
    }
    for text, pattern in wanted.items():
        (done,) = model.generate(
            [PROMPTS[0]], [SamplingParams(max_new_tokens=60, temperature=0.0, grammar=text)]
        )
        assert done.finish_reason == "stop"
        assert re.fullmatch(pattern, done.text), done.text
        assert not {5, 6} & set(done.token_ids), "these are thinking's own"
    for text in ('{"a": "</think>"}', '{"grammars": ["</think>"]}', "{</think>"):
        with refused("cannot be used"):
            model.submit(PROMPTS[0], SamplingParams(grammar=text))


def test_unknown_formats_ask_for_nothing_wherever_a_schema_stands(engine):
    """A property of that name, and values that look like schemas, stay as they are."""
    secret, odd = {"type": "string", "format": "password", "maxLength": 2}, {"format": "no-format"}
    schema = {
        "type": "object",
        "properties": {
            "format": {"enum": [odd, odd | {"x": 1}]},
            "list": {
                "type": "array",
                "items": {"$ref": "#/$defs/secret"},
                "minItems": 1,
                "maxItems": 1,
            },
            "either": {"anyOf": [secret, {"type": "null"}]},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["format", "list", "either", "day"],
        "additionalProperties": False,
        "$defs": {"secret": secret},
    }
    for text in answers(engine, grammar=grammar.json_schema(schema), temperature=1.0):
        value = json.loads(text)
        assert value["format"]["format"] == "no-format"
        assert len(value["list"][0]) <= 2
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["day"]), "a known format still counts"


def test_it_ends_where_nothing_can_follow_and_goes_on_where_something_can(engine):
    (done,) = engine.generate(
        [PROMPTS[0]],
        SamplingParams(max_new_tokens=50, grammar=grammar.regex("ab"), ignore_eos=True),
    )
    assert (done.text, len(done.token_ids), done.finish_reason) == ("ab", 2, "stop")
    (done,) = engine.generate(
        [PROMPTS[0]],
        SamplingParams(max_new_tokens=9, grammar=grammar.regex("ab*"), logit_bias=((1, -100.0),)),
    )
    assert (done.text, done.finish_reason) == ("abbbbbbbb", "length")


def test_a_grammar_that_begins_behind_a_token(engine):
    end = engine.tokenizer.end_think
    assert end is not None
    (free,) = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    begin = free.token_ids[3]
    assert begin not in free.token_ids[:3]
    params = SamplingParams(
        max_new_tokens=40, grammar=grammar.regex("ok!"), grammar_after=begin, ignore_eos=True
    )
    (done,) = engine.generate([PROMPTS[0]], params)
    assert done.token_ids[:4] == free.token_ids
    assert done.text.endswith("ok!")
    guide = engine.grammars.guide(grammar.regex("ab"), begin)
    a, b = (engine.tokenizer.encode(one)[0] for one in "ab")
    early = sorted(
        {*range(320)} - engine.tokenizer.eos_ids
    )  # an answer does not end before its grammar begins
    assert len(early) < 320
    assert allowed(guide, [a, begin, a, a, b]) == [early, early, [a], [b], None, None]
    assert allowed(guide, [a, a]) == [early] * 3
    assert allowed(guide, []) == [early], "looking ahead changed something"
    guide.advance(begin)
    assert allowed(guide, []) == [[a]]
    assert allowed(guide, [a, b])[:2] == [[a], [b]]


@pytest.mark.parametrize("drafts", [0, 2])
def test_thinking_is_closed_before_an_answer_that_is_held_ends(tiny_checkpoint, drafts):
    """A model whose next token is most often one that ends the answer, by the request's own
    bias."""
    engine = load(tiny_checkpoint, draft_length=drafts)
    end, eos = engine.tokenizer.end_think, next(iter(engine.tokenizer.eos_ids))
    bias = ((eos, 100.0), (end, 20.0))
    params = SamplingParams(
        max_new_tokens=40,
        temperature=0.0,
        grammar=grammar.regex("ok!"),
        grammar_after=end,
        logit_bias=bias,
    )
    (done,) = engine.generate([PROMPTS[0]], params)
    assert done.text.endswith("ok!")
    assert done.finish_reason == "stop"
    assert end in done.token_ids


def allowed(guide, drafts):
    """Tokens that may come behind each; None where any may."""
    bits = np.full((1 + len(drafts), guide.words), -1, dtype=np.int32)
    guide.write(guide.new_executor(1), bits, 0, drafts)
    found = [
        [token for token in range(320) if row[token >> 5] >> (token & 31) & 1]
        for row in bits.tolist()
    ]
    return [None if len(one) == 320 else one for one in found]


LARGE = [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(8)]} for i in range(12)]


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (str, "nonsense {", "cannot be used"),
        (grammar.regex, "(unclosed", "cannot be used"),
        (grammar.json_schema, {"allOf": LARGE}, "too large"),
        (grammar.json_schema, {"type": "nothing"}, "cannot be used"),
        (grammar.json_schema, {"$ref": "#/nowhere"}, "cannot be used"),
        (grammar.json_schema, {"$ref": "#"}, "allows no first token"),
        (str, "x" * 200_000, "characters"),
        (grammar.regex, "(" * 70 + ")" * 70, "brackets"),
        (grammar.json_schema, {"a": "x" * 200_000}, "characters"),
    ],
    ids=lambda one: getattr(one, "__name__", str(one))[:40],
)
def test_what_is_no_grammar_is_refused(engine, make, given, said):
    with refused(said):
        engine.submit(PROMPTS[0], SamplingParams(grammar=make(given)))
    assert not engine.has_work


def test_a_grammar_that_fails_in_the_middle_ends_its_request_alone(engine):
    params = SamplingParams(max_new_tokens=20, grammar=grammar.regex("[ab]{30}"))
    bad, good = engine.submit(PROMPTS[0], params), engine.submit(PROMPTS[1], params)
    bad.guide._matcher.consume_token(engine.tokenizer.encode("!")[0])
    while engine.has_work:
        engine.step()
    assert bad.finish_reason == "error"
    assert isinstance(bad.fault, QuantkitError)
    assert re.fullmatch("[ab]{20}", good.completion().text)


def test_a_tokenizer_that_ends_no_answer_takes_no_grammar(engine):
    with refused("grammars are not supported with this model"):
        grammar.Grammars(engine.tokenizer.tokenizer, 320, frozenset()).guide(
            grammar.regex("a"), None
        )
