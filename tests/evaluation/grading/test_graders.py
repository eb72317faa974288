import pytest
from graded import graded
from refused import refused

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.graders import GRADERS, find_grader


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


def test_a_failed_request_is_excluded():
    found = graded("integer", {"answer": "204"}, ModelReply(0, error="HTTP 500"))
    assert found.excluded
    assert found.detail == "HTTP 500"


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


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so\n#### 1,234", True, True),
        ("so\n#### 1234.", True, True),
        ("#### 5 or #### 1234", False, True),
        ("it is $1,234.", False, True),
        ("1234 of 2000", False, False),
        ("#### 1234 in 5 steps", True, False),
        ("none", False, False),
    ],
)
def test_gsm8k_filters_of_lm_eval(text, strict, flexible):
    found = graded("gsm8k-filters", {"answer": "x\n#### 1,234"}, text)
    assert (found.strict, found.correct) == (strict, flexible)


def test_a_gold_that_is_no_integer_is_refused():
    with refused("not an integer"):
        GRADERS["integer"].gold({"answer": "1/2"})


def test_unknown_grader_lists_those_there_are():
    with refused("python-tests"):
        find_grader("nope")


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
