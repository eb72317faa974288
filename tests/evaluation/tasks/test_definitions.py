import pytest
from refused import refused

from quantkit.common.errors import UsageError
from quantkit.evaluation.grading.graders import find_grader
from quantkit.evaluation.tasks.definitions import (
    ABSENT,
    Problem,
    find_setting,
    find_task,
    task_names,
)
from quantkit.evaluation.tasks.prompts import render, sample_seed

TASKS = task_names()


def test_the_shipped_tasks_are_all_there_and_whole():
    assert {"aime26", "bfcl", "gsm8k", "hmmt25", "mbpp_plus", "needle", "simpleqa"} <= set(TASKS)
    for name in TASKS:
        task = find_task(name)
        assert task.name == name
        for protocol in task.protocols:
            setting = find_setting(task, protocol)
            find_grader(setting.grader)
            assert setting.thinking == (protocol == "r1")


def test_what_is_not_here_is_refused_by_name():
    for name in ABSENT:
        with pytest.raises(UsageError, match=f"task {name} is not in quantkit"):
            find_task(name)


def test_r1_is_what_deepseek_published():
    for name in TASKS:
        setting = find_setting(find_task(name), "r1", repeats=4)
        assert (setting.shots, setting.system, setting.raw) == (0, None, False)
        assert (setting.generation.temperature, setting.generation.top_p) == (0.6, 0.95)
        if not name.startswith("tiny-math"):
            assert setting.generation.max_tokens == 32768
    assert find_setting(find_task("aime24"), "r1").repeats == 64


def test_one_pass_of_tiny_math_is_greedy_and_repeats_are_sampled():
    task = find_task("tiny-math")
    assert find_setting(task, "r1").generation.temperature == 0.0
    assert find_setting(task, "r1", repeats=2).generation.temperature == 0.6


def test_overrides_win_and_greedy_repeats_are_refused():
    task = find_task("gsm8k")
    assert find_setting(task, "r1", overrides={"max_tokens": 7}).generation.max_tokens == 7
    with refused("greedy"):
        find_setting(task, "evalscope", repeats=2)
    assert find_setting(task, "lm-eval").generation.stop == ("Question:", "</s>", "<|im_end|>")


def test_r1_0528_is_what_its_card_says():
    for name in TASKS:
        task = find_task(name)
        setting = find_setting(task, "r1-0528")
        assert (setting.repeats, setting.prompt) == (16, find_setting(task, "r1").prompt)
        if not name.startswith("tiny-math"):
            told = setting.generation
            assert (told.temperature, told.top_p, told.max_tokens) == (0.6, 0.95, 65536)
    report, other = (
        find_setting(find_task("aime24"), one) for one in ("report", "evalscope-1.0.1")
    )
    assert (report.repeats, report.prompt) == (1, other.prompt)


def test_a_new_task_is_one_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\ndata: {files: [mine.jsonl]}\nfields: {problem: q, answer: a}\ngrader: number\n"
        "protocols: {r1: {prompt: '{{ problem }}'}}\n"
    )
    task = find_task(str(file))
    assert (task.title, find_setting(task, "r1").prompt) == ("mine", "{{ problem }}")
    file.write_text(file.read_text() + "surprise: 1\n")
    with refused("surprise"):
        find_task(str(file))


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
