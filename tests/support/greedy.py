"""Greedy tokens of a model on this CPU, in float32."""

from quantkit import Engine, SamplingParams


def greedy(path, prompts, count, **options):
    """The next `count` tokens of each prompt, in the order of prompts. options: of the engine."""
    settings = {"max_batch": 4, "max_model_len": 128} | options
    engine = Engine.load(path, device="cpu", dtype="float32", **settings)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))
    tokens = {one.index: one.token_ids for one in done}
    engine.close()
    return [tokens[index] for index in sorted(tokens)]
