"""How far two models' next tokens are from each other, where greedy tokens would hang on a near
tie."""

import math
import statistics

from quantkit import Engine, SamplingParams

PROMPTS = [list(range(6 + i, 30 + 3 * i)) for i in range(24)]


def top_logprobs(path, tp=1):
    """The 20 likeliest next tokens of every prompt, with their log-probabilities, on `tp` ranks."""
    engine = Engine.load(path, device="cpu", dtype="float32", max_batch=8, max_model_len=128, tp=tp)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=20)
    done = sorted(engine.generate(PROMPTS, params), key=lambda one: one.index)
    engine.close()
    return [dict(one.logprobs[0].top) for one in done if one.logprobs]


def distance(ours, theirs):
    """Root mean square over the tokens that both report."""
    squares = [
        (one[token] - other[token]) ** 2
        for one, other in zip(ours, theirs)
        for token in one.keys() & other.keys()
    ]
    return math.sqrt(statistics.mean(squares))
