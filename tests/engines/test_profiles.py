"""Profiles are whole, choices hold what engines load, and the checker finds what it must in real
checkpoint directories."""

import re
import shutil
from functools import cache

import pytest
import torch
from edited import edited
from make_model import CONFIGS, random_tensors, tiny_config
from packed_model import write_packed
from refused import refused
from safetensors.torch import load_file, save_file
from tied_model import TIED, tied_tensors
from tiny_models import write

from quantkit import inspect
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats import (
    FORMATS,
    awq,
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    compressed_mxfp4,
    fp8,
    fp8_block,
    modelopt,
    modelslim,
)
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.engines.check import check_checkpoint
from quantkit.engines.profiles import choose, engine_names, find_engine, part_of
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.mxfp8 import Mxfp8Grid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import SCHEMES, find_scheme
from quantkit.models.deepseek_v3 import Config, parameters
from quantkit.models.stored_parameters import read_model
from quantkit.quantization.run import quantize

INT4 = IntGrid(4, 128, symmetric=False)
INT4_SYMMETRIC = IntGrid(4, 128, symmetric=True)
INT8 = IntGrid(8, None, symmetric=True)
NVFP4, W4A4 = Nvfp4Grid(), Nvfp4Grid(activation_bits=4)
CT = "compressed-tensors"
PARTS = {
    "linears": lambda row: row.role == "linear",
    "experts": lambda row: row.expert is not None,
    "no-qkv-a": lambda row: row.role == "linear" and part_of(row) != "qkv_a",
    "kv-b": lambda row: row.role == "kv_b" and not row.mtp,
    "no-mtp": lambda row: row.role == "linear" and not row.mtp,
}
linear, no_mtp = PARTS["linears"], PARTS["no-mtp"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Writes (once) the tiny model in a format and returns its directory."""
    config = tiny_config()
    tensors = random_tensors(config)

    @cache
    def write(format, grid, quantizes=linear, share_scales=True):
        path = tmp_path_factory.mktemp("packed")
        return write_packed(path, config, tensors, format, grid, quantizes, share_scales)

    return write


def errors(engine, path, severity="error", **options):
    found = check_checkpoint(engine, Checkpoint.open(path), **options)
    return [one.problem for one in found if one.severity == severity]


def named_schemes(remedy):
    """After --scheme, as `A, B or C`."""
    found = re.search(r"--scheme ((?:[\w-]+(?:, | or )?)+)", remedy)
    return re.split(", | or ", found[1]) if found else []


def warns(engine, path, told):
    return any(told in problem for problem in errors(engine, path, "warning"))


@pytest.mark.parametrize("name", engine_names())
def test_profile_names_formats_that_exist_and_its_sources(name):
    variants = {(format.name, format.variant) for format in FORMATS}
    profile = find_engine(name)
    for load in profile.loads:
        assert (load.format, load.variant) in variants
        assert set(load.must) | set(load.four_bits) <= set(load.may)
        assert load.sources
        assert all(
            re.fullmatch(r"[\w.-]+/[\w.-]+@[\w.]+ [\w./-]+", source) for source in load.sources
        ), load.sources
    assert {load.format for load in profile.loads} & {"dense"}


@pytest.mark.parametrize("name", engine_names())
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_a_choice_is_a_load_or_a_reason(name, scheme):
    told = None
    try:
        choice = choose(name, scheme)
    except QuantkitError as error:
        told = error
    if told is not None:
        assert name in told.problem
        assert "no reader for that" not in told.problem, "the profile should say why"
        names = named_schemes(told.remedy)
        assert names
        for other in names:
            assert choose(name, find_scheme(other))
        return
    assert choice.format in scheme.formats
    written = choice.format, choice.rule.variant
    assert any(one.holds(choice.grid) for one in FORMATS if (one.name, one.variant) == written)
    assert "kv_b" not in choice.parts


def test_choices():
    """By device and format; vllm-ascend gets symmetric experts, and the key that it reads."""
    int8, awq_scheme = find_scheme("int8-a8w8c16"), find_scheme("awq-w4a16")
    for device, launch in (("cuda", ("--quantization", "w8a8_int8")), ("npu", ())):
        assert choose("sglang", int8, device=device).rule.launch == launch
    assert "qkv_a" not in choose("sglang", awq_scheme, format=CT, device="cuda").parts
    assert not choose("sglang", find_scheme("fp4-w4a16")).mtp
    choice = choose("vllm-ascend", awq_scheme)
    found = choice.format, choice.rule.variant, choice.grid, choice.quantization_config
    assert found == (CT, "pack-quantized", INT4_SYMMETRIC, {"group_size": 128})
    rows = parameters(Config.from_dict(tiny_config()))
    assert {part_of(row) for row in rows if choice.quantizes(row)} == {"experts"}
    with refused("runs on npu"):
        choose("omni-infer", int8, device="cuda")
    with refused(r"'tgi' is not known; choose one of chitu, .*vllm-ascend"):
        find_engine("tgi")


def test_parts_and_formats_may_be_a_models_own(tmp_path):
    """vLLM builds GLM-5.3-Flash's attention without the checkpoint's quantization; SGLang renames
    scales of Hy4; of Kimi-K3 vLLM reads experts in MXFP4 alone; it joins
    Qwen3.8-Flash-Next's q, k and v with its indexer's linear. Of DeepSeek-V4 SGLang loads nothing that is
    quantized here. SGLang has defaults of its own for keys of both."""

    def written(source, name, out, format="auto", engine=None):
        recipe = Recipe(scheme=name, methods=())
        quantize(source, tmp_path / out, find_scheme(name), format, recipe, engine=engine)
        return tmp_path / out

    every = {"mlp", "shared_experts", "experts"}
    for family, scheme, parts in (
        ("glm5_next", "rtn-w4a16", every),
        ("qwen4_exp", "rtn-w4a16", every - {"mlp"}),
        ("kimi_k3", "mxfp4-w4a16", {"experts"}),
    ):
        source = write(tmp_path / family, family)
        own = written(source, scheme, f"{family}-vllm", engine="vllm")
        assert not errors("vllm", own)
        checkpoint = Checkpoint.open(own)
        rows = {row.module: row for row in read_model(checkpoint).rows}
        assert {part_of(rows[one]) for one in checkpoint.linears} == parts
    keys = {"mhc": True, "swiglu_limit": 10.0, "full_attention_interval": 4}
    for family, lacks in (("glm5_next", "mhc = None"), ("qwen4_exp", "sglang reads full_att")):
        asked = (tmp_path / family, "rtn-w4a16", f"{family}-sglang", "awq", "sglang")
        with refused(lacks):
            written(*asked)
        with edited(tmp_path / family / "config.json") as config:
            config["text_config"].update(keys)
        assert not errors("sglang", written(*asked))
    with refused("compressed-tensors mxfp4-pack-quantized and dense"):
        written(source, "rtn-w4a16", "awq4", engine="vllm")
    told = errors("vllm", written(tmp_path / "glm5_next", "rtn-w4a16", "whole"))
    assert any("does not take attention" in one for one in told)
    named = {"topk_method": "noaux_tc", "swiglu_limit": 10.0}
    for family in ("deepseek_v4", "deepseek_v41"):
        source = write(tmp_path / family, family)
        with edited(source / "config.json") as config:
            config.get("text_config", config).update(named)
        own = written(source, "rtn-w4a16", f"{family}-vllm", engine="vllm")
        assert not errors("vllm", own)
        assert not warns("vllm", own, "that draft in awq")  # no head, and an MTP layer
        assert errors("sglang", own)
    named = ("deepseek_v4-npu", "modelslim", "vllm-ascend")
    with edited(tmp_path / "deepseek_v4" / "config.json") as config:
        config.update(CONFIGS["loaded"]["deepseek_v4"] | {key: config[key] for key in {*config}})
    own = written(tmp_path / "deepseek_v4", "int8-a8w8c16", *named)
    assert not errors("vllm-ascend", own)
    source = write(tmp_path / "kimi_linear", "kimi_linear")
    assert not errors("sglang", written(source, "rtn-w4a16", "linear", engine="sglang"))
    with refused("vllm loads kimi_linear in dense only"):
        written(source, "rtn-w4a16", "no", engine="vllm")
    source = write(tmp_path / "hy_v4", "hy_v4", layer_types=["indexed_attention"] * 3)
    awq, packed = (written(source, "rtn-w4a16", *[one] * 2) for one in ("awq", CT))
    assert not errors("sglang", awq) + errors("vllm", awq) + errors("vllm", packed)
    assert errors("sglang", packed)
    with edited(awq / "config.json") as config:
        del config["layer_types"]
    lacks = ["vllm reads layer_types in config.json, which it lacks"]
    assert errors("vllm", awq) == lacks


WRITTEN = {
    "awq": (awq.FORMAT, INT4),
    "awq-g64": (awq.FORMAT, IntGrid(4, 64, symmetric=False)),
    "awq-g16": (awq.FORMAT, IntGrid(4, 16, symmetric=False)),
    "ct-int4": (compressed_int4.FORMAT, INT4),
    "ct-int4-g64": (compressed_int4.FORMAT, IntGrid(4, 64, symmetric=False)),
    "ct-int4-symmetric": (compressed_int4.FORMAT, INT4_SYMMETRIC),
    "ct-int8": (compressed_int8.FORMAT, INT8),
    "ct-nvfp4": (compressed_fp4.FORMAT, NVFP4),
    "ct-w4a4": (compressed_fp4.W4A4, W4A4),
    "modelopt": (modelopt.FORMAT, NVFP4),
    "modelopt-w4a4": (modelopt.W4A4, W4A4),
    "ct-mxfp4-w4a4": (compressed_mxfp4.W4A4, Mxfp4Grid(activation_bits=4)),
    "ct-mxfp8": (fp8.COMPRESSED_MX, Mxfp8Grid()),
    "mxfp8": (fp8_block.MX, Mxfp8Grid()),
    "modelslim-int8": (modelslim.FORMAT, INT8),
    "modelslim-int4": (modelslim.FORMAT, IntGrid(4, None, True)),
}
"""Format and grid."""
LOADED = """
vllm awq-g64 linears
vllm ct-int4-g64 linears
vllm modelopt linears
vllm ct-w4a4 linears
vllm modelopt-w4a4 linears
vllm ct-mxfp4-w4a4 linears
vllm ct-mxfp8 linears
sglang awq-g64 linears
sglang ct-int4-symmetric no-qkv-a
sglang ct-int8 linears
sglang modelopt no-mtp
sglang modelopt-w4a4 no-mtp
sglang mxfp8 linears
vllm-ascend ct-int8 linears
omni-infer ct-int8 linears
chitu modelopt no-mtp
chitu ct-int8 linears
"""
REFUSED = """
vllm-ascend awq linears any no AWQ reader
vllm-ascend ct-int4 experts any symmetric
vllm-ascend ct-int4-symmetric linears any does not take attention quantized
vllm-ascend ct-int4-symmetric experts any group_size at the top
vllm-ascend modelopt linears any not NVFP4
vllm-ascend modelslim-int4 linears any takes int4 in experts only
sglang ct-int4 linears any does not take qkv_a quantized
sglang ct-int4 experts any does not take experts quantized
sglang ct-nvfp4 linears any does not take qkv_a quantized
sglang ct-w4a4 linears any does not take qkv_a quantized
sglang ct-int4-symmetric kv-b cuda does not take kv_b quantized
sglang modelopt kv-b cuda does not take kv_b quantized
sglang awq-g16 linears any reads int4 in groups of 32, 64 or 128, not of 16
sglang awq-g64 experts cuda expects every qkv_a linear quantized
sglang modelopt experts cuda sglang looks for model.layers.1.mlp.shared_experts.gate_up_proj in
sglang ct-int8 experts cuda sglang looks for model.layers.1.mlp.shared_experts.gate_up_proj in
omni-infer ct-int8 experts any expects every
vllm modelslim-int4 experts any for Arm processors
vllm awq-g16 linears any reads int4 in groups of 32, 64 or 128, not of 16
vllm awq linears cpu does not take shared_experts quantized
vllm modelopt linears cpu no FP4 kernel
vllm ct-w4a4 linears cpu no FP4 kernel
vllm ct-mxfp8 linears cpu no MXFP8 kernel
sglang ct-mxfp8 linears any weight_scale_inv
sglang ct-mxfp4-w4a4 linears any experts only
chitu modelopt-w4a4 no-mtp any 16-bit activations
"""
"""Engine, what is written, of which linears, device, and what is said."""


@pytest.mark.parametrize("case", LOADED.strip().splitlines())
def test_nothing_to_say_of_what_an_engine_loads(packed, case):
    engine, written, parts = case.split()
    path = packed(*WRITTEN[written], PARTS[parts])
    assert check_checkpoint(engine, Checkpoint.open(path)) == []


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_an_engine_refuses(packed, case):
    engine, written, parts, device, told = case.split(" ", 4)
    path = packed(*WRITTEN[written], PARTS[parts])
    found = errors(engine, path, device=None if device == "any" else device)
    assert any(told in problem for problem in found)


CACHES = """
vllm ct-int8 float8 tensor 3 -
vllm ct-int8 float8 attn_head 3 -
vllm ct-int8 float8 tensor 0 takes 1 for the FP8 scales
vllm ct-int8 int8 tensor 3 reads no kv_cache_scheme but of FP8
vllm modelopt FP8 tensor 3 -
vllm awq none tensor 3 reads no FP8 scales of awq
sglang ct-int8 float8 tensor 3 with --kv-cache-dtype fp8_e4m3 only
sglang ct-int8 float8 attn_head 3 reads no FP8 scales for each attn_head
vllm-ascend ct-int8 float8 tensor 3 reads no FP8 scales of compressed-tensors
"""
"""Engine, what is written, the cache's scheme and strategy, layers with scales, and what is said."""


@pytest.mark.parametrize("case", CACHES.strip().splitlines())
def test_scales_of_an_fp8_cache(packed, tmp_path, case):
    engine, written, kind, strategy, layers, told = case.split(" ", 5)
    path = shutil.copytree(packed(*WRITTEN[written], no_mtp), tmp_path / "model")
    with edited(path / "config.json") as config:
        if kind == "FP8":
            config["quantization_config"]["kv_cache_quant_algo"] = kind
        elif kind != "none":
            scheme = {"type": kind[:-1], "num_bits": 8, "strategy": strategy, "symmetric": True}
            config["quantization_config"]["kv_cache_scheme"] = scheme
    (file,) = path.glob("*.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(0.01)
        for layer in range(int(layers))
        for side in "kv"
    }
    save_file(load_file(file) | scales, file)
    about = inspect(path, engine=engine)
    found = [one.problem for one in about.problems if "cache" in one.problem]
    assert (about.cache is None) == (kind == "int8"), about.cache
    assert about.unknown == [] or kind == "int8"
    assert [one if told not in one else True for one in found] == ([] if told == "-" else [True])


def test_unquantized_linears_that_sglang_looks_up_by_another_name(packed, tmp_path):
    """As its 0.5.23 did on a CPU: KeyError 'model.layers.0.mlp.gate_up_proj.weight'."""
    path = shutil.copytree(
        packed(compressed_int8.FORMAT, INT8, PARTS["experts"]), tmp_path / "model"
    )
    with edited(path / "config.json") as config:
        config["quantization_config"]["ignore"] += [r"re:.*gate_up_proj$"]
    assert errors("sglang", path, device="cuda") == []
    assert errors("vllm", packed(compressed_int8.FORMAT, INT8, PARTS["experts"])) == []


def test_half_of_a_fused_pair_is_refused(packed):
    path = packed(awq.FORMAT, INT4, lambda row: row.role == "linear" and "up_proj" not in row.name)
    assert any("only some are quantized" in problem for problem in errors("vllm", path))


def test_fp4_siblings_must_share_their_scale(packed):
    path = packed(modelopt.FORMAT, NVFP4, no_mtp, share_scales=False)
    assert any("different FP4 global scales" in problem for problem in errors("sglang", path))
    assert errors("vllm", path) == []
    assert warns("vllm", path, "costs accuracy")
    checkpoint = Checkpoint.open(path)
    checkpoint.has_weights = False
    for engine in ("vllm", "sglang"):
        (found,) = check_checkpoint(engine, checkpoint)
        told = "global scales were not compared: only headers were read"
        assert (found.severity, found.problem) == ("warning", told)
    assert checkpoint.bytes_read == 0


def test_vllm_takes_weight_only_nvfp4_from_config_json_alone(packed, tmp_path):
    """As seen with 0.22.1; its 0.32.0 reads the same
    (transformers_utils/model_arch_config_convertor.py)."""
    path = shutil.copytree(packed(modelopt.FORMAT, NVFP4, no_mtp), tmp_path / "model")
    assert errors("vllm", path) == []
    with edited(path / "config.json") as config:
        del config["quantization_config"]
    assert any(
        "quant_algo W4A16_NVFP4 from quantization_config in config.json only" in problem
        for problem in errors("vllm", path)
    )
    assert errors("sglang", path) == []
    with edited(path / "hf_quant_config.json") as side:
        side["quantization"]["quant_algo"] = "NVFP4"
    assert errors("vllm", path) == []


@pytest.mark.parametrize(("width", "warned"), [(128, True), (256, False)])
def test_vllm_mixes_up_the_scales_of_narrow_experts(tmp_path, width, warned):
    config = tiny_config(moe_intermediate_size=width)
    path = write_packed(tmp_path / "model", config, random_tensors(config), awq.FORMAT, INT4)
    assert errors("vllm", path, device="cuda") == []
    told = "128 columns of an expert per GPU are not more than group_size 128"
    assert warns("vllm", path, told) == warned


def test_mtp_rules_are_warnings(packed):
    """A main model still loads, so these do not keep it from running."""
    path = packed(modelopt.FORMAT, NVFP4, linear)
    assert errors("sglang", path) == []
    assert warns("sglang", path, "runs the MTP layer unquantized")
    # SGLang calls the layer model.decoder, so an entry with its number does not cover it.
    path = packed(compressed_int8.FORMAT, INT8, no_mtp)
    assert warns("sglang", path, "model.decoder")
    assert warns("omni-infer", path, "expects the MTP layer quantized")


def test_config_keys_and_architecture(packed, tmp_path):
    path = shutil.copytree(packed(*WRITTEN["ct-int8"]), tmp_path / "a")
    with edited(path / "config.json") as config:
        del config["topk_method"]
    assert errors("vllm", path) == ["config.json has topk_method = None"]
    with edited(path / "config.json") as config:
        config["model_type"] = "never_heard_of"
    assert errors("vllm", path) == ["vllm is not known to run never_heard_of"]


def test_published_layouts(tiny_checkpoint, tiny_dense_checkpoint):
    for engine in ("vllm", "sglang"):
        assert errors(engine, tiny_checkpoint) == []
        assert errors(engine, tiny_dense_checkpoint) == []
    assert errors("vllm-ascend", tiny_checkpoint) != []


@pytest.mark.parametrize(
    "case",
    [
        "transformers ct-int4-symmetric config.json quantization_config ignore",
        "vllm modelopt config.json quantization_config ignore",
        "vllm-ascend modelslim-int8 quant_model_description.json lm_head.weight",
    ],
)
def test_a_tied_head_must_be_listed(tmp_path, case):
    """As written now; an older checkpoint without the entry gets an error that says what to add.
    Engines that leave a tied head alone do not ask for it."""
    engine, written, file, *keys = case.split()
    path = write_packed(tmp_path / "model", TIED, tied_tensors(), *WRITTEN[written], linear)
    assert errors(engine, path) == []
    with edited(path / file) as described:
        owner = described[keys[0]] if len(keys) > 1 else described
        del owner[keys[-1]]
    (found,) = check_checkpoint(engine, Checkpoint.open(path))
    assert "quantizes lm_head, which is tied to the embedding" in found.problem
    assert keys[-1] in found.remedy
    assert file in found.remedy
    if engine == "transformers":
        assert errors("vllm", path) == errors("sglang", path) == []
