"""A pass that is launched before the tokens of the one before it are read: the same tokens, whoever
comes, ends or is cancelled."""

import random
from functools import partial

import engines
import pytest
from engines import capture, finish, note, submit_all

from quantkit import SamplingParams
from quantkit.common.devices import HostCopy
from quantkit.executor.runner.runner import Runner
from quantkit.executor.scheduler.scheduler import Scheduler, StepBudget
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.speculation import Speculation

MOST = 4
"""Requests that run together."""


def load(path, *, ahead, draft_length=0, **options):
    engine = engines.load(path, max_batch=MOST, draft_length=draft_length, **options)
    capture(engine, draft_length=draft_length).runner._may_launch_async = ahead
    engine.scheduler.lookahead = max(draft_length, 1)
    return engine


def requests(engine, count, seed):
    """When each comes, its prompt, what it asks for, and how many tokens it has when it is
    cancelled. Greedy and drawn; ended by length, a token or a string; with penalties and
    log-probabilities."""
    draw, made, vocab = random.Random(seed), [], engine.loaded.config.vocab_size
    for index in range(count):
        params = SamplingParams(
            max_new_tokens=draw.choice((1, 20, 30)),
            temperature=draw.choice((0.0, 0.0, 1.0)),
            seed=index,
            ignore_eos=True,
            stop_token_ids=tuple(draw.sample(range(vocab), vocab // 20)) if index % 2 else (),
            stop=("e",) if index % 7 == 3 else (),
            frequency_penalty=0.5 if index % 5 == 2 else 0.0,
            logprobs=2 if index % 11 == 5 else None,
        )
        prompt = [draw.randrange(vocab) for _ in range(draw.choice((3, 60, 64, 90)))]
        made.append((draw.randrange(4 * count), prompt, params, draw.choice((None, None, 9))))
    return made


def answers(engine, count=8, seed=0):
    """Every request's tokens, and why it ended. From time to time one is taken its blocks, and
    computed again."""
    assert isinstance(engine.scheduler, Scheduler)
    waiting = sorted(enumerate(requests(engine, count, seed)), key=lambda one: one[1][0])
    found, step = {}, 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1][0] <= step:
            index, (_, prompt, params, _) = waiting[0]
            found[index] = (engine.submit(prompt, params, index), waiting.pop(0)[1][3])
        if engine.has_work:
            engine.step()
        if step % 9 == 8 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1])
        for sequence, most in found.values():
            if (
                most is not None
                and sequence.finish_reason is None
                and len(sequence.generated) >= most
            ):
                engine.cancel(sequence)
        step += 1
    return [
        (sequence.generated, sequence.finish_reason) for _, (sequence, _) in sorted(found.items())
    ]


@pytest.fixture
def launched_with_guesses(monkeypatch):
    """Answers and rows of passes that were launched ahead together with guesses."""
    return ahead_of(
        monkeypatch, "launch_async_verification", lambda *given: (len(given[0]), len(given[2]))
    )


@pytest.fixture
def launched(monkeypatch):
    """Rows of passes that were launched ahead."""
    return ahead_of(monkeypatch, "launch_async_decode", len)


def ahead_of(monkeypatch, name, size):
    made, launch = [], getattr(Runner, name)

    def noted(self, *given):
        launch(self, *given)
        if self.has_async:
            made.append(size(*given))

    monkeypatch.setattr(Runner, name, noted)
    return made


@pytest.mark.parametrize(("seed", "mixed"), [(0, False), (4, True)])
def test_no_token_changes(tiny_checkpoint, launched, seed, mixed):
    """Blocks are few, so that those that end leave theirs to others at once."""
    plain, ahead = (load(tiny_checkpoint, ahead=one, cache_tokens=768) for one in (False, True))
    plain.scheduler.budget = ahead.scheduler.budget = StepBudget(96, 32, mixed)
    expected = answers(plain, seed=seed)
    assert launched == []
    assert answers(ahead, seed=seed) == expected
    assert len(launched) > 10
    assert max(launched) > 1
    assert {reason for _, reason in expected} == {"length", "stop", "cancelled"}
    assert ahead.scheduler.num_preempted > 3


def test_a_prompt_waits_for_the_pass_in_flight(tiny_checkpoint, monkeypatch):
    """Where passes are mixed every chunk is in one with the answers, so that these have a token
    behind each. Else two chunks would lie
    between two tokens: nobody waits for one that ends no prompt."""
    engine, told = load(tiny_checkpoint, ahead=True), []
    engine.scheduler.budget = StepBudget(32, 32, mixed=True)
    answer = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=30, ignore_eos=True))
    while not engine.runner.has_async:
        engine.step()
    before = len(answer.generated)
    for name in ("decode", "mixed", "prefill"):
        seen = partial(lambda name, *_: told.append((name, len(answer.generated) - before)), name)
        note(monkeypatch, Runner, name, seen)
    prompt = engine.submit([9] * 80, SamplingParams(max_new_tokens=1, ignore_eos=True))
    while prompt.finish_reason is None:
        engine.step()
    assert told == [("decode", 0), ("mixed", 1), ("mixed", 2), ("mixed", 3)]


@pytest.mark.parametrize(("drafts", "seed", "mixed"), [(1, 1, False), (2, 3, True), (3, 3, False)])
def test_no_token_changes_with_drafts(easy_checkpoint, launched_with_guesses, drafts, seed, mixed):
    """Those that are right, too: as many guesses are. But beside prompts in mixed passes, which
    begin a pass later behind one that was
    launched: other steps check them then."""
    found, kept = [], []
    for ahead in (False, True):
        engine = load(easy_checkpoint, ahead=ahead, draft_length=drafts, cache_tokens=768)
        engine.scheduler.budget = StepBudget(96, 32, mixed)
        found.append(answers(engine, count=12, seed=seed))
        kept.append((engine.speculation.acceptance.accepted, engine.speculation.acceptance.drafted))
        assert bool(launched_with_guesses) == ahead
    assert found[0] == found[1]
    assert mixed or kept[0] == kept[1]
    assert 0.2 < kept[0][0] / kept[0][1] < 1, "all or no guesses are right: the test tests half"
    assert len(launched_with_guesses) > 10
    assert max(launched_with_guesses)[0] > 1
    assert {rows for number, rows in launched_with_guesses if number == 1} == {1 + drafts}


def test_drafting_starts_and_stops(tiny_checkpoint, launched, launched_with_guesses, monkeypatch):
    """A layer that begins anew reads what passes launched ahead computed; what was launched with
    guesses serves where none are made."""
    steps, guesses = [0], []

    def choose(self):
        steps[0] += 1
        wanted = (2 if steps[0] % 12 > 7 else 0, 0)
        self.set_lengths(*wanted)
        return wanted

    def noted(one, *_):
        if one.drafts:
            guesses[-1].append((one.index, len(one.token_ids), tuple(one.drafts)))

    monkeypatch.setattr(Speculation, "choose", choose)
    note(monkeypatch, Sequence, "extend", noted)
    found = []
    for ahead in (False, True):
        guesses.append([])
        steps[0], engine = 0, load(tiny_checkpoint, ahead=ahead, draft_length=2)
        params = SamplingParams(max_new_tokens=32, ignore_eos=True)
        found.append(submit_all(engine, [[9 + 5 * index, 3] for index in range(3)], params))
    assert found[0] == found[1]
    assert guesses[0] == guesses[1], "those of a layer that read the same"
    assert len(guesses[0]) > 10
    assert len(launched) > 10
    assert len(launched_with_guesses) > 5


def test_the_next_pass_is_launched_before_the_host_waits(tiny_checkpoint, monkeypatch):
    """And before others are listened to; the last one's tokens need no further pass."""
    engine, told = load(tiny_checkpoint, ahead=True), []
    engine.while_computing = lambda brought: told.append("others")
    note(monkeypatch, Runner, "launch_async_decode", lambda *_: told.append("launch"))
    note(monkeypatch, HostCopy, "tolist", lambda *_: told.append("wait"))
    engine.submit([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
    finish(engine)
    # The first size of a step is captured when it is first computed.
    assert told == ["others", "others", "wait", *["launch", "others", "wait"] * 2, "others", "wait"]
    assert not engine.runner.has_async


def test_a_failing_row_does_not_affect_others(tiny_checkpoint, launched, monkeypatch):
    """A pass fails while another is under way: each answer is computed alone then, and goes on."""
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    found = []
    for fails in (False, True):
        engine, passes = load(tiny_checkpoint, ahead=True), [0]
        append = engine._append

        def broken(*given, append=append, passes=passes, fails=fails):
            passes[0] += 1
            if fails and passes[0] == 8:
                raise RuntimeError("once")
            append(*given)

        monkeypatch.setattr(engine, "_append", broken)
        found.append(submit_all(engine, [[9 + index, 3] for index in range(3)], params))
    assert found[0] == found[1]
    assert len(launched) > 20
