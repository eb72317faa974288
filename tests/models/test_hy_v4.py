"""Hy4-preview against transformers, in float32 on tiny random models, and as it is published."""

import json
import re

import make_model
import pytest
import torch
from quantized import quantized
from stated_logits import causal, check_logits, check_mtp, mtp_tensors, opened
from tiny_models import CASES as TABLES
from tiny_models import write
from transformers_peers import GATED, hy_v4

from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.repair import repair
from quantkit.grids.base import dequantize
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
    quantized(made, tmp_path / "out", "rtn-w4a16")
    found = diagnose(str(tmp_path / "out"), source=str(made), depth="tensors").findings.found
    assert not [one for one in found if one.severity == "error"]


def test_a_damaged_config_is_found_and_repaired(tmp_path):
    """By texts that its layers, which share an indexer, see whole."""
    path = write(tmp_path / "model", "hy_v4", **SHARED)
    quantized(path, tmp_path / "out", "rtn-w4a16")
    file = tmp_path / "out/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rope_interleave": False, "hc_magnitude": 1.0}))
    found = diagnose(str(tmp_path / "out"), source=str(path), depth="behaviour")
    assert "rope.interleaved, hc_magnitude" in [one.where for one in found.findings.found]
    repair(found, tmp_path / "repaired", str(path))
    again = diagnose(str(tmp_path / "repaired"), source=str(path))
    assert not again.findings.has("config-differs")
