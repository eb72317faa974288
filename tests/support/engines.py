"""Engines of small models on this CPU: loaded, captured as graphs are, and asked."""

import torch

from quantkit import Engine, SamplingParams
from quantkit.executor.runner.runner import Runner
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.speculation.mtp_drafter import make_mtp_drafter
from quantkit.executor.speculation.speculation import Speculation


def load(path, draft=None, **options):
    asked = {"max_batch": 4, "max_model_len": 256, "draft": draft, **options}
    return Engine.load(path, device="cpu", dtype="float32", **asked)


def completions(engine, prompts, params):
    """In the order of the prompts. Afterwards nothing is computed, and no block is held."""
    done = sorted(engine.generate(prompts, params), key=lambda one: one.index)
    assert not engine.has_work
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks
    return done


def tokens(engine, prompts, params):
    return [one.token_ids for one in completions(engine, prompts, params)]


def in_place(step, lengths):
    """A capture that behaves as a graph: it computes on the buffers that the step was made with,
    and leaves results where the first ones lay."""
    kept = step()

    def replay():
        for old, new in zip(kept, step()) if isinstance(kept, tuple) else [(kept, step())]:
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        return kept

    return replay


def capture(engine, captured=in_place, draft_length=0):
    """The engine with captured steps, those of its MTP layer too."""
    keep_all_hidden = engine.runner.prefill_runner.keep_all_hidden
    engine.runner = Runner(engine.loaded.model, engine.cache, captured)
    engine.runner.prefill_runner.keep_all_hidden = keep_all_hidden
    if draft_length:
        layers = engine.loaded.mtp_layers
        drafter = make_mtp_drafter(layers, engine.runner, draft_length, engine.parallel)
        engine.speculation = Speculation(drafter, 0)
    return engine


def submit_all(engine, prompts, params):
    """Tokens of requests that are submitted at once and computed step by step."""
    sequences = [engine.submit(prompt, params, index) for index, prompt in enumerate(prompts)]
    finish(engine)
    return [one.generated for one in sequences]


def finish(engine):
    while engine.has_work:
        engine.step()


def note(monkeypatch, owner, name, seen):
    """Have `seen` called with what a function of `owner` is given, before that computes."""
    run = getattr(owner, name)

    def noted(*given, **named):
        seen(*given, **named)
        return run(*given, **named)

    monkeypatch.setattr(owner, name, noted)


def check_same_answers(path, *more, atol=2e-2):
    """Prompts in chunks and next to steps, requests that make way for others, and `more`, each
    whether steps are captured and options of the engine, give one model's tokens, with
    log-probabilities within `atol`."""
    prompts = [
        [7 + i] * 3 + [*range(20, 20 + length)] for i, length in enumerate((1, 9, 100, 30, 70))
    ]
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=0)

    def answers(budget=None, captured=False, **options):
        engine = load(path, **{"max_model_len": 128} | options)
        if captured:
            capture(engine, draft_length=options.get("draft_length", 0))
        if budget is not None:
            engine.scheduler.budget = budget
        done = completions(engine, prompts, params)
        engine.close()
        found = [[token.logprob for token in one.logprobs or []] for one in done]
        return [one.token_ids for one in done], torch.tensor(found)

    tokens, expected = answers()
    for budget, captured, options in (
        (StepBudget(16, 16), False, {}),
        (StepBudget(24, 8, mixed=True), False, {"cache_tokens": 192}),
        *((None, captured, options) for captured, options in more),
    ):
        again, found = answers(budget, captured, **options)
        assert again == tokens
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)
