"""GLM-5.3-Flash against transformers, in float32 on tiny random models, and over a cache, however a
text is cut."""

import random

import pytest
import torch
from cut_texts import furthest_from_whole
from plain_weights import PlainWeights
from refused import refused
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, write
from torch.nn import functional as F
from transformers_peers import POOLED, glm5_next
from ulp_bound import assert_near, movement

from quantkit.executor.weights.load import load_model
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.hyper_connections import expand_streams, pack_streams, unpack_streams

CASES = TABLES["glm5_next_cases"]
LENGTHS = [40, 7, 1]
"""Texts shorter and longer than a group of tokens, and than what is selected."""


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Of the whole stack, and layer by layer."""
    peer, config_dict, tensors = glm5_next({**POOLED, **CASES[case]})
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    token_ids = torch.randint(1, 211, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))

    def stated():
        return torch.cat([peer(own[None]).logits[0] for own in token_ids.split(LENGTHS)])

    with torch.no_grad():
        expected, moved = stated(), movement(stated, peer.parameters())
        model = architecture.Model(config, PlainWeights(tensors))
        whole = model(token_ids, CausalContext(LENGTHS))
        assert expected.abs().max() > 1
        assert_near(model.logits(whole), expected, moved)
        hidden = pack_streams(expand_streams(model.embedding[token_ids], model.count), token_ids)
        context = CausalContext(LENGTHS)
        for layer in model.layers:
            hidden = layer.feed_forward(layer.attend(hidden, context), context)
        streams = unpack_streams(hidden, model.count)[0]
        end, _ = model.end(streams, model.norm, config.rms_norm_eps)
    assert (end - whole).abs().max() < 1e-4
    table = {row.name: row.shape for row in architecture.parameters(config)}
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_the_mtp_layer_has_one_stream_and_reads_the_normed_output():
    """As vLLM has it (glm5next/nvidia/mtp.py), of transformers' modules: eh_proj of both norms side
    by side, a layer whose sublayers are added as they are, its own norm, the main model's head."""
    kinds = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    peer, config_dict, tensors = glm5_next({**POOLED, **kinds})
    text = config_dict["text_config"]
    text |= {name: kinds[name][:2] for name in ("layer_types", "mlp_layer_types")}
    text |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "layer_types": None}
    text["layer_types"] = ["indexed_attention", "linear_attention"]
    del text["indexer_types"]
    architecture, hidden = find_architecture(config_dict), text["hidden_size"]
    config = architecture.Config.from_dict(config_dict)
    p, eps = "model.language_model.layers.2", config.rms_norm_eps
    names = ("enorm", "hnorm", "shared_head.norm")
    own = {f"{p}.{name}.weight": 1 + torch.randn(hidden) / 4 for name in names}
    own[f"{p}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    block, head = peer.model.language_model.layers[2], tensors["lm_head.weight"]
    token_ids, state = torch.randint(1, 211, (31,)), torch.randn(31, hidden)
    embedding = tensors["model.language_model.embed_tokens.weight"]

    def normed(x, name):
        return F.rms_norm(x, (hidden,), own[f"{p}.{name}.weight"], eps)

    def stated():
        both = torch.cat((normed(embedding[token_ids], "enorm"), normed(state, "hnorm")), dim=-1)
        x = (both @ own[f"{p}.eh_proj.weight"].T)[None]
        mask = torch.ones(1, 31, dtype=torch.bool)
        x = x + block.self_attn(block.input_layernorm(x), attention_mask=mask)[0]
        x = x + block.mlp(block.post_attention_layernorm(x))
        return normed(x[0], "shared_head.norm") @ head.T

    class Main:
        pass

    weights, main = PlainWeights(tensors | own), Main()
    main.embedding, main.head = embedding, weights.linear("lm_head")
    mtp = architecture.MtpLayer(config, weights)
    mtp.follow(main)
    with torch.no_grad():
        found = mtp.logits(mtp(token_ids, state, CausalContext([31])))
        assert_near(found, stated(), movement(stated, peer.parameters()))
    rows = {row.name for row in architecture.parameters(config) if row.mtp}
    assert rows == {name for name in tensors | own if name.startswith(p) and ".hc_" not in name}


def test_a_text_is_the_same_however_it_is_cut(tmp_path, monkeypatch):
    """Latents are cached as they are, not in 16 bits, by which experts would change. Of 24 heads no
    score is 0."""
    monkeypatch.setattr("quantkit.executor.weights.load.cached_dtype", lambda dtype: dtype)
    text = {**CONFIGS["glm5_next"]["text_config"], "index_topk": 32, "index_n_heads": 24}
    path = write(tmp_path / "model", "glm5_next", text_config=text)
    loaded = load_model(path, device="cpu", dtype="float32")
    assert furthest_from_whole(loaded, random.Random(4)) < 1e-4


def test_groups_that_do_not_fill_a_block_are_computed_and_not_served(tmp_path):
    text = {**CONFIGS["glm5_next"]["text_config"], "index_topk": 12, "index_kpool": 3}
    with refused("index keys of 3 tokens each do not fill blocks of 64"):
        load_model(write(tmp_path / "model", "glm5_next", text_config=text), device="cpu")
