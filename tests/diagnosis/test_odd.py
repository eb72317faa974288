"""Unusual but valid checkpoints have no finding above a note: padded vocabularies, additional or
fewer files, experts without tokens, equal experts."""

import re

import faulty
import good_checkpoints
import make_model
import pytest
import torch
import transformers
from commands import command
from packed_model import rounded, write_packed
from quantized import quantized
from tiny_models import CONFIGS, random_tensors
from torch import Tensor

from quantkit.calibrate.recipe import Recipe
from quantkit.diagnosis.diagnose import diagnose
from quantkit.models import find_architecture

CONFIG = good_checkpoints.QWEN3_MOE | {"num_hidden_layers": 2, "num_experts": 4}


@pytest.fixture(scope="module")
def tensors():
    return good_checkpoints.random_weights(CONFIG)


def told(path, source=None):
    """Findings and their severities."""
    found = diagnose(str(path), source=source and str(source), depth="tensors").findings
    return {finding.name: finding.severity for finding in found.found}


def written(folder, tensors, format):
    source, made = good_checkpoints.packed(folder, CONFIG, [format], tensors)
    return made[format], source


def _leave_out(c):
    del c.files["generation_config.json"]
    c.config["dtype"] = c.config.pop("torch_dtype")
    described = c.json("tokenizer_config.json")
    del described["chat_template"]
    c.set_json("tokenizer_config.json", described)


def _add(c):
    def more(folder):
        (folder / "training_args.bin").write_bytes(b"0")
        (folder / "special_tokens_map.json").write_text("{}")

    c.broken["more"] = more
    c.config |= {"pad_token_id": -1, "auto_map": {"AutoConfig": "configuration.Config"}}
    c.set_json("generation_config.json", {"eos_token_id": [1, 2], "do_sample": True, "top_p": 1.0})
    c.tensors |= {
        f"{module}.bias": torch.zeros(linear.shape[0]) for module, linear in c.linears.items()
    }


@pytest.mark.parametrize("change", [_leave_out, _add], ids=lambda change: change.__name__)
def test_files_and_fields_may_differ(change, tensors, tmp_path):
    contents = faulty.Contents.of(written(tmp_path, tensors, "awq")[0])
    change(contents)
    assert told(contents.write(tmp_path / "odd")) == {}


@pytest.mark.parametrize("format", ["ct-int4", "awq", "modelopt"])
@pytest.mark.parametrize("size", [0.0, 1e-5])
def test_an_expert_without_tokens_is_a_note(size, format, tensors, tmp_path):
    small = dict(tensors)
    for name in tensors:
        if "layers.1.mlp.experts.2." in name:
            small[name] = tensors[name] * size
    path, source = written(tmp_path, small, format)
    for given in (None, source):
        assert set(told(path, given).values()) <= {"note"}


def test_experts_that_the_source_has_equal_are_no_fault(tensors, tmp_path):
    """A dense model's layer, taken for every expert, is how mixtures of experts may begin."""
    equal = {
        name: tensors[re.sub(r"experts\.\d+\.", "experts.0.", name)].clone() for name in tensors
    }
    path, source = written(tmp_path, equal, "ct-int4")
    assert "linears-equal" in told(path)
    assert told(path, source) == {}


def test_a_format_that_an_engines_profile_does_not_know_is_a_note(tensors, tmp_path):
    path, _ = written(tmp_path, tensors, "gptq")
    found = diagnose(str(path), engine="vllm").findings
    assert [(one.name, one.severity) for one in found.found] == [("engine-unknown", "note")]
    assert found.exit_code == 0


def test_a_linear_that_was_folded_on_both_sides_has_any_size(tensors, tmp_path):
    """AWQ divides up's rows and multiplies down's columns: only together are they the source's."""
    rng, folded = torch.Generator().manual_seed(0), dict(tensors)
    scale = torch.exp(1 + torch.randn(CONFIG["moe_intermediate_size"], generator=rng))
    for name in tensors:
        if name.endswith(".up_proj.weight"):
            folded[name] = (tensors[name].float() / scale[:, None]).bfloat16()
        elif name.endswith(".down_proj.weight"):
            folded[name] = (tensors[name].float() * scale).bfloat16()
    path = write_packed(tmp_path / "folded", CONFIG, folded, *good_checkpoints.FORMATS["ct-int8"])
    assert told(path, make_model.write_dense(tmp_path / "source", CONFIG, tensors)) == {}


def test_scales_that_were_folded_into_norms_around_one_are_no_fault(tmp_path):
    """Such a norm stores its gain minus 1, and a folded one has no fixed ratio to its source's."""
    config = CONFIGS["qwen3_next"] | {"architectures": ["Qwen3NextForCausalLM"]}
    architecture = find_architecture(config)
    stored = random_tensors(config)
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        stored[row.name] -= row.gain_offset
    source = make_model.write_dense(tmp_path / "source", config, stored)
    recipe = Recipe(scheme="awq-w4a16", samples=4, held_out=1, seq_len=32, scale_points=3)
    quantized(source, tmp_path / "out", recipe)
    assert told(tmp_path / "out", source) == {}


def test_scales_that_were_folded_into_a_bias_too_are_no_fault(tmp_path):
    """AutoAWQ moves them from an up projection with a bias, quantkit does not."""
    config = good_checkpoints.QWEN3 | {"num_hidden_layers": 2, "mlp_bias": True}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    plain = good_checkpoints.random_weights(config)
    source = make_model.write_dense(tmp_path / "source", config, plain)
    by = torch.rand(config["intermediate_size"], generator=torch.Generator().manual_seed(1)) + 1
    for name, value in plain.items():
        if ".up_proj." in name:
            plain[name] = (value.T / by).T.bfloat16()
        elif name.endswith(".down_proj.weight"):
            plain[name] = (value * by).bfloat16()
    path = write_packed(tmp_path / "awq", config, plain, *good_checkpoints.FORMATS["awq"])
    assert told(path, source) == {}


def test_a_tokenizer_that_was_saved_while_it_cut_texts_is_a_note(tensors, tmp_path):
    """AutoRound saves it so, with the length of its calibration."""
    path, source = written(tmp_path, tensors, "awq")
    contents = faulty.Contents.of(path)
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    contents.set_json("tokenizer.json", {**contents.json("tokenizer.json"), "truncation": cut})
    assert told(contents.write(tmp_path / "odd"), source) == {"tokenizer-cuts": "note"}


GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 320}
OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 320}
OPT |= {"hidden_size": 64, "activation_function": "relu"}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (GPT2, {"h.0.attn.c_attn": (384, 64), "h.0.attn.c_proj": (64, 64), "c_proj": (64, 256)}),
        (OPT, {"self_attn.q_proj": (64, 64), "fc1": (128, 64), "fc2": (64, 128)}),
    ],
    ids=["inputs first", "dead inputs"],
)
def test_what_other_classes_compute_is_no_fault(config, shapes, tmp_path):
    """GPT-2's matrices are stored inputs by outputs, and quantized the other way round. After a
    ReLU some inputs are 0 for all calibration tokens, and GPTQ zeroes their columns."""
    rng, plain, stored = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    format, grid = good_checkpoints.FORMATS["ct-int8"]
    for module, shape in shapes.items():
        weight = torch.randn(shape, generator=rng) / 8
        plain[f"layers.{module}.weight"] = weight.T if config is GPT2 else weight.clone()
        if module == "fc2":
            weight[:, [3, 20, 77, 90]] = 0
        stored |= format.pack(f"layers.{module}", rounded(weight, format, grid, weight.abs().max()))
    source = make_model.write_dense(tmp_path / "source", config, plain)
    block = {"quantization_config": format.config_block(grid, {}, [])}
    assert told(make_model.write_dense(tmp_path / "out", config | block, stored), source) == {}


@pytest.mark.parametrize("format", ["awq", "gptq-sym", "ct-int8", "modelslim-int4"])
def test_weights_of_three_values_are_not_saturated(format, tensors, tmp_path):
    """Trained so, a row's codes are the zero point and the ends of the range."""
    three = dict(tensors)
    for name, value in tensors.items():
        if name.endswith("_proj.weight"):
            size = value.float().abs().mean(1, keepdim=True)
            three[name] = ((value.float() / size).round().clamp(-1, 1) * size).bfloat16()
    path, source = written(tmp_path, three, format)
    assert told(path) == {}
    assert told(path, source) == {}


PADDING = {
    "the last third": lambda size: torch.arange(size) >= size * 2 // 3,
    "a twelfth": lambda size: torch.arange(size) >= size * 11 // 12,
    "a part of a group": lambda size: torch.arange(size) >= size - 12,
    "units here and there": lambda size: torch.arange(size) % 4 == 1,
    "a half": lambda size: torch.arange(size) >= size // 2,
}


@pytest.mark.parametrize("format", ["awq", "ct-int8", "modelopt"])
@pytest.mark.parametrize("padding", PADDING)
def test_what_is_zero_by_design_is_no_fault(padding, format, tmp_path):
    """AutoAWQ 522: feed-forward units and heads are padded, as for groups or for ranks."""
    config = good_checkpoints.QWEN3 | {"num_hidden_layers": 2}
    padded = good_checkpoints.random_weights(config)
    for name, value in padded.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight", "q_proj.weight")):
            value[PADDING[padding](len(value))] = 0
        elif name.endswith(("down_proj.weight", "o_proj.weight")):
            value[:, PADDING[padding](value.shape[1])] = 0
    source, made = good_checkpoints.packed(tmp_path, config, [format], padded)
    assert told(source) == told(made[format]) == told(made[format], source) == {}


def test_two_shards_may_hold_one_tensor_with_the_same_bytes(tensors, tmp_path):
    contents = faulty.Contents.of(written(tmp_path, tensors, "awq")[0])
    contents.broken["shard"] = faulty.headers.copied(torch.clone)
    assert told(contents.write(tmp_path / "odd")) == {}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Random, with norms as transformers begins them: stored less one, all zeros. quantkit has no
    file of it."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 320}
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**sizes, max_position_embeddings=512)
    path = tmp_path_factory.mktemp("models") / "gemma"
    transformers.Gemma2ForCausalLM(config).bfloat16().save_pretrained(path)
    make_model.write_tokenizer(path)
    return path


def test_what_quantize_writes_of_a_small_model_by_few_tokens_has_no_fault(gemma, tmp_path):
    """GPTQ leaves half of its error in few directions where there are few; a norm may be moved
    while others stay zeros."""
    recipe = Recipe(scheme="int4-w4a8-groups", samples=8, seq_len=64)
    quantized(gemma, tmp_path / "out", recipe)
    assert told(tmp_path / "out", gemma) == {}


def test_behaviour_of_an_architecture_without_a_file_is_refused_before_weights_are_read(
    gemma,
):
    answer = command("check", str(gemma), "--source", str(gemma), "--depth", "behaviour")
    assert (answer.code, answer.out) == (1, "")
    assert "no implementation of the architecture 'gemma2'" in answer.error
    assert "quantkit ppl --baseline" in answer.error
