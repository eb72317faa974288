"""Texts that a model writes itself: its reasoning on a task's prompts, which is where a reasoning
model is used.

The source samples, and both models score its tokens. And greedily: how far the paths of two models
run together before they part.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.distance.windows import Window
from quantkit.evaluation.generation import TaskRun, prepare
from quantkit.evaluation.generators.local import Local
from quantkit.evaluation.tasks.prompts import Prompt
from quantkit.executor.sampling.params import SamplingParams


@dataclass(frozen=True)
class GreedyPaths:
    """Greedy replies of two models to the same prompts. `same`: share that are equal to their end;
    `tokens_until_apart`: median, of all prompts, of the tokens before the first that differs, a
    reply that is the same counting whole."""

    prompts: int
    same: float
    tokens_until_apart: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def prompts_of(
    task: str, data_dir: Path | None, limit: int | None, seed: int, max_tokens: int | None
) -> tuple[TaskRun, list[Prompt]]:
    """A task under protocol r1, and its prompts in order, each with its seed."""
    work = prepare(
        task, "r1", data_dir, limit, 2, {"max_tokens": max_tokens} if max_tokens else None, seed
    )
    return work, [work.prompt(problem, 0) for problem in work.problems]


def sample_replies(
    path: Path, work: TaskRun, prompts: list[Prompt], *, device: str, backend: str
) -> list[Window]:
    """One reply of the model at `path` to every prompt, sampled as the protocol says: the prompt is
    context, the reply is scored."""
    generation = work.setting.generation
    made = _tokens(
        path,
        prompts,
        generation.temperature,
        generation.top_p,
        generation.max_tokens,
        device,
        backend,
    )
    windows = [
        Window(torch.tensor(ids + reply, dtype=torch.int64), len(ids))
        for ids, reply in made
        if reply
    ]
    if not windows:
        raise QuantkitError(
            f"{path} wrote nothing to the prompts of {work.setting.task.name}",
            "look at it with quantkit run",
        )
    return windows


def greedy_paths(
    path: Path,
    base: Path,
    work: TaskRun,
    prompts: list[Prompt],
    *,
    device: str,
    backend: str,
    cache: str | None = None,
) -> GreedyPaths:
    """Both models' greedy replies, token by token. cache: of the model at `path`."""
    limit = work.setting.generation.max_tokens
    sides = ((path, cache), (base, None))
    ours, theirs = (
        [reply for _, reply in _tokens(one, prompts, 0.0, 1.0, limit, device, backend, own)]
        for one, own in sides
    )
    together = [_common(a, b) for a, b in zip(ours, theirs)]
    return GreedyPaths(
        len(prompts),
        sum(a == b for a, b in zip(ours, theirs)) / len(prompts),
        float(median(together)),
    )


def _common(one: list[int], other: list[int]) -> int:
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


def _tokens(
    path: Path,
    prompts: list[Prompt],
    temperature: float,
    top_p: float,
    limit: int | None,
    device: str,
    backend: str,
    cache: str | None = None,
) -> list[tuple[list[int], list[int]]]:
    """(prompt, reply) as token ids, for every prompt in order."""
    model = Local(path, name=path.name, device=device, backend=backend, cache=cache)
    try:
        encoded = [model.encode(prompt) for prompt in prompts]
        longest = model.engine.max_model_len
        if too_long := next((len(ids) for ids in encoded if len(ids) >= longest), None):
            raise QuantkitError(
                f"a prompt has {too_long} tokens, the context is {longest}", "give another task"
            )
        sampling = [
            SamplingParams(
                max_new_tokens=limit or longest,
                temperature=temperature,
                top_p=top_p,
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
