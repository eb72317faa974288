import pytest

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.reasoning import Reply, split, thinks


@pytest.mark.parametrize(
    ("completion", "expected", "reply"),
    [
        # the template prefilled <think>: only the closing tag comes back
        (
            ModelReply(0, "hm 5\n</think>\n\n6", think_open=True),
            True,
            Reply("hm 5\n", "\n\n6", True),
        ),
        (
            ModelReply(0, "hm 5 \\boxed{5}", think_open=True),
            True,
            Reply("hm 5 \\boxed{5}", "", False),
        ),
        (
            ModelReply(0, "hm 5 \\boxed{5}", finish_reason="length", think_open=True),
            False,
            Reply("hm 5 \\boxed{5}", "", False),
        ),
        # both tags
        (ModelReply(0, "<think>hm</think>6"), False, Reply("hm", "6", True)),
        (
            ModelReply(0, "<think>hm 5", finish_reason="length"),
            False,
            Reply("<think>hm 5", "", False),
        ),
        # a tag named inside the thinking: the last one counts
        (
            ModelReply(0, "I write </think> later. 5</think>6"),
            True,
            Reply("I write  later. 5", "6", True),
        ),
        # other models' tags; what is said between two thoughts was said
        (ModelReply(0, "[THINK]hm[/THINK]6"), False, Reply("hm", "6", True)),
        (ModelReply(0, "◁think▷hm◁/think▷6"), False, Reply("hm", "6", True)),
        (ModelReply(0, "[unused16]hm[unused17]6"), False, Reply("hm", "6", True)),
        (ModelReply(0, "<seed:think>hm</seed:think>6"), False, Reply("hm", "6", True)),
        (
            ModelReply(
                0,
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>",
            ),
            False,
            None,
        ),
        (ModelReply(0, "<think>a</think>6<think>b</think>"), False, Reply("ab", "6", True)),
        (
            ModelReply(0, "<think>a</think>6<think>b"),
            False,
            Reply("<think>a</think>6<think>b", "", False),
        ),
        (ModelReply(0, "[THINK]hm 6"), False, Reply("[THINK]hm 6", "", False)),
        # a server with a reasoning parser
        (ModelReply(0, "6", reasoning="hm"), True, Reply("hm", "6", True)),
        (
            ModelReply(0, "", finish_reason="length", reasoning="hm 5"),
            True,
            Reply("hm 5", "", False),
        ),
        # no tag at all
        (ModelReply(0, "6"), False, Reply("", "6", True)),
        (ModelReply(0, "6"), True, Reply("", "6", True)),
        (ModelReply(0, "so 6", finish_reason="length"), False, Reply("", "so 6", True)),
        (ModelReply(0, "so 6", finish_reason="length"), True, Reply("so 6", "", False)),
        (
            ModelReply(0, "so 6", finish_reason="length", think_open=False),
            True,
            Reply("", "so 6", True),
        ),
    ],
)
def test_thinking_is_cut_off(completion, expected, reply):
    found = split(completion, expected)
    assert found == reply if reply is not None else (found.answer, found.finished) == ("6", True)


def test_a_model_that_closes_what_it_did_not_open_thinks():
    assert thinks([ModelReply(0, "6"), ModelReply(1, "hm</think>6")])
    assert not thinks([ModelReply(0, "6"), ModelReply(1, "<think>hm</think>6")])
