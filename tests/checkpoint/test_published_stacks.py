"""Experts that are published stacked, read as experts of their own: gpt-oss in 16 bits and in
MXFP4, against transformers."""

import itertools

import make_model
import pytest
import torch
import transformers
from greedy import greedy
from quantized import quantized
from refused import refused
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors
from transformers_peers import CASES, QWEN_3_5, checkpoint_tensors, random_peer, whole

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stacked_experts import expected_stacks
from quantkit.diagnosis.diagnose import diagnose
from quantkit.engines.check import check_checkpoint
from quantkit.grids.base import dequantize
from quantkit.models.stored_parameters import check_stored, read_model
from quantkit.quantization.convert import convert

CONFIG = make_model.CONFIGS["stacked"]
HIDDEN, WIDTH, EXPERTS = 64, 128, 4
STACKS = (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH))
NORMS = ("input_", "post_attention_")
PROMPTS = [[5, 9, 17, 40], list(range(20, 44))]
PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def test_experts_of_16_bits_are_those_of_transformers(tmp_path):
    peer = random_peer(*CASES["gpt_oss"])
    peer.save_pretrained(tmp_path)
    assert any(
        name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors")
    )
    checkpoint, expected = Checkpoint.open(tmp_path), checkpoint_tensors(peer)
    check_stored(checkpoint, read_model(checkpoint).rows)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    share, first = checkpoint.weight_slice("model.layers.1.mlp.experts.3.up_proj", "N", 32, 64)
    assert (first, share.tolist()) == (
        32,
        expected["model.layers.1.mlp.experts.3.up_proj.weight"][32:64].tolist(),
    )


def mxfp4_model(path):
    """A random gpt-oss as it is published, and its tensors."""
    rng = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens.weight": (320, HIDDEN), "lm_head.weight": (320, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for p in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{p}.{name}layernorm.weight": (HIDDEN,) for name in NORMS}
        for side, rows in (("q", 64), ("k", 32), ("v", 32), ("o", HIDDEN)):
            shapes |= {f"{p}.self_attn.{side}_proj.weight": (rows, 64)}
            shapes |= {f"{p}.self_attn.{side}_proj.bias": (rows,)}
        shapes |= {f"{p}.self_attn.sinks": (4,), f"{p}.mlp.router.weight": (EXPERTS, HIDDEN)}
        shapes |= {f"{p}.mlp.router.bias": (EXPERTS,)}
        for side, rows, _ in STACKS:
            shapes[f"{p}.mlp.experts.{side}_proj_bias"] = (EXPERTS, rows)
    held = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=rng) / shape[-1] ** 0.5
        held[name] = (drawn + ("norm" in name)).bfloat16()
    for layer, (side, rows, columns) in itertools.product(range(2), STACKS):
        name, blocks = (
            f"model.layers.{layer}.mlp.experts.{side}_proj",
            (EXPERTS, rows, columns // 32),
        )
        for part, low, high, shape in (
            ("blocks", 0, 256, (*blocks, 16)),
            ("scales", 119, 125, blocks),
        ):
            codes = torch.randint(low, high, shape, generator=rng, dtype=torch.uint8)
            held[f"{name}_{part}"] = codes
    block = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}
    described = {**CONFIG, "eos_token_id": 1, "quantization_config": block}
    return make_model.write_dense(path, described, held), held


def test_mxfp4_blocks_stand_for_what_transformers_makes_of_them(tmp_path):
    path, held = mxfp4_model(tmp_path / "model")
    checkpoint = Checkpoint.open(path)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        both, down = (
            _convert_moe_packed_tensors(
                held[f"{name}.{side}_proj_blocks"],
                held[f"{name}.{side}_proj_scales"],
                dtype=torch.float32,
            )
            for side in ("gate_up", "down")
        )
        for expert in range(4):
            sides = {
                "gate": both[expert].t()[::2],
                "up": both[expert].t()[1::2],
                "down": down[expert].t(),
            }
            for side, weight in sides.items():
                assert torch.equal(
                    dequantize(checkpoint.weight(f"{name}.{expert}.{side}_proj"), torch.float32),
                    weight,
                )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return mxfp4_model(tmp_path_factory.mktemp("models") / "model")[0]


def test_the_published_model_runs_and_converts(published, tmp_path):
    convert(published, tmp_path / "plain", dtype="float32")
    expected = greedy(tmp_path / "plain", PROMPTS, 8)
    assert greedy(published, PROMPTS, 8) == expected
    convert(published, tmp_path / "packed", format="compressed-tensors")
    assert greedy(tmp_path / "packed", PROMPTS, 8) == expected
    first, second = (Checkpoint.open(path) for path in (published, tmp_path / "packed"))
    for module in first.linears:
        ours, theirs = first.weight(module), second.weight(module)
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.exponent, theirs.exponent)


def test_transformers_loads_what_was_made_plain(published, tmp_path):
    """Of MXFP4 as published, and of int4 with every expert by itself."""
    recipe = Recipe(scheme="awq-w4a16", methods=(), group_size=32)
    quantized(published, tmp_path / "int4", recipe)
    for source in (published, tmp_path / "int4"):
        plain = convert(source, tmp_path / f"{source.name}-plain", dtype="float32").out
        loaded, facts = transformers.AutoModelForCausalLM.from_pretrained(
            plain, output_loading_info=True
        )
        assert not any(
            facts[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        tensors, checkpoint = checkpoint_tensors(loaded), Checkpoint.open(source)
        assert len([name for name in tensors if ".experts." in name]) == 2 * 4 * 6
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            held = (
                dequantize(checkpoint.weight(module))
                if module in checkpoint.linears
                else checkpoint.read(name)
            )
            assert torch.equal(tensor, held.float()), name


def test_experts_one_by_one_are_stacked_as_transformers_has_them(tmp_path):
    peer, config, tensors = whole(QWEN_3_5)
    make_model.write_dense(tmp_path / "apart", config | {"vocab_size": 320}, tensors)
    plain = convert(tmp_path / "apart", tmp_path / "plain", dtype="float32").out
    stored = {
        name: tensor
        for name, tensor in load_file(plain / "model-00001-of-00001.safetensors").items()
        if ".experts." in name
    }
    expected = {name: tensor for name, tensor in peer.state_dict().items() if ".experts." in name}
    assert len(expected) == 2 * 4
    assert stored.keys() == {
        name.replace("model.", "model.language_model.", 1) for name in expected
    }
    assert all(
        torch.equal(stored[name.replace("model.", "model.language_model.", 1)], tensor)
        for name, tensor in expected.items()
    )


def test_a_stack_of_which_an_expert_lacks_a_tensor_stays_apart():
    names = [f"mlp.experts.{e}.{side}_proj.weight" for e in range(2) for side in ("gate", "up")]
    (stack,) = expected_stacks(CONFIG, dict.fromkeys(names, (8, 4)))
    assert (stack.name, stack.stacked_shape) == ("mlp.experts.gate_up_proj", (2, 4, 16))
    assert not [*expected_stacks(CONFIG, dict.fromkeys(names[:-1], (8, 4)))]


def test_engines_and_the_checkup_know_it_as_it_is_published(published):
    assert check_checkpoint("vllm", Checkpoint.open(published)) == []
    with refused("vllm loads gpt_oss in mxfp4 only, not awq; use another engine"):
        quantized(published, published.parent / "no", "awq-w4a16", engine="vllm")
    assert diagnose(str(published), depth="tensors").findings.verdict != "bad"
