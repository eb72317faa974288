"""Hy4-preview against transformers, in float32 on tiny random models, and as it is published."""

import re

import make_model
import pytest
import torch
from edited import edited
from quantized import quantized
from releases import check_read, fp8, stacked
from stated_logits import causal, check_logits, check_mtp, mtp_tensors, opened
from tiny_models import CASES as TABLES
from tiny_models import write
from transformers_peers import GATED, hy_v4

from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.repair import repair
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import read_model

CASES = TABLES["hy_v4_cases"]
LENGTHS = [40, 7, 1]
"""Texts longer than what is selected, as long, and shorter."""
TOKEN_IDS = torch.randint(1, 211, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
SHARED = {"indexer_types": ["full", "shared", "full"], "index_topk": 32, "index_n_heads": 24}


def logits_of(config_dict, tensors):
    architecture, config, weights = opened(config_dict, tensors)
    model = architecture.Model(config, weights)
    return model.logits(model(TOKEN_IDS, CausalContext(LENGTHS)))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    peer, config_dict, tensors = hy_v4({**GATED, **CASES[case]})
    _, _, logits = check_logits(peer, config_dict, tensors, LENGTHS, TOKEN_IDS)
    seeing_all = logits_of({**config_dict, "index_topk": 40}, tensors)
    assert (seeing_all - logits).abs().max() > 1e-2, "the selection did nothing"
    del config_dict["rope_interleave"]  # as the release has it, which rotates pairs
    assert find_architecture(config_dict).Config.from_dict(config_dict).rope.interleaved


def test_the_mtp_layer_has_one_stream_and_reads_the_normed_output():
    """vLLM's hy_v4/nvidia/mtp.py: a layer whose sublayers are added as they are, with an indexer of
    its own. vLLM takes the embedding of a text's first token for zeros."""
    peer, config_dict, tensors = hy_v4({**GATED, "indexer_types": None, "num_hidden_layers": 6})
    config_dict |= {"num_hidden_layers": 5, "num_nextn_predict_layers": 1}
    for kinds in ("layer_types", "mlp_layer_types", "indexer_types"):
        config_dict[kinds] = config_dict[kinds][:5]
    p, layer = "model.mtp_layers.0", peer.model.layers[5]
    own = mtp_tensors(p, config_dict["hidden_size"], "final_layernorm") | {
        name.replace("model.layers.5", p): tensor
        for name, tensor in tensors.items()
        if ".layers.5." in name and ".hc_" not in name
    }

    def block(x):
        turned = peer.model.rotary_emb(x, torch.arange(31)[None])
        x = x + layer.self_attn(layer.input_layernorm(x), turned, causal(31))[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    rows = check_mtp(peer, config_dict, tensors | own, p, "final_layernorm", block)
    assert rows == {*own}


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
    plain = Checkpoint.open(write(tmp_path / "plain", "hy_v4"))
    stored, exponents, worth = {}, {}, {}
    for row in read_model(plain).rows:
        stored[row.name] = worth[row.name] = plain.read(row.name)
        if row.role in ("linear", "kv_b", "indexer") and "linear_gate" not in row.name:
            stored[row.name], scale, worth[row.name] = fp8(worth[row.name], 1, 32)
            exponents[row.name] = scale.view(torch.uint8)
    scales = {
        f"{name.removesuffix('_scale')}_scale": one for name, one in stacked(exponents).items()
    }
    plain_ones = ["lm_head", "*.linear_gate", "*.weights_proj", "*.mlp.gate", "*.eh_proj"]
    block = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": plain_ones}
    config = {**plain.config, "quantization_config": block}
    made = make_model.write_dense(tmp_path / "fp8", config, stacked(stored) | scales)
    found = Checkpoint.open(made)
    assert {row.name for row in read_model(found).rows} == {*worth}
    check_read(found, worth)
    quantized(made, tmp_path / "out", "rtn-w4a16")
    found = diagnose(str(tmp_path / "out"), source=str(made), depth="tensors").findings.found
    assert not [one for one in found if one.severity == "error"]


def test_a_damaged_config_is_found_and_repaired(tmp_path):
    """By texts that its layers, which share an indexer, see whole."""
    path = write(tmp_path / "model", "hy_v4", **SHARED)
    quantized(path, tmp_path / "out", "rtn-w4a16")
    with edited(tmp_path / "out/config.json") as config:
        config |= {"rope_interleave": False, "hc_magnitude": 1.0}
    found = diagnose(str(tmp_path / "out"), source=str(path), depth="behaviour")
    assert "rope.interleaved, hc_magnitude" in [one.where for one in found.findings.found]
    repair(found, tmp_path / "repaired", str(path))
    again = diagnose(str(tmp_path / "repaired"), source=str(path))
    assert not again.findings.has("config-differs")
