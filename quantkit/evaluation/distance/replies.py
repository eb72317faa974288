"""Distance of two models on replies to a task's prompts: the baseline samples, and both models score
its tokens; their greedy replies are compared as well."""

import operator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.distance.documents import Window
from quantkit.evaluation.distance.quality import GreedyPaths
from quantkit.evaluation.generation import TaskRun, prepare
from quantkit.evaluation.generators.generator import Generation
from quantkit.evaluation.generators.local import Local
from quantkit.evaluation.options import PerplexityOptions
from quantkit.evaluation.tasks.prompts import Prompt
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams


def task_prompts(options: PerplexityOptions) -> tuple[TaskRun, list[Prompt]]:
    """The task `options.sampled` under protocol r1, and its prompts in order, each with its
    seed."""
    assert options.sampled is not None
    generation = {"max_tokens": options.max_tokens} if options.max_tokens else None
    work = prepare(
        options.sampled, "r1", options.data_dir, options.limit, 2, generation, options.seed
    )
    return work, [work.prompt(problem, 0) for problem in work.problems]


def sample_replies(
    path: Path, work: TaskRun, prompts: list[Prompt], options: EngineOptions
) -> list[Window]:
    """One sampled reply of the model at `path` to every prompt, as windows: the prompt is
    context, the reply is scored."""
    replies = _generate(replace(options, model_path=path), prompts, work.setting.generation)
    windows = [
        Window(torch.tensor(ids + reply, dtype=torch.int64), len(ids))
        for ids, reply in replies
        if reply
    ]
    if not windows:
        raise QuantkitError(
            f"{path} generated no reply to the prompts of {work.setting.task.name}",
            "check it with quantkit run",
        )
    return windows


def greedy_paths(
    path: Path, base: Path, work: TaskRun, prompts: list[Prompt], options: EngineOptions
) -> GreedyPaths:
    """Compare both models' greedy replies token by token. options: of the model at `path`; the
    baseline's cache has 16 bits."""
    greedy = Generation(max_tokens=work.setting.generation.max_tokens)
    sides = replace(options, model_path=path), replace(options, model_path=base, cache=None)
    ours, theirs = ([reply for _, reply in _generate(side, prompts, greedy)] for side in sides)
    return GreedyPaths(
        len(prompts),
        sum(map(operator.eq, ours, theirs)) / len(prompts),
        float(median(map(_common_prefix, ours, theirs))),
    )


def _common_prefix(one: list[int], other: list[int]) -> int:
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


def _generate(
    options: EngineOptions,
    prompts: list[Prompt],
    generation: Generation,
) -> list[tuple[list[int], list[int]]]:
    """(prompt, reply) as token ids, for every prompt in order."""
    model = Local(options, name=options.model_path.name)
    try:
        encoded = [model.encode(prompt) for prompt in prompts]
        longest = model.engine.max_model_len
        if too_long := next((len(ids) for ids in encoded if len(ids) >= longest), None):
            raise QuantkitError(
                f"a prompt has {too_long} tokens, the context is {longest}", "use another task"
            )
        sampling = [
            SamplingParams(
                max_new_tokens=generation.max_tokens or longest,
                temperature=generation.temperature,
                top_p=generation.top_p,
                seed=prompt.seed,
            )
            for prompt in prompts
        ]
        replies: dict[int, list[int]] = {
            done.index: list(done.token_ids) for done in model.engine.generate(encoded, sampling)
        }
        return [(ids, replies[number]) for number, ids in enumerate(encoded)]
    finally:
        model.close()
