"""Calibration and executor ask the model's table what a tensor is: an architecture with other names
gives the same bits and outputs."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import make_model
import pytest
import quantize_job
import torch
from letters import write_letters
from torch import Tensor

from quantkit import models
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.models import deepseek_v3
from quantkit.models.context import CausalContext
from quantkit.models.decoder import DecoderLayer, Model
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

NAMES = {
    "self_attn": "att",
    "mlp.shared_experts": "moe.common",
    "mlp.experts": "moe.e",
    "mlp.gate": "moe.choose",
    "mlp": "ff",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "kv_a_proj_with_mqa": "wkv",
    "q_a_proj": "wq1",
    "q_b_proj": "wq2",
    "o_proj": "out",
    "input_layernorm": "n1",
    "post_attention_layernorm": "n2",
}
PATTERN = re.compile(r"\b(" + "|".join(map(re.escape, NAMES)) + r")\b")


def renamed(name: str) -> str:
    return PATTERN.sub(lambda match: NAMES[match[1]], name)


def translated(asked: Any) -> Any:
    """A name or a tuple of names in the other spelling; anything else as it is."""
    if isinstance(asked, tuple) and all(isinstance(one, str) for one in asked):
        return tuple(map(renamed, asked))
    return renamed(asked) if isinstance(asked, str) else asked


class Translated:
    """Weights that are asked by DeepSeek's names and answer by the other ones."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            return getattr(self.weights, method)(*map(translated, arguments))

        return ask


def parameters(config: deepseek_v3.Config) -> list[Parameter]:
    return [
        replace(row, name=renamed(row.name), fused=row.fused and f"{renamed(row.fused)}.fused")
        for row in deepseek_v3.parameters(config)
    ]


def scale_groups(config: deepseek_v3.Config, layer: int) -> list[ScaleGroup]:
    return [
        replace(
            group,
            producer=renamed(group.producer),
            consumers=tuple(map(renamed, group.consumers)),
            observe=renamed(group.observe),
        )
        for group in deepseek_v3.scale_groups(config, layer)
    ]


def decoder_layer(config: deepseek_v3.Config, layer: int, weights: Weights) -> DecoderLayer:
    return deepseek_v3.DecoderLayer(config, layer, Translated(weights))  # type: ignore[arg-type]


def model(config: deepseek_v3.Config, weights: Weights) -> Model:
    return deepseek_v3.Model(config, Translated(weights))  # type: ignore[arg-type]


@pytest.fixture
def architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """model_type "renamed": DeepSeek-V3 under other names."""
    module = ModuleType("quantkit.models.renamed")
    module.__dict__.update(
        Config=deepseek_v3.Config, DecoderLayer=decoder_layer, Model=model, MtpLayer=None
    )
    module.__dict__.update(parameters=parameters, scale_groups=scale_groups)
    monkeypatch.setitem(sys.modules, "quantkit.models.renamed", module)
    monkeypatch.setattr(models, "ARCHITECTURES", (*models.ARCHITECTURES, "renamed"))


def tensors_of(path: Path) -> Mapping[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def test_other_names_give_the_same_bits(architecture: None, tmp_path: Path) -> None:
    config = make_model.tiny_config(
        num_hidden_layers=2, **make_model.FEW_EXPERTS, num_nextn_predict_layers=0
    )
    tensors = make_model.random_tensors(config)
    text = write_letters(tmp_path / "calibration.txt")
    usual = make_model.write_dense(tmp_path / "usual", config, tensors)
    other = make_model.write_dense(
        tmp_path / "other",
        {**config, "model_type": "renamed"},
        {renamed(name): tensor for name, tensor in tensors.items()},
    )
    found = [quantize_job.run(path, text, tmp_path / f"{path.name}-out") for path in (usual, other)]
    expected, written = (tensors_of(report.out) for report in found)
    assert written.keys() == {renamed(name) for name in expected}
    assert any(".moe.e.3.w2." in name for name in written)
    for name, tensor in expected.items():
        assert torch.equal(written[renamed(name)].view(torch.uint8), tensor.view(torch.uint8)), name
    tokens = torch.arange(40, 80)
    hidden = [
        load_model(report.out, device="cpu", dtype="float32").model(tokens, CausalContext([40]))
        for report in found
    ]
    assert torch.equal(*hidden)
    assert found[1].findings.errors == {
        renamed(module): error for module, error in found[0].findings.errors.items()
    }
