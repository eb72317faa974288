"""Prompts share a step's tokens: long ones leave room to short ones, and everybody's tokens are
those of computing alone."""

import pytest

from quantkit import SamplingParams
from quantkit.executor.cache.cache import CachePlan
from quantkit.executor.scheduler.scheduler import Scheduler, StepBudget
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.tokenizer.chat import ChatTokenizer

BUDGET = 100


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return ChatTokenizer(tiny_checkpoint)


def schedule(tokenizer, lengths, max_batch=8, beside=None):
    """Steps until every prompt is computed: tokens of each prompt, by its number. beside: a budget,
    for prompts beside an answer."""
    scheduler = Scheduler(CachePlan(200, 64, 8192), max_batch=max_batch, chunk_tokens=BUDGET)
    if beside is not None:
        scheduler.budget = beside
        scheduler.add(
            answer := Sequence(
                len(lengths),
                [1] * 2,
                SamplingParams(max_new_tokens=2000),
                tokenizer,
                8192,
                streams=False,
            )
        )
        ((_, answer.num_cached),) = scheduler.schedule().prefill
        answer.token_ids.append(1)
    for index, length in enumerate(lengths):
        scheduler.add(
            Sequence(index, [1] * length, SamplingParams(), tokenizer, 8192, streams=False)
        )
    steps = []
    while scheduler.waiting or any(sequence.num_new > 1 for sequence in scheduler.running):
        step = scheduler.schedule()
        for sequence in step.decode if beside is not None else ():
            sequence.num_cached += 1
            sequence.token_ids.append(1)
        steps.append({sequence.index: count for sequence, count in step.prefill})
        for sequence, count in step.prefill:
            sequence.num_cached += count
            if not sequence.num_new:
                sequence.token_ids.append(1)
    return steps


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([60, 60, 60], [{0: 60, 1: 40}, {1: 20, 2: 60}]),
        ([250], [{0: 100}, {0: 100}, {0: 50}]),
        ([1000, 3], [{0: 97, 1: 3}]),
        ([1000, 90], [{0: 50, 1: 50}, {0: 60, 1: 40}]),
    ],
)
def test_prompts_share_a_step(tokenizer, lengths, steps):
    """Those that fit are computed in order; a long one alone has every step, and leaves half of it
    to others."""
    assert schedule(tokenizer, lengths)[: len(steps)] == steps


def test_short_prompts_pass_several_long_ones_and_do_not_stop_them(tokenizer):
    steps = schedule(tokenizer, [1000, 1000, *[40] * 5])
    assert all(sum(step.values()) == BUDGET for step in steps[:-1])
    assert all(step.get(0, 0) >= BUDGET // 2 for step in steps[:10])
    assert {2, 3, 4, 5, 6} <= {index for step in steps[:4] for index in step}
    assert not any(1 in step for step in steps[:9]), "long prompts are computed one after the other"


def test_chunks_behind_long_contexts_have_fewer_tokens(tokenizer):
    """Each costs as much as the first, in whole blocks, until there are too few for what a pass
    costs in any case."""
    budget = StepBudget(1024, 512, doubles_at=1000)
    steps = schedule(tokenizer, [6000], beside=budget)
    counts = [step[0] for step in steps]
    assert counts[0] == 512
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    assert all(count % 128 == 0 for count in counts[:-1])
    starts = [sum(counts[:number]) for number in range(len(counts))]
    costs = [budget.cost(start, count) for start, count in zip(starts, counts)]
    whole = budget.cost(0, 512)
    assert all(cost <= whole for cost, count in zip(costs, counts) if count > 128)
    assert min(counts[:-1]) == 128
    assert all(budget.cost(start, count + 128) > whole for start, count in zip(starts, counts[:-1]))


def test_what_costs_more_leaves_less_to_others(tokenizer):
    """A prompt that does not fit begins with whole blocks, or later: not with some tokens of its
    own pass."""
    budget = StepBudget(1024, 512, doubles_at=4000)
    assert schedule(tokenizer, [400, 400], beside=budget)[0] == {0: 400}
    assert schedule(tokenizer, [370, 400], beside=budget)[0] == {0: 370, 1: 128}
    assert schedule(tokenizer, [470, 20], beside=budget)[0] == {0: 470, 1: 20}
    assert schedule(tokenizer, [512], beside=budget) == [{0: 512}]


def test_where_nobody_answers_all_tokens_cost_the_same(tokenizer):
    scheduler = Scheduler(CachePlan(200, 64, 8192), max_batch=2, chunk_tokens=BUDGET)
    scheduler.budget = StepBudget(512, 128, doubles_at=100)
    scheduler.add(long := Sequence(0, [1] * 1500, SamplingParams(), tokenizer, 8192, streams=False))
    for expected in (512, 512, 476):
        assert scheduler.schedule().prefill == [(long, expected)]
        long.num_cached += expected
