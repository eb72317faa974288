from refused import refused

from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task
from quantkit.evaluation.tasks.prompts import render, sample_seed


def test_r1_asks_the_published_sentence_and_no_system_prompt():
    prompt = render(
        find_setting(find_task("aime24"), "r1"),
        Problem("1", {"problem": "x?", "answer": "1"}),
        [],
        5,
    )
    assert prompt.messages == (
        {
            "role": "user",
            "content": "x?\n\nPlease reason step by step, and put your final answer within "
            "\\boxed{}.",
        },
    )
    assert prompt.think
    assert prompt.seed == 5


def test_shots_of_the_same_group_only():
    setting = find_setting(find_task("mmlu_pro"), "lm-eval")
    shot = {
        "problem": "q",
        "options": ["a", "b"],
        "cot": "A: Let's think step by step. The answer is (A).",
    }
    shots = [shot | {"group": group} for group in ["law"] * 5 + ["math"] * 4]
    problem = Problem(
        "1", {"problem": "Q", "options": ["x", "y"], "answer": "A", "group": "law"}, group="law"
    )
    assert "Answer: Let's think step by step. The answer is (A)." in (
        render(setting, problem, shots, 0).text or ""
    )
    with refused("needs 5 shots and has 4"):
        render(setting, Problem("1", problem.fields, group="math"), shots, 0)


def test_seeds_differ_by_problem_and_repeat_and_come_back():
    seeds = {sample_seed(0, problem, repeat) for problem in "abc" for repeat in range(4)}
    assert len(seeds) == 12
    assert sample_seed(0, "a", 0) != sample_seed(1, "a", 0)
    assert sample_seed(3, "a", 2) == sample_seed(3, "a", 2)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_report_asks_as_evalscope_1_0_1_does():
    """tests/judges/evalscope_1_0_1.py compares the prompts; the grader is its last number."""
    assert find_setting(find_task("gsm8k"), "report").grader == "last-number"
    with refused("does not define protocol report"):
        find_setting(find_task("mmlu_pro"), "report")
