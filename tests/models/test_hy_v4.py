"""Hy4-preview against transformers, in float32 on tiny random models, and over a cache, however a
text is cut."""

import json
import random
import re

import make_model
import pytest
import torch
from cut_texts import furthest_from_whole
from engines import check_same_answers
from plain_weights import PlainWeights
from tiny_models import CASES as TABLES
from tiny_models import write
from torch.nn import functional as F
from transformers_peers import GATED, hy_v4
from ulp_bound import assert_near, movement

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.repair import repair
from quantkit.executor.weights.load import load_model
from quantkit.grids.base import dequantize
from quantkit.grids.schemes import SCHEMES
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.hyper_connections import expand_streams, pack_streams, unpack_streams
from quantkit.models.stored_parameters import read_model
from quantkit.quantization.run import quantize

CASES = TABLES["hy_v4_cases"]
LENGTHS = [40, 7, 1]
"""Texts longer than what is selected, as long, and shorter."""
TOKEN_IDS = torch.randint(1, 211, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
SHARED = {"indexer_types": ["full", "shared", "full"], "index_topk": 32, "index_n_heads": 24}


def logits_of(config_dict, tensors):
    architecture = find_architecture(config_dict)
    model = architecture.Model(architecture.Config.from_dict(config_dict), PlainWeights(tensors))
    return model.logits(model(TOKEN_IDS, CausalContext(LENGTHS)))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Of the whole stack, and layer by layer."""
    peer, config_dict, tensors = hy_v4({**GATED, **CASES[case]})
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)

    def stated():
        return torch.cat([peer(own[None]).logits[0] for own in TOKEN_IDS.split(LENGTHS)])

    with torch.no_grad():
        expected, moved = stated(), movement(stated, peer.parameters())
        model = architecture.Model(config, PlainWeights(tensors))
        whole = model(TOKEN_IDS, CausalContext(LENGTHS))
        assert expected.abs().max() > 1
        assert_near(model.logits(whole), expected, moved)
        seeing_all = logits_of({**config_dict, "index_topk": 40}, tensors)
        assert (seeing_all - expected).abs().max() > 1e-2, "the selection did nothing"
        hidden = pack_streams(expand_streams(model.embedding[TOKEN_IDS], model.count), TOKEN_IDS)
        context = CausalContext(LENGTHS)
        for layer in model.layers:
            hidden = layer.feed_forward(layer.attend(hidden, context), context)
        streams = unpack_streams(hidden, model.count)[0]
        end, _ = model.end(streams, model.norm, config.rms_norm_eps)
    assert (end - whole).abs().max() < 1e-4
    table = {row.name: row.shape for row in architecture.parameters(config)}
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_the_release_rotates_pairs():
    """With the rotated channels of every head in another order it is transformers' model."""
    _, config_dict, tensors = hy_v4(GATED)
    heads = {"q_b_proj.weight": 4, "indexer.wq_b.weight": 8}
    ends = (*heads, "kv_a_proj_with_mqa.weight", "indexer.wk.weight")
    ends += ("k_norm.weight", "k_norm.bias")
    apart = GATED["qk_rope_head_dim"] // 2

    def reordered(name, tensor):
        if not name.endswith(ends):
            return tensor
        own = next((count for end, count in heads.items() if name.endswith(end)), 1)
        plain, turned = tensor.unflatten(0, (own, -1)).split(
            [len(tensor) // own - 2 * apart, 2 * apart], dim=1
        )
        pairs = turned.unflatten(1, (2, apart)).transpose(1, 2).flatten(1, 2)
        return torch.cat((plain, pairs), dim=1).flatten(0, 1)

    release = {key: value for key, value in config_dict.items() if key != "rope_interleave"}
    ours = {name: reordered(name, tensor) for name, tensor in tensors.items()}
    with torch.no_grad():
        expected = logits_of(config_dict, tensors)
        assert (logits_of(release, ours) - expected).abs().max() < 1e-4 * expected.abs().max()
        assert (logits_of(release, tensors) - expected).abs().max() > 1e-2


def test_the_mtp_layer_has_one_stream_and_reads_the_normed_output():
    """As vLLM has it (hy_v4/nvidia/mtp.py), of transformers' modules: eh_proj of both norms side by
    side, a layer whose sublayers are added as they are, with an indexer of its own, its own norm,
    the main model's head. vLLM takes the embedding of a text's first token for zeros."""
    peer, config_dict, tensors = hy_v4({**GATED, "indexer_types": None, "num_hidden_layers": 6})
    config_dict |= {"num_hidden_layers": 5, "num_nextn_predict_layers": 1}
    for kinds in ("layer_types", "mlp_layer_types", "indexer_types"):
        config_dict[kinds] = config_dict[kinds][:5]
    architecture, hidden = find_architecture(config_dict), config_dict["hidden_size"]
    config = architecture.Config.from_dict(config_dict)
    p, eps = "model.mtp_layers.0", config.rms_norm_eps
    own = {
        name.replace("model.layers.5", p): tensor
        for name, tensor in tensors.items()
        if ".layers.5." in name and ".hc_" not in name
    }
    for name in ("enorm", "hnorm", "final_layernorm"):
        own[f"{p}.{name}.weight"] = 1 + torch.randn(hidden) / 4
    own[f"{p}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    block, head = peer.model.layers[5], tensors["lm_head.weight"]
    token_ids, state = torch.randint(1, 211, (31,)), torch.randn(31, hidden)
    embedding = tensors["model.embed_tokens.weight"]

    def normed(x, name):
        return F.rms_norm(x, (hidden,), own[f"{p}.{name}.weight"], eps)

    def stated():
        both = torch.cat((normed(embedding[token_ids], "enorm"), normed(state, "hnorm")), dim=-1)
        x = (both @ own[f"{p}.eh_proj.weight"].T)[None]
        mask = torch.full((31, 31), -torch.inf).triu(1)[None, None]
        turned = peer.model.rotary_emb(x, torch.arange(31)[None])
        x = x + block.self_attn(block.input_layernorm(x), turned, mask)[0]
        x = x + block.mlp(block.post_attention_layernorm(x))
        return normed(x[0], "final_layernorm") @ head.T

    class Main:
        pass

    weights, main = PlainWeights(tensors | own), Main()
    main.embedding, main.head = embedding, weights.linear("lm_head")
    mtp = architecture.MtpLayer(config, weights)
    mtp.follow(main)
    with torch.no_grad():
        found = mtp.logits(mtp(token_ids, state, CausalContext([31])))
        assert_near(found, stated(), movement(stated, peer.parameters()))
    assert {row.name for row in architecture.parameters(config) if row.mtp} == {*own}


def test_a_text_is_the_same_however_it_is_cut(tmp_path, monkeypatch):
    """Latents are cached as they are, not in 16 bits, by which experts would change. Of 24 heads no
    score is 0."""
    monkeypatch.setattr("quantkit.executor.weights.load.cached_dtype", lambda dtype: dtype)
    path = write(tmp_path / "model", "hy_v4", **SHARED)
    loaded = load_model(path, device="cpu", dtype="float32")
    assert furthest_from_whole(loaded, random.Random(4)) < 1e-4


def test_answers_do_not_depend_on_how_they_are_computed(tmp_path):
    """Prompts in chunks and beside steps, requests that make way for others, captured steps with
    drafts of the MTP layer, beginnings that requests share."""
    path = write(tmp_path / "model", "hy_v4", **SHARED)
    shared = {"prefix_cache": True, "prompt_lookup": 2}
    check_same_answers(path, (True, {"draft_length": 1}), (False, shared))


def test_a_cache_of_codes_is_as_it_is_simulated(tmp_path, monkeypatch):
    """Keys of the indexer and rotated ones as they are, not in 16 bits, by which others would be
    selected."""
    for user in ("executor.weights.load", "models.context"):
        monkeypatch.setattr(f"quantkit.{user}.cached_dtype", lambda dtype: dtype)
    path = write(tmp_path / "model", "hy_v4", **SHARED)
    loaded = load_model(path, device="cpu", dtype="float32", cache="int8")
    assert furthest_from_whole(loaded, random.Random(4), loaded.codes) < 1e-3
    with torch.inference_mode():
        text = torch.arange(90)
        plain, coded = (
            loaded.model(text, CausalContext([90], codes=codes)) for codes in (None, loaded.codes)
        )
    assert (plain - coded).abs().max() > 5e-2


def stacked(tensors):
    """With the experts of a layer in two tensors each."""
    found = {name: one for name, one in tensors.items() if ".experts." not in name}
    for mlp in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        each = [
            [tensors[f"{mlp}.experts.{expert}.{side}_proj.weight"] for expert in range(4)]
            for side in ("gate", "up", "down")
        ]
        gates, ups, downs = map(torch.stack, each)
        found[f"{mlp}.experts.gate_up_proj"] = torch.cat((gates, ups), dim=1)
        found[f"{mlp}.experts.down_proj"] = downs
    return found


def test_the_layout_of_the_release_and_that_of_transformers(tmp_path):
    """Experts of a layer in two tensors; transformers writes other names than it reads."""
    path = write(tmp_path / "plain", "hy_v4")
    plain = Checkpoint.open(path)
    tensors = {name: plain.read(name) for name in plain.tensors}
    release = stacked(tensors)
    moved = {
        re.sub(
            r"(\.hc_(?:attn|mlp)_layer|\.hc_head)(\.hc_pre)?\.",
            r".hc_pre\1.",
            re.sub(r"\.mlp\.(shared_experts\.)?gate_proj", r".mlp.\1linear_gate", name),
        ): one
        for name, one in release.items()
    }
    assert len({*moved} - {*release}) > 20
    for number, layout in enumerate((release, moved)):
        made = make_model.write_dense(tmp_path / str(number), plain.config, layout)
        found = Checkpoint.open(made)
        rows = read_model(found).rows
        assert {row.name for row in rows} == {*tensors}
        assert all(torch.equal(found.read(row.name), tensors[row.name]) for row in rows)


def test_the_release_in_mxfp8_is_read_to_the_bit(tmp_path):
    """E4M3 codes and exponents of 32 inputs each, stacked as the experts are; gates, heads of the
    indexer and what is outside the layers in 16 bits."""
    path = write(tmp_path / "plain", "hy_v4")
    plain = Checkpoint.open(path)
    rng, rows = torch.Generator().manual_seed(5), read_model(plain).rows
    kept, codes, exponents, expected = {}, {}, {}, {}
    for row in rows:
        tensor = plain.read(row.name)
        if row.role not in ("linear", "kv_b", "indexer") or "linear_gate" in row.name:
            kept[row.name] = expected[row.name] = tensor
            continue
        shape = (len(tensor), tensor.shape[1] // 32)
        codes[row.name] = (tensor * 512).to(torch.float8_e4m3fn)
        exponents[row.name] = torch.randint(115, 121, shape, generator=rng, dtype=torch.uint8)
        scales = torch.exp2(exponents[row.name].float() - 127).repeat_interleave(32, dim=1)
        expected[row.name] = codes[row.name].float() * scales
    scales = {
        f"{name.removesuffix('_scale')}_scale": one for name, one in stacked(exponents).items()
    }
    plain_ones = ["lm_head", "*.linear_gate", "*.weights_proj", "*.mlp.gate", "*.eh_proj"]
    block = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": plain_ones}
    config = {**plain.config, "quantization_config": block}
    made = make_model.write_dense(tmp_path / "fp8", config, kept | stacked(codes) | scales)
    found = Checkpoint.open(made)
    assert {row.name for row in read_model(found).rows} == {row.name for row in rows}
    for row in rows:
        read = (
            dequantize(found.weight(row.module))
            if row.module in found.linears
            else found.read(row.name)
        )
        assert torch.equal(read.float(), expected[row.name].float()), row.name
    quantize(made, tmp_path / "out", SCHEMES["rtn-w4a16"], "auto", Recipe(scheme="rtn-w4a16"))
    found = diagnose(str(tmp_path / "out"), source=str(made), depth="tensors").findings.found
    assert not [one for one in found if one.severity == "error"]


def test_a_damaged_config_is_found_and_repaired(tmp_path):
    """By texts that its layers, which share an indexer, see whole."""
    path = write(tmp_path / "model", "hy_v4", **SHARED)
    quantize(path, tmp_path / "out", SCHEMES["rtn-w4a16"], "auto", Recipe(scheme="rtn-w4a16"))
    file = tmp_path / "out/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rope_interleave": False, "hc_magnitude": 1.0}))
    found = diagnose(str(tmp_path / "out"), source=str(path), depth="behaviour")
    assert "rope.interleaved, hc_magnitude" in [one.where for one in found.findings.found]
    repair(found, tmp_path / "repaired", str(path))
    again = diagnose(str(tmp_path / "repaired"), source=str(path))
    assert not again.findings.has("config-differs")
