"""What quantkit writes of good models is good by check, without and with the source: every scheme in
every format, of models that are padded, tied, biased, with one key-value head, heads and sizes of odd
numbers, stacked experts, towers, and resized vocabularies."""

import itertools

import good_checkpoints
import make_model
import pytest
import torch
from quantized import quantized
from sample_sizes import sized
from tiny_models import CONFIGS
from torch import Tensor

from quantkit.calibrate.recipe import Recipe
from quantkit.diagnosis.diagnose import diagnose
from quantkit.grids.schemes import SCHEMES
from quantkit.models import find_architecture
from quantkit.quantization import quantize

Tensors = dict[str, Tensor]
_QWEN3 = good_checkpoints.QWEN3 | {"num_hidden_layers": 2, "hidden_size": 128}
_QWEN2 = _QWEN3 | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def padded(share):
    """The last units of every feed-forward are zeros."""

    def pad(tensors):
        for name, value in tensors.items():
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                value[int(len(value) * (1 - share)) :] = 0
            elif name.endswith("down_proj.weight"):
                value[:, int(value.shape[1] * (1 - share)) :] = 0

    return pad


def resized(tensors):
    """Rows after the tokenizer's, all zeros or all their mean, as resize_token_embeddings writes."""
    tensors["model.embed_tokens.weight"][320:] = tensors["model.embed_tokens.weight"][:320].mean(0)
    tensors["lm_head.weight"][320:] = 0


def same(tensors):
    pass


MODELS = {
    "padded by 0.4 %": (_QWEN3 | {"intermediate_size": 512}, padded(0.004)),
    "padded by 8 %": (_QWEN2 | {"intermediate_size": 768}, padded(1 / 12)),
    "padded by 33 %": (_QWEN3 | {"intermediate_size": 384}, padded(1 / 3)),
    "padded experts": (good_checkpoints.QWEN3_MOE | {"num_hidden_layers": 2}, padded(1 / 4)),
    "tied": (_QWEN3 | {"tie_word_embeddings": True}, same),
    "biased": (_QWEN2, same),
    "one key-value head": (_QWEN3 | {"num_key_value_heads": 1, "head_dim": 32}, same),
    "odd heads": (_QWEN3 | {"num_attention_heads": 3, "num_key_value_heads": 3}, same),
    "odd sizes": (_QWEN3 | {"intermediate_size": 352, "head_dim": 40}, same),
    "stacked experts": (
        CONFIGS["qwen3_5_moe"] | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
        same,
    ),
    "latent attention": (make_model.tiny_config(num_hidden_layers=2), same),
    "resized": (_QWEN3 | {"vocab_size": 384}, resized),
}
WRITTEN = [(scheme, format) for scheme in SCHEMES for format in SCHEMES[scheme].formats]
CELLS = [
    (model, written)
    for model, written in itertools.product(MODELS, WRITTEN)
    if (written[0] != "int4-w4a8" or model in ("padded experts", "latent attention"))
    and (written[0] != "int8-a8w8c8" or model != "stacked experts")
    and (written != ("fp8-block-w8a8", "fp8-block") or model != "odd sizes")
]
"""Of 4-bit weights and 8-bit inputs there are routed experts alone; a cache of 8 bits has every layer;
no linear of odd sizes has blocks."""


@pytest.mark.parametrize(("model", "written"), CELLS[:: sized(37, 1)], ids=str)
def test_an_output_is_good(model, written, tmp_path):
    config, change = MODELS[model]
    scheme, format = written
    tensors = good_checkpoints.random_weights(config)
    architecture = find_architecture(config)
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        tensors[row.name] -= row.gain_offset
    change(tensors)
    source = make_model.write_dense(tmp_path / "source", config, tensors)
    recipe = Recipe(scheme=scheme, samples=16, held_out=4, seq_len=64, scale_points=3)
    if "experts" in model and "drift" in SCHEMES[scheme].methods:
        # Experts at random are chosen at random: what drift makes up for is more than rounding.
        recipe = recipe.with_given(methods=("awq", "gptq"))
    torch.manual_seed(0)
    quantized(source, tmp_path / "out", recipe, format)
    for given in (None, str(source)):
        found = diagnose(str(tmp_path / "out"), source=given, depth="tensors").findings
        assert [one for one in found.found if one.severity != "note"] == [], found.to_json()


@pytest.mark.parametrize("gain", [1e-3, 1.0])
def test_columns_count_by_what_they_read(gain, tmp_path):
    """Of a column whose input is next to nothing calibrated rounding may leave anything."""
    tensors = good_checkpoints.random_weights(_QWEN3)
    tensors["model.layers.0.input_layernorm.weight"][:8] = gain
    source = make_model.write_dense(tmp_path / "source", _QWEN3, tensors)
    for name in ("q", "k", "v"):
        w = tensors[f"model.layers.0.self_attn.{name}_proj.weight"]
        w[:, :8] = w[:, :8].flip(0)
    other = make_model.write_dense(tmp_path / "other", _QWEN3, tensors)
    scheme = SCHEMES["rtn-w4a16"]
    quantize(other, tmp_path / "out", scheme, "auto", Recipe(scheme=scheme.name), device="cpu")
    found = diagnose(str(tmp_path / "out"), source=str(source), depth="tensors").findings
    assert found.has("error-large") == (gain == 1.0), found.to_json()
