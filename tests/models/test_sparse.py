"""Sparse attention of DeepSeek-V3.2 and GLM-5 against transformers, in float32 on tiny random
models."""

import make_model
import pytest
import torch
from plain_weights import PlainWeights
from quantized import quantized
from refused import refused
from stated_logits import check_logits, opened
from tiny_models import CASES as TABLES
from tiny_models import random_tensors
from transformers_peers import checkpoint_tensors, random_peer

from quantkit.calibrate.recipe import Recipe
from quantkit.executor.runner.attention_context import DecodeContext, MixedContext
from quantkit.executor.runner.prompt_context import Chunk, PrefillContext
from quantkit.executor.weights.load import load_model
from quantkit.models import deepseek_v3, find_architecture
from quantkit.models.context import CausalContext

CASES = TABLES["sparse_cases"]
"""7 tokens of up to 40 are seen."""


class Case:
    def __init__(self, kind, extra):
        self.peer = random_peer(kind, extra)
        self.config, self.tensors = self.peer.config.to_dict(), checkpoint_tensors(self.peer)

    def logits(self, lengths, token_ids, **changes):
        architecture, config, weights = opened({**self.config, **changes}, self.tensors)
        model = architecture.Model(config, weights)
        with torch.no_grad():
            return model.logits(model(token_ids, CausalContext(lengths)))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Sequences longer than index_topk, as long, and shorter."""
    one, lengths, token_ids = Case(*CASES[case]), [40, 7, 5, 31], torch.randint(0, 211, (83,))
    _, _, found = check_logits(one.peer, one.config, one.tensors, lengths, token_ids)
    seeing_all = one.logits(lengths, token_ids, index_topk=40)
    assert (seeing_all - found).abs().max() > 1e-2, "the selection did nothing"


def test_up_to_topk_tokens_it_is_dense_attention():
    """DeepSeek-V3 over the same weights, to the bit."""
    one, token_ids = Case(*CASES["deepseek_v32"]), torch.arange(1, 41)
    config = deepseek_v3.Config.from_dict(
        {**one.config, "n_routed_experts": 8, "num_nextn_predict_layers": 0}
    )
    model = deepseek_v3.Model(config, PlainWeights(one.tensors))
    with torch.no_grad():
        dense = model.logits(model(token_ids, CausalContext([40])))
    assert torch.equal(one.logits([40], token_ids, index_topk=40), dense)


def tiny(**changes):
    """Sizes at which every linear is quantized."""
    return make_model.tiny_config(
        **{
            "model_type": "deepseek_v32",
            "index_topk": 12,
            "index_n_heads": 8,
            "index_head_dim": 128,
            **changes,
        }
    )


SHARED = {"model_type": "glm_moe_dsa", "index_topk_pattern": "FSF"}


def written(path, **changes):
    return make_model.write_dense(path / "model", tiny(**changes), random_tensors(tiny(**changes)))


@pytest.mark.parametrize(("changes", "cache"), [({}, None), ({}, "int8"), (SHARED, None)])
def test_prompts_in_chunks_and_steps_are_the_whole_text(changes, cache, tmp_path):
    """Two sequences in one paged cache, over the blocks of both, by prompts, by steps and by both
    in one pass."""
    source = written(tmp_path, **changes)
    loaded = load_model(source, device="cpu", dtype="bfloat16", cache=cache)
    texts = [torch.arange(5, 75), torch.arange(200, 240)]
    with torch.inference_mode():
        whole = [
            loaded.model(text, CausalContext([len(text)], codes=loaded.codes)).float()
            for text in texts
        ]
        paged, found = loaded.new_cache(6), [[], []]
        blocks = [torch.tensor([2, 4]), torch.tensor([5, 1])]
        for start, stop in ((0, 9), (9, 33)):
            chunks = [Chunk(start, stop - start, one) for one in blocks]
            out = loaded.model(
                torch.cat([text[start:stop] for text in texts]), PrefillContext(paged, chunks)
            )
            for one, part in zip(found, out.split(stop - start)):
                one.append(part)
        for place in range(33, 40):
            rows = torch.tensor([place, place])
            slots = torch.stack([one[place // 64] * 64 + place % 64 for one in blocks])
            steps = DecodeContext(paged, rows, torch.stack(blocks).int(), slots, [place + 1] * 2)
            out = loaded.model(torch.stack([text[place] for text in texts]), steps)
            for one, part in zip(found, out.split(1)):
                one.append(part)
        step = DecodeContext(
            paged, torch.tensor([40]), blocks[0][None].int(), blocks[0][:1] * 64 + 40, [41]
        )
        mixed = MixedContext(step, PrefillContext(paged, [Chunk(0, 40, torch.tensor([3]))]))
        out = loaded.model(torch.cat((texts[0][40:41], texts[1])), mixed)
        found[0].append(out[:1])
    again, both = out[1:].float(), [torch.cat(one).float() for one in found]
    for ours, expected in ((both[0], whole[0][:41]), (both[1], whole[1]), (again, whole[1])):
        apart = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert apart.median() < 0.05, apart
        assert (apart < 0.3).float().mean() > 0.9, apart


def test_the_first_layer_shares_nothing():
    glm = tiny(model_type="glm_moe_dsa", num_hidden_layers=3)
    make = find_architecture(glm).Config.from_dict
    assert make({**glm, "index_topk_pattern": "FFS"}).indexer_types[2] == "shared"
    with refused("first layer"):
        make({**glm, "index_topk_pattern": "SFF"})


def test_a_layer_that_shares_is_not_computed_alone_on_long_texts():
    one = Case(*CASES["glm_moe_dsa-shared"])
    architecture, config, weights = opened(one.config, one.tensors)
    layer = architecture.DecoderLayer(config, 1, weights)
    layer.attend(torch.randn(7, 64), CausalContext([7]))
    with refused("at most 7 tokens"):
        layer.attend(torch.randn(8, 64), CausalContext([8]))


def test_a_calibration_on_longer_texts_is_refused_before_it_begins(tmp_path):
    source = written(tmp_path, **SHARED)
    recipe = Recipe(scheme="awq-w4a16", seq_len=13)
    with refused("12 at most"):
        quantized(source, tmp_path / "out", recipe)
    quantized(source, tmp_path / "out", Recipe(scheme="rtn-w4a16", seq_len=13))
