"""Kimi-K2 is DeepSeek-V3 in other numbers; in K2.5 and K2.6 it is the text model, and everything
beside it is copied."""

import json

import make_model
import pytest
import torch
from packed_model import write_packed
from quantized import quantized
from refused import refused
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.formats import compressed_int4
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.grids.int_groups import IntGrid
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext

TEXT = make_model.tiny_config(
    model_type="kimi_k2", num_hidden_layers=2, n_group=1, topk_group=1, num_nextn_predict_layers=0
)
WHOLE = {
    "model_type": "kimi_k25",
    "text_config": TEXT,
    "vision_config": {"hidden_size": 64},
    "vocab_size": TEXT["vocab_size"],
}
VISION = {
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": (128, 64),
    "mm_projector.proj.0.weight": (256, 128),
}


def logits(path):
    loaded = load_model(path, device="cpu", dtype="float32")
    with torch.inference_mode():
        return loaded.model.logits(loaded.model(torch.arange(5, 35), CausalContext([30])))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same weights as a DeepSeek-V3, whose logits are held against transformers, and as the
    text model of K2.5."""
    path, tensors = tmp_path_factory.mktemp("kimi"), make_model.random_tensors(TEXT)
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    vision = {name: torch.randn(shape).bfloat16() for name, shape in VISION.items()}
    text = make_model.write_dense(path / "text", {**TEXT, "model_type": "deepseek_v3"}, tensors)
    return text, make_model.write_dense(path / "whole", WHOLE, named | vision)


def test_the_text_model_computes_what_deepseek_v3_does(sources):
    expected, found = map(logits, sources)
    assert torch.equal(found, expected)


def test_what_is_beside_the_text_model_is_copied(sources, tmp_path):
    report = quantized(sources[1], tmp_path / "out", "rtn-w4a16")
    written, source = Checkpoint.open(report.out), Checkpoint.open(sources[1])
    assert all(torch.equal(written.read(name), source.read(name)) for name in VISION)
    assert "language_model.model.layers.1.mlp.experts.3.down_proj" in written.linears
    assert "vision_tower.encoder.blocks.N.mlp.fc0.weight" in report.coverage.left
    expected = logits(sources[1])
    assert (logits(report.out) - expected).norm() < 0.5 * expected.norm()


def test_int4_in_groups_of_32_is_read_as_kimi_publishes_it(sources, tmp_path):
    """Experts alone, the quantization told inside text_config."""
    tensors, grid = make_model.random_tensors(TEXT), IntGrid(4, 32, symmetric=True)
    text = {**TEXT, "model_type": "deepseek_v3"}
    packed = write_packed(
        tmp_path / "packed",
        text,
        tensors,
        compressed_int4.FORMAT,
        grid,
        lambda row: row.expert is not None,
    )
    config = json.loads((packed / "config.json").read_text())
    stored = {
        f"language_model.{name}": value
        for file in packed.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(stored, whole / "model.safetensors")
    left = [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head",
    ]
    block = {**config.pop("quantization_config"), "ignore": left}
    (whole / "config.json").write_text(
        json.dumps({**WHOLE, "text_config": {**TEXT, "quantization_config": block}})
    )
    assert Checkpoint.open(whole).grid == grid
    assert torch.equal(logits(whole), logits(packed))


def test_what_is_not_computed_is_refused():
    architecture = find_architecture(WHOLE)
    with refused("text_config"):
        architecture.Config.from_dict({"model_type": "kimi_k25"})
    with refused("MTP"):
        architecture.Config.from_dict(
            {**WHOLE, "text_config": {**TEXT, "num_nextn_predict_layers": 1}}
        )
