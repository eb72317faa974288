import pytest

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.reasoning import answer_of, thinks

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
        (ModelReply(0, "<think>hm 5", "length"), False, None),
        # a tag named inside the thinking: the last one counts
        (ModelReply(0, "I write </think> later. 5</think>6"), True, "6"),
        # other models' tags; what is said between two thoughts was said
        (ModelReply(0, "[THINK]hm[/THINK]6"), False, "6"),
        (ModelReply(0, "◁think▷hm◁/think▷6"), False, "6"),
        (ModelReply(0, "[unused16]hm[unused17]6"), False, "6"),
        (ModelReply(0, "<seed:think>hm</seed:think>6"), False, "6"),
        (ModelReply(0, HARMONY), False, "6"),
        (ModelReply(0, "<think>a</think>6<think>b</think>"), False, "6"),
        (ModelReply(0, "<think>a</think>6<think>b"), False, None),
        (ModelReply(0, "[THINK]hm 6"), False, None),
        # a server with a reasoning parser
        (ModelReply(0, "6", reasoning="hm"), True, "6"),
        (ModelReply(0, "", "length", reasoning="hm 5"), True, None),
        # no tag at all
        (ModelReply(0, "6"), False, "6"),
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
