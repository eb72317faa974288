"""What a linear is, told by transformers' modules: the same as the tables say of known
architectures, and right where names mislead."""

import importlib.util
import re

import pytest
from make_model import write_dense
from quantized import quantized
from refused import refused
from tiny_models import CASES as TABLES
from transformers_peers import CASES, SHARED, checkpoint_tensors, random_peer

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.schemes import SCHEMES
from quantkit.models import find_architecture
from quantkit.models.hf_traced.module_tree import read_tree
from quantkit.quantization.mixed_precision import Mixture
from quantkit.quantization.run import quantize

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}


@pytest.mark.parametrize(
    "case", ["llama", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2"]
)
def test_it_finds_the_linears_of_the_table(case):
    kind, extra = CASES[case]
    config = random_peer(kind, extra).config.to_dict()
    architecture = find_architecture(config)
    table = {
        row.name
        for row in architecture.parameters(architecture.Config.from_dict(config))
        if row.role == "linear"
    }
    assert read_tree(config).linears == table


@pytest.mark.parametrize(("model_type", "extra", "found", "left"), TABLES["left"])
def test_what_only_looks_like_one_is_left(model_type, extra, found, left):
    tree = read_tree({"model_type": model_type, **SHARED, **extra})
    assert tree.linears is not None, tree.why
    names = {re.sub(r"\.\d+\.", ".N.", name) for name in tree.linears}
    assert any(found in name for name in names) == bool(found), names
    assert not any(left in name or "lm_head" in name or "embed" in name for name in names), names


@pytest.mark.parametrize(
    ("model_type", "architectures", "begins"),
    [
        ("qwen3_5", ["Qwen3_5ForConditionalGeneration"], "model.language_model.layers."),
        ("qwen3_5", ["Qwen3_5ForCausalLM"], "model.layers."),
        (
            "modernbert-decoder",
            ["ModernBertDecoderForCausalLM"],
            "model.layers.",
        ),  # what it calls its decoder is its head
    ],
)
def test_names_are_those_of_the_class_that_wrote_the_checkpoint(model_type, architectures, begins):
    """Of some kinds transformers has one class with a vision tower and one of the text model
    alone."""
    text = (
        {"text_config": dict(SHARED)} if model_type == "qwen3_5" else {**SHARED, "pad_token_id": 0}
    )
    tree = read_tree({"model_type": model_type, "architectures": architectures, **text})
    assert tree.linears, tree.why
    assert all(name.startswith(begins) for name in tree.linears), tree.linears


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "never"}, "does not know 'never'"),
        ({"model_type": "llama", **SHARED, "num_attention_heads": "four"}, "does not build it"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_where_there_is_no_tree_it_says_why(config, why):
    assert why in read_tree(config).why


def test_no_guess_takes_the_place_of_transformers(monkeypatch):
    """Other tensors would be rounded than with it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused(r"transformers, which .*, is not installed; pip install"):
        read_tree({"model_type": "gemma2", **SHARED})


def written(path, kind, extra):
    peer = random_peer(kind, {**WIDE, **extra})
    return write_dense(
        path,
        peer.config.to_dict(),
        {name: tensor.bfloat16().clone() for name, tensor in checkpoint_tensors(peer).items()},
    )


def test_an_unknown_architecture_is_quantized_by_its_tree_and_the_share_is_told(tmp_path):
    source = written(tmp_path / "granite", "Granite", {"tie_word_embeddings": False})
    told = []
    recipe = Recipe(scheme="rtn-w4a16")
    report = quantized(
        source, tmp_path / "out", recipe, on_event=lambda event: told.append(str(event))
    )
    assert report.coverage.share == 1.0
    assert any("transformers' modules" in line for line in told)
    left = "model.embed_tokens.weight (0.027 M), lm_head.weight (0.027 M)"
    assert dict(report.facts())["quantized"].endswith(f"left at 16 bits: {left}")
    ignoring = Mixture(ignore=("re:.*mlp.*", "re:.*layers.0.*"))
    fewer = quantized(source, tmp_path / "fewer", recipe, mixture=ignoring)
    assert fewer.coverage.share < recipe.least_quantized, "what is left out was asked for"


def test_a_model_that_would_hardly_be_quantized_is_refused_unless_asked_for(tmp_path):
    """DBRX: experts stacked in one matrix, which are most of it, and no linear of transformers."""
    attention = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}
    experts = {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2}
    sizes = {
        "d_model": 128,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": attention,
        "ffn_config": experts,
    }
    source = written(tmp_path / "dbrx", "Dbrx", sizes)
    run = (SCHEMES["rtn-w4a16"], "auto")
    with refused(
        r"M weights, \d+%; left at 16 bits: "
        r"transformer\.blocks\.N\.ffn\.experts.*least_quantized"
    ):
        quantize(source, tmp_path / "out", *run, Recipe(scheme="rtn-w4a16"))
    assert (
        quantize(
            source, tmp_path / "out", *run, Recipe(scheme="rtn-w4a16", least_quantized=0.1)
        ).coverage.share
        < 0.5
    )


def test_experts_that_are_published_in_one_tensor_are_cut_up(tmp_path):
    source = written(
        tmp_path / "model",
        "GraniteMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    )
    report = quantized(source, tmp_path / "out", "rtn-w4a16")
    assert report.coverage.share > 0.98
    one = "model.layers.1.block_sparse_moe.experts.3"
    before, out = Checkpoint.open(source), Checkpoint.open(tmp_path / "out")
    gate_up, down = (
        before.read(f"model.layers.1.block_sparse_moe.{name}_linear.weight")[3].float()
        for name in ("input", "output")
    )
    for name, whole in (
        ("gate_proj", gate_up[:128]),
        ("up_proj", gate_up[128:]),
        ("down_proj", down),
    ):
        assert (
            dequantize(out.weight(f"{one}.{name}")) - whole
        ).square().sum() < 0.02 * whole.square().sum()
