"""IFEval's instructions; tests/judges/ifeval_agreement.py holds them against the authors'
checker."""

import pytest
from graded import graded
from refused import refused

from quantkit.evaluation.grading.graders import find_grader
from quantkit.evaluation.grading.instructions import (
    CHECKS,
    capital_words,
    check_instructions,
    count_sentences,
    language_of,
)

LESS, MORE = {"relation": "less than"}, {"relation": "at least"}
# id, parameters, a reply that follows, one that does not
CASES = [
    ("keywords:existence", {"keywords": ["rain", "roof"]}, "Rain on roofs.", "Rain."),
    ("keywords:frequency", {"keyword": "rain", "frequency": 2, **MORE}, "Rain, rain.", "Rain."),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "Rainy.", "No rain."),
    (
        "keywords:letter_frequency",
        {"letter": "A", "let_frequency": 3, "let_relation": "less than"},
        "a A",
        "banana",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist nicht der Weg.",
        "That is not the way.",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, **MORE}, "One. Two!", "Mr. One."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n\nTwo"),
    ("length_constraints:number_words", {"num_words": 3, **LESS}, "Two words", "Now three words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weather"},
        "Hm.\n\n'Weather', he said.",
        "Hm.\n\nThe weather.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [date]", "[name]"),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Bye.\nP. S. Keys.",
        "Bye.\nPS Keys.",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2 b",
        "Section 1 Section 2",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<Rain>> falls", "<<>> falls"),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n******\nOne."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write."}, "write. Done.", "Done. Write."),
    (
        "startend:end_checker",
        {"end_phrase": "Any other questions?"},
        'Done. "any other questions?"',
        "Any other questions? No.",
    ),
    ("startend:quotation", {}, '"Quoted."', '"Half.'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and IBM",
        "Nasa and IBM",
    ),
    ("change_case:english_capital", {}, "THIS IS THE WAY.", "This IS THE WAY."),
    ("change_case:english_lowercase", {}, "this is the way.", "This is the way."),
    ("punctuation:no_comma", {}, "None here.", "One, here."),
]


@pytest.mark.parametrize(
    ("name", "given", "follows", "misses"), CASES, ids=[case[0] for case in CASES]
)
def test_every_kind(name, given, follows, misses):
    assert check_instructions(follows, [name], [given], loose=False) == [True]
    assert check_instructions(misses, [name], [given], loose=False) == [False]
    assert check_instructions("  \n", [name], [given], loose=True) == [False]


def test_all_25_kinds_are_here():
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 25


def test_loose_does_without_first_line_last_line_and_asterisks():
    for reply in ('Sure:\n"Quoted."', '"Quoted."\nBye', 'Sure:\n"Quoted."\nBye', '*"Quoted."*'):
        assert check_instructions(reply, ["startend:quotation"], [{}], loose=False) == [False]
        assert check_instructions(reply, ["startend:quotation"], [{}], loose=True) == [True]


def test_a_row_is_graded_by_prompt_and_by_instruction():
    fields = {
        "instructions": ["punctuation:no_comma", "startend:quotation"],
        "parameters": [{"keywords": None}, {}],
    }
    found = graded("instructions", fields, 'Sure:\n"Quoted."')
    assert (found.reason, found.detail) == ("wrong", "not followed: startend:quotation")
    expected = {
        "prompt_strict": (0, 1),
        "prompt_loose": (1, 1),
        "instruction_strict": (1, 2),
        "instruction_loose": (2, 2),
    }
    assert found.measures == expected
    unfinished = graded("instructions", fields, '<think>"Quoted."')
    assert (unfinished.reason, unfinished.measures["instruction_loose"]) == ("unfinished", (0, 2))


def test_a_row_that_cannot_be_checked_is_refused():
    gold = find_grader("instructions").gold
    with refused("not known"):
        gold({"instructions": ["keywords:rhyme"], "parameters": [{}]})
    with refused("lacks or cannot use"):
        gold({"instructions": ["keywords:frequency"], "parameters": [{"keyword": "a"}]})
    with refused("2 instructions have 1"):
        gold({"instructions": ["punctuation:no_comma", "startend:quotation"], "parameters": [{}]})


def test_sentences_words_and_languages():
    assert (
        count_sentences("Mr. Smith met J. K. Rowling at 3.30 p.m. They talked! Was it long?") == 3
    )
    assert count_sentences('He said: "Come." (She came.) Then') == 3
    assert capital_words("NASA, U.S. and I'M; it's A-B.") == 5
    texts = {
        "ru": "Это не то, что мы и они.",
        "ur": "یہ ایک خیال ہے",
        "hi": "यह एक विचार है",
        "ko": "안녕",
        "zh-cn": "你好",
        "ja": "日本語漢字文章です",
        "fr": "Je ne suis pas sûr que",
    }
    assert {name: language_of(text) for name, text in texts.items()} == {
        name: name for name in texts
    }
    assert language_of("123 !") is None
