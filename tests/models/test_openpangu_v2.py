"""openPangu-2.0 against a statement of its description, in float32 on tiny random models."""

import make_model
import pytest
import torch
from engines import in_place
from pangu_statement import Statement, random_tensors
from plain_weights import PlainWeights
from refused import refused
from tiny_models import CASES as TABLES

from quantkit import Engine, SamplingParams
from quantkit.executor.runner.graphs import DecodeSteps
from quantkit.executor.runner.runner import Runner
from quantkit.executor.speculation.mtp_drafter import MultiMtpDrafter
from quantkit.executor.speculation.speculation import Speculation
from quantkit.executor.weights.load import LoadedModel
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.hyper_connections import expand_streams, pack_streams

TINY = TABLES["openpangu_v2"]
CASES = TABLES["openpangu_v2_cases"]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_description(case):
    """Texts shorter and longer than windows, kernels and what is selected; layer by layer as
    well."""
    config_dict, lengths = {**TINY, **CASES[case]}, [33, 7, 1, 2, 18]
    architecture, tensors = find_architecture(config_dict), random_tensors(config_dict)
    config = architecture.Config.from_dict(config_dict)
    token_ids = torch.randint(0, 211, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    expected = torch.cat(
        [Statement(config_dict, tensors).logits(own) for own in token_ids.split(lengths)]
    )
    assert expected.abs().max() > 1
    with torch.no_grad():
        model = architecture.Model(config, PlainWeights(tensors))
        whole = model(token_ids, CausalContext(lengths))
        assert (model.logits(whole) - expected).abs().max() < 1e-4 * expected.abs().max()
        hidden = pack_streams(
            expand_streams(tensors["model.embed_tokens.weight"][token_ids], config.mhc_num_stream),
            token_ids,
        )
        for layer in model.layers:
            hidden = layer.feed_forward(
                layer.attend(hidden, CausalContext(lengths)), CausalContext(lengths)
            )
        streams = hidden[:, :-1].unflatten(-1, (config.mhc_num_stream, -1))
        end, _ = model.end(streams, model.norm, config.rms_norm_eps)
        assert (end - whole).abs().max() < 1e-4 * whole.abs().max()


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
    for name in tensors:
        if name.endswith(("post_attention_layernorm.weight", "post_mlp_layernorm.weight")):
            tensors[name] = tensors[name] * 0.1
        elif name.endswith("shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"].clone()
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = tensors["model.embed_tokens.weight"] * (
                8 if name == "model.embed_tokens.weight" else 1
            )
        elif name.endswith("enorm.weight") or "shared_head.norm" in name:
            tensors[name] = (
                tensors["model.norm.weight"].clone() if "shared" in name else torch.ones(64)
            )
        elif name.endswith("eh_proj.weight"):
            tensors[name] = torch.cat((torch.eye(64), tensors[name][:, 64:] * 0.1), dim=1)
    source, params = (
        make_model.write_dense(tmp_path / "model", config, tensors),
        SamplingParams(max_new_tokens=14, ignore_eos=True),
    )
    engine = Engine.load(
        source,
        device="cpu",
        dtype="float32",
        max_batch=3,
        max_model_len=128,
        draft_length=draft_length,
        chunk_tokens=25,
    )
    if captured:
        engine.runner = Runner(engine.loaded.model, engine.cache, in_place)
        engine.speculation = Speculation(
            heads := MultiMtpDrafter(
                engine.loaded.mtp_layers, engine.runner, draft_length, engine.parallel
            ),
            0,
        )
    statement, compared = Statement(config, tensors), 0
    prompts = [list(range(10 + i, 14 + 15 * i)) for i in range(3)]
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
                    states, logits = statement.guessed(
                        number, ids[1 + number :][: len(states)], states
                    )
                    assert logits[-1].max() - logits[-1, guess] < 1e-3
                    compared += 1
    assert compared > (10 if paused else 20)
    assert (unread > 5) == paused
    assert 0.1 < engine.speculation.acceptance.rate < 0.95
    plain = Engine.load(source, device="cpu", dtype="float32", max_batch=3, max_model_len=128)
    drawn = [
        SamplingParams(max_new_tokens=14, temperature=0.6 * i, seed=i, ignore_eos=True)
        for i in range(3)
    ]
    expected = {one.index: one.token_ids for one in plain.generate(prompts, drawn)}
    assert {one.index: one.token_ids for one in engine.generate(prompts, drawn)} == expected
    if captured:
        assert [
            (bool(steps._steps), steps.failure)
            for steps in heads.steps
            if isinstance(steps, DecodeSteps)
        ] == [(True, "")] * 3


def written(path, **changes):
    config = {**TINY, **changes}
    return make_model.write_dense(path, config, random_tensors(config))


def test_it_has_no_prefix_cache(tmp_path):
    source = written(tmp_path / "model", vocab_size=320)
    with refused("--prefix-cache"):
        Engine.load(source, device="cpu", max_batch=1, max_model_len=64, prefix_cache=True)
