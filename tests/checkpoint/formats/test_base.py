"""The ignore list: short, complete, and never catching a quantized module."""

import fnmatch

from quantkit.checkpoint.formats.base import IgnoreSpelling, ignore_list, output_config

_SUBSTRING = IgnoreSpelling(
    layer=lambda prefix: f"{prefix}.",
    tails=lambda tail: (tail, f"{tail}."),
    name=lambda module: module,
    matches=lambda entry, module: entry in module,
)
_WILDCARD = IgnoreSpelling(
    layer=lambda prefix: f"{prefix}.*",
    tails=lambda tail: (f"*.{tail}",),
    name=lambda module: module,
    matches=lambda entry, module: fnmatch.fnmatchcase(module, entry),
)


def test_endings_and_whole_layers_are_one_entry_each():
    quantized = [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj"
        for layer in range(3)
        for expert in range(4)
    ]
    plain = [
        "lm_head",
        *(f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(4)),
        "model.layers.3.mlp.experts.0.up_proj",
    ]
    assert ignore_list(quantized, plain, _WILDCARD) == [
        "model.layers.3.*",
        "lm_head",
        "*.self_attn.kv_b_proj",
    ]


def test_an_ending_that_would_catch_a_quantized_module_is_spelled_otherwise():
    assert ignore_list(
        ["model.layers.0.mlp.gate_proj"], ["model.layers.0.mlp.gate"], _SUBSTRING
    ) == ["mlp.gate."]
    quantized = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.gate"]
    plain = ["model.layers.1.mlp.up_proj", "model.layers.0.mlp.gate"]
    assert sorted(ignore_list(quantized, plain, _WILDCARD)) == sorted(plain)


def test_layer_6_does_not_catch_layer_61():
    entries = ignore_list(
        ["model.layers.61.mlp.up_proj"], ["model.layers.6.mlp.up_proj"], _WILDCARD
    )
    assert entries == ["model.layers.6.*"]
    assert not fnmatch.fnmatchcase("model.layers.61.mlp.up_proj", entries[0])


def test_output_config_replaces_the_quantization_and_leaves_the_source_alone():
    source = {"model_type": "x", "quantization_config": {"quant_method": "fp8"}}
    assert output_config(source, {}) == {"model_type": "x"}
    assert output_config(source, {"quant_method": "awq"}) == {
        "model_type": "x",
        "quantization_config": {"quant_method": "awq"},
    }
    assert source["quantization_config"] == {"quant_method": "fp8"}
