"""openPangu-2.0 against a statement of its description, in float32 on tiny random models."""

import make_model
import pytest
import torch
from engines import capture, load, tokens
from pangu_statement import Statement, random_tensors
from stated_logits import check_logits
from tiny_models import CASES as TABLES

from quantkit import SamplingParams
from quantkit.executor.weights.load import LoadedModel

TINY = TABLES["openpangu_v2"]
CASES = TABLES["openpangu_v2_cases"]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_description(case):
    """Texts shorter and longer than windows, kernels and what is selected; layer by layer as
    well."""
    config_dict = {**TINY, **CASES[case]}
    tensors = random_tensors(config_dict)
    check_logits(Statement(config_dict, tensors), config_dict, tensors, [33, 7, 1, 2, 18])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("draft_length", "captured", "paused"), [(1, False, False), (3, True, False), (3, True, True)]
)
def test_guesses_are_those_of_the_description(
    draft_length, captured, paused, tmp_path, monkeypatch
):
    """Each layer computed anew over the whole text, one behind the other, gives the guesses that
    the engine makes over its caches, in static buffers too, as graphs have them, and where none
    were wanted for some steps; some of them are right, for the next token follows from the last
    one; and no token is another than without them."""
    monkeypatch.setattr(LoadedModel, "cache_dtype", torch.float32)
    config = {**TINY, "vocab_size": 320}
    tensors = random_tensors(config)
    embedding = tensors["model.embed_tokens.weight"]
    same = {"shared_head.head.weight": tensors["lm_head.weight"], "enorm.weight": torch.ones(64)}
    same |= {
        "shared_head.norm.weight": tensors["model.norm.weight"],
        "embed_tokens.weight": embedding,
    }
    for name, one in tensors.items():
        for end, value in same.items():
            if name.endswith(end):
                tensors[name] = value.clone()
        if name.endswith(("post_attention_layernorm.weight", "post_mlp_layernorm.weight")):
            tensors[name] = one * 0.1
        elif name.endswith("eh_proj.weight"):
            tensors[name] = torch.cat((torch.eye(64), one[:, 64:] * 0.1), dim=1)
    tensors["model.embed_tokens.weight"] = 8 * embedding
    source = make_model.write_dense(tmp_path / "model", config, tensors)
    options = {"max_batch": 3, "max_model_len": 128}
    engine = load(source, draft_length=draft_length, chunk_tokens=25, **options)
    if captured:
        capture(engine, draft_length=draft_length)
    heads = engine.speculation.drafter
    statement, compared = Statement(config, tensors), 0
    prompts = [list(range(10 + i, 14 + 15 * i)) for i in range(3)]
    params = SamplingParams(max_new_tokens=14, ignore_eos=True)
    sequences = [engine.submit(one, params, i) for i, one in enumerate(prompts)]
    steps, unread = 0, 0
    while engine.has_work:
        steps += 1
        if paused:
            engine.speculation.set_lengths(0 if steps % 7 in (0, 3, 4, 5) else draft_length, 0)
        engine.step()
        unread += bool(heads._backlog) if captured else 0
        for one in sequences:
            if one.finish_reason is None and one.drafts:
                ids = torch.tensor([*one.token_ids, *one.drafts])
                states = statement.merged(ids[: len(one.token_ids) - 1])
                for number, guess in enumerate(one.drafts):
                    following = ids[1 + number :][: len(states)]
                    states, logits = statement.guessed(number, following, states)
                    assert logits[-1].max() - logits[-1, guess] < 1e-3
                    compared += 1
    assert compared > (10 if paused else 20)
    assert (unread > 5) == paused
    assert 0.1 < engine.speculation.acceptance.rate < 0.95
    drawn = [
        SamplingParams(max_new_tokens=14, temperature=0.6 * i, seed=i, ignore_eos=True)
        for i in range(3)
    ]
    assert tokens(engine, prompts, drawn) == tokens(load(source, **options), prompts, drawn)
    if captured:
        assert [(bool(one._steps), one.failure) for one in heads.steps] == [(True, "")] * 3
