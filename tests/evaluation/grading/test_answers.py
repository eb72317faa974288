"""Where the thinking ends, where an answer is found, when two are equal, and what graders make of them.
Whether it is read right is held by the corpus (test_corpus.py): of what it does not hold, each rule
has a case here."""

import time
from fractions import Fraction

import pytest
from graded import graded
from refused import refused

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading import math_equal
from quantkit.evaluation.grading.answers import find_number, last_box
from quantkit.evaluation.grading.choices import NOTHING, find_choice
from quantkit.evaluation.grading.graders import GRADERS
from quantkit.evaluation.grading.reasoning import answer_of, thinks
from quantkit.evaluation.grading.typesetting import normalize


def test_normalize_leaves_superscripts_alone():
    assert normalize("１０² − 答案：５") == "10² - 答案:5"


@pytest.mark.parametrize(
    ("text", "box", "is_open"),
    [
        (r"\boxed{5} then \boxed{7}", "7", False),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", False),
        (r"\boxed{42", None, True),
        (r"\boxed{18} thousand", "18 thousand", False),
        (r"\boxed{7} or \boxed{8}", "7, 8", False),
        (r"\boxed{7} is wrong", "", False),
    ],
)
def test_last_box(text, box, is_open):
    found = last_box(text)
    assert (found.text, found.open_box) == (box, is_open)


@pytest.mark.parametrize(
    ("text", "value", "where"),
    [
        (r"4 and 5, so \boxed{6}. Not 7.", "6", "asked"),
        (r"\boxed{6}. Wait. The answer is 7.", "7", "phrase"),
        ("答案是42。", "42", "phrase"),
        ("The answer is not 6.", None, "phrase"),
        ("that makes 5 and 6.", None, None),
        ("that costs $1,250.50 today", "1250.5", "last"),
        ("9 × $2 = $", None, None),
        ("He pays $64. If all were at full price he would have paid $80.", None, None),
        ("Tom is 12, and his sister is 15.", None, None),
    ],
)
def test_find_number(text, value, where):
    found = find_number(text)
    assert (found.value, found.found) == (value and Fraction(value), where)


@pytest.mark.parametrize(
    ("text", "letter", "where"),
    [
        ("ANSWER: B\nwait\nANSWER: C", "C", "asked"),
        (r"\boxed{\text{C}}", "C", "asked"),
        ("the answer is (C). B is wrong.", "C", "phrase"),
        ("ANSWER: C or D", NOTHING, "asked"),
        ("ANSWER: C. thing d", NOTHING, "asked"),
        ("thing c", "C", "last"),
        ("A) thing a\nB) thing b\nC) thing c", None, None),
    ],
)
def test_find_choice(text, letter, where):
    found = find_choice(text, [f"thing {letter}" for letter in "abcdefghij"])
    assert (found.text, found.found) == (letter, where)


HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>"


@pytest.mark.parametrize(
    ("reply", "expected", "answer"),
    [
        # the template opened <think>: only the closing tag comes back
        (ModelReply(0, "hm 5\n</think>\n\n6", think_open=True), True, "\n\n6"),
        (ModelReply(0, "hm 5 \\boxed{5}", think_open=True), True, None),
        (ModelReply(0, "hm \\boxed{5}", "length", think_open=True), False, None),
        # both tags
        (ModelReply(0, "<think>hm</think>6"), False, "6"),
        # a tag named inside the thinking: the last one counts
        (ModelReply(0, "I write </think> later. 5</think>6"), True, "6"),
        # other models' tags; what is said between two thoughts was said
        (ModelReply(0, "[THINK]hm[/THINK]6"), False, "6"),
        (ModelReply(0, "[unused16]hm[unused17]6"), False, "6"),
        (ModelReply(0, HARMONY), False, "6"),
        (ModelReply(0, "<think>a</think>6<think>b</think>"), False, "6"),
        (ModelReply(0, "<think>a</think>6<think>b"), False, None),
        # a server with a reasoning parser
        (ModelReply(0, "6", reasoning="hm"), True, "6"),
        (ModelReply(0, "", "length", reasoning="hm 5"), True, None),
        # no tag at all
        (ModelReply(0, "6"), True, "6"),
        (ModelReply(0, "so 6", "length"), False, "so 6"),
        (ModelReply(0, "so 6", "length"), True, None),
        (ModelReply(0, "so 6", "length", think_open=False), True, "so 6"),
    ],
)
def test_thinking_is_cut_off(reply, expected, answer):
    assert answer_of(reply, expected) == answer


def test_a_model_that_closes_what_it_did_not_open_thinks():
    assert thinks([ModelReply(0, "6"), ModelReply(1, "hm</think>6")])
    assert not thinks([ModelReply(0, "6"), ModelReply(1, "<think>hm</think>6")])


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1/2", r"\frac12", True),
        ("0.5", r"\dfrac{1}{2}", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("18", r"\frac{36}{2}", True),
        ("18", "17", False),
        ("18", "", False),
    ],
)
def test_equal_values_are_equal(gold, answer, equal):
    assert math_equal.equal(gold, answer) is equal


def test_a_tower_of_powers_is_cut_off_and_the_next_comparison_works(monkeypatch):
    monkeypatch.setattr(math_equal, "DEADLINE_S", 2.0)
    assert math_equal.equal("1", "1") is True
    start = time.monotonic()
    assert math_equal.equal("18", "9^{9^{9^{9}}}") is None
    assert time.monotonic() - start < 8
    assert math_equal.equal("18", r"\frac{36}{2}") is True


@pytest.mark.parametrize(
    ("text", "reason", "strict"),
    [
        (r"\boxed{204}", "right", True),
        (r"\boxed{203}", "wrong", False),
        (r"\boxed{\frac{408}{2}}", "right", True),
        (r"\boxed{204.5}", "not-integer", False),
        ("the answer is 204", "right-loose", False),
        ("so 204", "right-loose", False),
        ("so 203", "wrong-loose", False),
        (r"\boxed{204", "truncated", False),
        ("no idea", "no-answer", False),
        ("", "no-answer", False),
        ("204</think>", "no-answer", False),
        (r"\boxed{5}</think> \boxed{204}", "right", True),
        (r"<think> \boxed{204}", "unfinished", False),
    ],
)
def test_integer(text, reason, strict):
    found = graded("integer", {"answer": "204"}, text)
    assert (found.reason, found.strict, found.correct) == (
        reason,
        strict,
        reason.startswith("right"),
    )


def test_a_cut_reply_counts_only_with_a_complete_box():
    assert (
        graded(
            "integer", {"answer": "204"}, ModelReply(0, "so far 204", finish_reason="length")
        ).reason
        == "truncated"
    )
    assert (
        graded(
            "integer",
            {"answer": "204"},
            ModelReply(0, r"\boxed{204} because", finish_reason="length"),
        ).reason
        == "right"
    )


@pytest.mark.parametrize(
    ("gold", "text", "reason"),
    [
        ("He pays 5.\n#### 1,234", r"\boxed{1234}", "right"),
        ("#### -5", r"\boxed{5}", "wrong"),
        ("#### 18", r"\boxed{\frac{36}{2}}", "right"),
        ("#### 18", r"\boxed{9^{9^{9^{9}}}}", "ungradable"),
        ("#### 18", "#### 18", "right-loose"),
        (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", "right"),
    ],
)
def test_number(gold, text, reason):
    assert graded("number", {"answer": gold}, text).reason == reason


def test_a_gold_that_is_no_integer_is_refused():
    with refused("not an integer"):
        GRADERS["integer"].gold({"answer": "1/2"})


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("ANSWER: D) I & II only", "D"),
        ("ANSWER: B) E", "B"),
        ("ANSWER: E) I^2R", "E"),
        ("B) E", "B"),
        ("C) It is not the case that no one can.", "C"),
        ("A) I only\nB) E\nC) It is not the case that no one can.", None),
    ],
)
def test_words_of_the_options_are_not_words_of_the_reply(text, letter):
    options = ["I only", "E", "It is not the case that no one can.", "I & II only", "I^2R"]
    for gold in "ABCDE":
        fields = {"answer": gold, "options": options}
        assert graded("choice", fields, text).correct is (gold == letter)


def test_equal_answers_vote_together():
    votes = {
        graded("number", {"answer": "#### 18"}, text).answer
        for text in (r"\boxed{18}", r"\boxed{18.00}", r"\boxed{\frac{36}{2}}", "so 18")
    }
    assert votes == {"18"}
