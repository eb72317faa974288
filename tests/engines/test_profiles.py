"""Profiles are whole, choices hold what engines load, and the checker finds what it must in real
checkpoint directories."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_model import random_tensors, tiny_config
from packed_model import write_packed
from tied_model import TIED, tied_tensors

from quantkit.checkpoint.formats import (
    FORMATS,
    awq,
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    modelopt,
    modelslim,
)
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.engines.check import check_checkpoint
from quantkit.engines.profiles import FormatChoice, choose, engine_names, find_engine, part_of
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import SCHEMES, Scheme, find_scheme
from quantkit.models.deepseek_v3 import Config, parameters
from quantkit.models.table import Parameter

INT4 = IntGrid(4, 128, symmetric=False)
INT4_G64 = IntGrid(4, 64, symmetric=False)
INT4_G16 = IntGrid(4, 16, symmetric=False)
INT4_SYMMETRIC = IntGrid(4, 128, symmetric=True)
INT8 = IntGrid(8, None, symmetric=True)
W4A4 = Nvfp4Grid(activation_bits=4)


def linear(row: Parameter) -> bool:
    return row.role == "linear"


def expert(row: Parameter) -> bool:
    return row.expert is not None


def no_qkv_a(row: Parameter) -> bool:
    return row.role == "linear" and part_of(row) != "qkv_a"


def kv_b(row: Parameter) -> bool:
    return row.role == "kv_b" and not row.mtp


def no_mtp(row: Parameter) -> bool:
    return row.role == "linear" and not row.mtp


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes (once) the tiny model in a format and returns its directory."""
    config = tiny_config()
    tensors = random_tensors(config)
    made: dict[Any, Path] = {}

    def write(
        format: Any,
        grid: Any,
        quantizes: Callable[[Parameter], bool] = linear,
        share_scales: bool = True,
    ) -> Path:
        key = (format, grid, quantizes, share_scales)
        if key not in made:
            made[key] = write_packed(
                tmp_path_factory.mktemp("packed"),
                config,
                tensors,
                format,
                grid,
                quantizes,
                share_scales,
            )
        return made[key]

    return write


def errors(engine: str, path: Path, **options: Any) -> list[str]:
    return [
        found.problem
        for found in check_checkpoint(engine, Checkpoint.open(path), **options)
        if found.severity == "error"
    ]


def warnings(engine: str, path: Path, **options: Any) -> list[str]:
    return [
        found.problem
        for found in check_checkpoint(engine, Checkpoint.open(path), **options)
        if found.severity == "warning"
    ]


def choose_or_reason(name: str, scheme: Scheme) -> FormatChoice | QuantkitError:
    try:
        return choose(name, scheme)
    except QuantkitError as error:
        return error


@pytest.mark.parametrize("name", engine_names())
def test_profile_names_formats_that_exist_and_its_sources(name: str) -> None:
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
def test_a_choice_is_a_load_or_a_reason(name: str, scheme: Any) -> None:
    choice = choose_or_reason(name, scheme)
    if isinstance(choice, QuantkitError):
        assert name in choice.problem
        assert "no reader for that" not in choice.problem, "the profile should say why"
        assert choice.remedy.startswith("it loads")
    else:
        assert choice.format in scheme.formats
        assert any(
            f.holds(choice.grid)
            for f in FORMATS
            if (f.name, f.variant) == (choice.format, choice.variant)
        )
        assert "kv_b" not in choice.parts


def test_vllm_ascend_gets_symmetric_experts_and_the_group_size_key() -> None:
    choice = choose("vllm-ascend", find_scheme("awq-w4a16"))
    assert (choice.format, choice.variant, choice.grid) == (
        "compressed-tensors",
        "pack-quantized",
        INT4_SYMMETRIC,
    )
    assert choice.quantization_config == {"group_size": 128}
    rows = parameters(Config.from_dict(tiny_config()))
    assert {part_of(row) for row in rows if choice.quantizes(row)} == {"experts"}


def test_choice_by_device_and_format() -> None:
    assert choose("sglang", find_scheme("int8-a8w8c16"), device="cuda").launch == (
        "--quantization",
        "w8a8_int8",
    )
    assert choose("sglang", find_scheme("int8-a8w8c16"), device="npu").launch == ()
    assert (
        "qkv_a"
        not in choose(
            "sglang", find_scheme("awq-w4a16"), format="compressed-tensors", device="cuda"
        ).parts
    )
    assert not choose("sglang", find_scheme("fp4-w4a16")).mtp
    with pytest.raises(QuantkitError, match="runs on npu"):
        choose("omni-infer", find_scheme("int8-a8w8c16"), device="cuda")


def test_unknown_engine_lists_the_known() -> None:
    with pytest.raises(
        QuantkitError, match=r"'tgi' is not known; choose one of chitu, .*vllm-ascend"
    ):
        find_engine("tgi")


@pytest.mark.parametrize(
    ("engine", "format", "grid", "quantizes"),
    [
        ("vllm", awq.FORMAT, INT4_G64, linear),
        ("vllm", compressed_int4.FORMAT, INT4_G64, linear),
        ("vllm", modelopt.FORMAT, Nvfp4Grid(), linear),
        ("vllm", compressed_fp4.W4A4, W4A4, linear),
        ("vllm", modelopt.W4A4, W4A4, linear),
        ("sglang", awq.FORMAT, INT4_G64, linear),
        ("sglang", compressed_int4.FORMAT, INT4_SYMMETRIC, no_qkv_a),
        ("sglang", compressed_int8.FORMAT, INT8, linear),
        ("sglang", modelopt.FORMAT, Nvfp4Grid(), no_mtp),
        ("sglang", modelopt.W4A4, W4A4, no_mtp),
        ("vllm-ascend", compressed_int8.FORMAT, INT8, linear),
        ("omni-infer", compressed_int8.FORMAT, INT8, linear),
        ("chitu", modelopt.FORMAT, Nvfp4Grid(), no_mtp),
        ("chitu", compressed_int8.FORMAT, INT8, linear),
    ],
)
def test_nothing_to_say_of_what_an_engine_loads(
    packed: Any, engine: str, format: Any, grid: Any, quantizes: Any
) -> None:
    assert check_checkpoint(engine, Checkpoint.open(packed(format, grid, quantizes))) == []


@pytest.mark.parametrize(
    ("engine", "format", "grid", "quantizes", "device", "told"),
    [
        ("vllm-ascend", awq.FORMAT, INT4, linear, None, "no AWQ reader"),
        ("vllm-ascend", compressed_int4.FORMAT, INT4, expert, None, "symmetric"),
        (
            "vllm-ascend",
            compressed_int4.FORMAT,
            INT4_SYMMETRIC,
            linear,
            None,
            "does not take attention quantized",
        ),
        (
            "vllm-ascend",
            compressed_int4.FORMAT,
            INT4_SYMMETRIC,
            expert,
            None,
            "group_size at the top",
        ),
        ("vllm-ascend", modelopt.FORMAT, Nvfp4Grid(), linear, None, "not NVFP4"),
        ("sglang", compressed_int4.FORMAT, INT4, linear, None, "does not take qkv_a quantized"),
        ("sglang", compressed_int4.FORMAT, INT4, expert, None, "does not take experts quantized"),
        (
            "sglang",
            compressed_fp4.FORMAT,
            Nvfp4Grid(),
            linear,
            None,
            "does not take qkv_a quantized",
        ),
        ("omni-infer", compressed_int8.FORMAT, INT8, expert, None, "expects every"),
        (
            "vllm-ascend",
            modelslim.FORMAT,
            IntGrid(4, None, True),
            linear,
            None,
            "takes int4 in experts only",
        ),
        ("vllm", modelslim.FORMAT, IntGrid(4, None, True), expert, None, "for Arm processors"),
        ("vllm", awq.FORMAT, INT4, linear, "cpu", "does not take shared_experts quantized"),
        ("vllm", modelopt.FORMAT, Nvfp4Grid(), linear, "cpu", "no FP4 kernel"),
        ("vllm", compressed_fp4.W4A4, W4A4, linear, "cpu", "no FP4 kernel"),
        ("chitu", modelopt.W4A4, W4A4, no_mtp, None, "16-bit activations"),
        ("sglang", compressed_fp4.W4A4, W4A4, linear, None, "does not take qkv_a quantized"),
        (
            "sglang",
            compressed_int4.FORMAT,
            INT4_SYMMETRIC,
            kv_b,
            "cuda",
            "does not take kv_b quantized",
        ),
        ("sglang", modelopt.FORMAT, Nvfp4Grid(), kv_b, "cuda", "does not take kv_b quantized"),
        (
            "vllm",
            awq.FORMAT,
            INT4_G16,
            linear,
            None,
            "reads int4 in groups of 32, 64 or 128, not of 16",
        ),
        (
            "sglang",
            awq.FORMAT,
            INT4_G16,
            linear,
            None,
            "reads int4 in groups of 32, 64 or 128, not of 16",
        ),
        ("sglang", awq.FORMAT, INT4_G64, expert, "cuda", "expects every qkv_a linear quantized"),
        (
            "sglang",
            modelopt.FORMAT,
            Nvfp4Grid(),
            expert,
            "cuda",
            "sglang looks for model.layers.1.mlp.shared_experts.gate_up_proj in",
        ),
        (
            "sglang",
            compressed_int8.FORMAT,
            INT8,
            expert,
            "cuda",
            "sglang looks for model.layers.1.mlp.shared_experts.gate_up_proj in",
        ),
    ],
)
def test_what_an_engine_refuses(
    packed: Any, engine: str, format: Any, grid: Any, quantizes: Any, device: Any, told: str
) -> None:
    assert any(
        told in problem
        for problem in errors(engine, packed(format, grid, quantizes), device=device)
    )


def test_unquantized_linears_that_sglang_looks_up_by_another_name(
    packed: Any, tmp_path: Path
) -> None:
    """As its 0.5.23 did on a CPU: KeyError 'model.layers.0.mlp.gate_up_proj.weight'."""
    path = shutil.copytree(packed(compressed_int8.FORMAT, INT8, expert), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] += [r"re:.*gate_up_proj$"]
    (path / "config.json").write_text(json.dumps(config))
    assert errors("sglang", path, device="cuda") == []
    assert errors("vllm", packed(compressed_int8.FORMAT, INT8, expert)) == []


def test_half_of_a_fused_pair_is_refused(packed: Any) -> None:
    path = packed(awq.FORMAT, INT4, lambda row: row.role == "linear" and "up_proj" not in row.name)
    assert any("only some are quantized" in problem for problem in errors("vllm", path))


def test_fp4_siblings_must_share_their_scale(packed: Any) -> None:
    path = packed(modelopt.FORMAT, Nvfp4Grid(), no_mtp, share_scales=False)
    assert any("different FP4 global scales" in problem for problem in errors("sglang", path))
    assert errors("vllm", path) == []
    assert any("costs accuracy" in problem for problem in warnings("vllm", path))


def test_fp4_scales_that_cannot_be_read_are_reported(packed: Any) -> None:
    checkpoint = Checkpoint.open(packed(modelopt.FORMAT, Nvfp4Grid(), no_mtp, share_scales=False))
    checkpoint.has_weights = False
    for engine in ("vllm", "sglang"):
        found = check_checkpoint(engine, checkpoint)
        assert [problem.severity for problem in found] == ["warning"]
        assert found[0].problem == "global scales were not compared: only headers were read"
    assert checkpoint.bytes_read == 0


def test_vllm_takes_weight_only_nvfp4_from_config_json_alone(packed: Any, tmp_path: Path) -> None:
    """As seen with 0.22.1; its 0.32.0 reads the same
    (transformers_utils/model_arch_config_convertor.py)."""
    path = shutil.copytree(packed(modelopt.FORMAT, Nvfp4Grid(), no_mtp), tmp_path / "model")
    assert errors("vllm", path) == []
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert any(
        "quant_algo W4A16_NVFP4 from quantization_config in config.json only" in problem
        for problem in errors("vllm", path)
    )
    assert errors("sglang", path) == []
    side = json.loads((path / "hf_quant_config.json").read_text())
    side["quantization"]["quant_algo"] = "NVFP4"
    (path / "hf_quant_config.json").write_text(json.dumps(side))
    assert errors("vllm", path) == []


@pytest.mark.parametrize(("width", "warned"), [(128, True), (256, False)])
def test_vllm_mixes_up_the_scales_of_narrow_experts(
    tmp_path: Path, width: int, warned: bool
) -> None:
    config = tiny_config(moe_intermediate_size=width)
    path = write_packed(
        tmp_path / "model", config, random_tensors(config), awq.FORMAT, INT4, linear
    )
    assert errors("vllm", path, device="cuda") == []
    assert (
        any(
            "128 columns of an expert per GPU are not more than group_size 128" in problem
            for problem in warnings("vllm", path)
        )
        == warned
    )


def test_mtp_rules_are_warnings(packed: Any) -> None:
    """A main model still loads, so these do not keep it from running."""
    path = packed(modelopt.FORMAT, Nvfp4Grid(), linear)
    assert errors("sglang", path) == []
    assert any("runs the MTP layer unquantized" in problem for problem in warnings("sglang", path))
    # SGLang calls the layer model.decoder, so an entry with its number does not cover it.
    path = packed(compressed_int8.FORMAT, INT8, no_mtp)
    assert any("model.decoder" in problem for problem in warnings("sglang", path))
    assert any(
        "expects the MTP layer quantized" in problem for problem in warnings("omni-infer", path)
    )


def test_config_keys_and_architecture(packed: Any, tmp_path: Path) -> None:
    path = write_packed(
        tmp_path / "a",
        tiny_config(),
        random_tensors(tiny_config()),
        compressed_int8.FORMAT,
        INT8,
        linear,
    )
    config = json.loads((path / "config.json").read_text())
    del config["topk_method"]
    (path / "config.json").write_text(json.dumps(config))
    assert errors("vllm", path) == ["config.json has topk_method = None"]
    config["model_type"] = "never_heard_of"
    (path / "config.json").write_text(json.dumps(config))
    assert errors("vllm", path) == ["vllm is not known to run never_heard_of"]


def test_published_layouts(tiny_checkpoint: Path, tiny_dense_checkpoint: Path) -> None:
    for engine in ("vllm", "sglang"):
        assert errors(engine, tiny_checkpoint) == []
        assert errors(engine, tiny_dense_checkpoint) == []
    assert errors("vllm-ascend", tiny_checkpoint) != []


@pytest.mark.parametrize(
    ("engine", "format", "grid", "file", "keys"),
    [
        (
            "transformers",
            compressed_int4.FORMAT,
            INT4_SYMMETRIC,
            "config.json",
            ("quantization_config", "ignore"),
        ),
        (
            "transformers",
            compressed_int8.FORMAT,
            INT8,
            "config.json",
            ("quantization_config", "ignore"),
        ),
        (
            "transformers",
            compressed_fp4.FORMAT,
            Nvfp4Grid(),
            "config.json",
            ("quantization_config", "ignore"),
        ),
        ("vllm", modelopt.FORMAT, Nvfp4Grid(), "config.json", ("quantization_config", "ignore")),
        (
            "vllm-ascend",
            modelslim.FORMAT,
            INT8,
            "quant_model_description.json",
            ("lm_head.weight",),
        ),
    ],
)
def test_a_tied_head_must_be_listed(
    tmp_path: Path, engine: str, format: Any, grid: Any, file: str, keys: tuple[str, ...]
) -> None:
    """As written now; an older checkpoint without the entry gets an error that says what to add."""
    path = write_packed(tmp_path / "model", TIED, tied_tensors(), format, grid, linear)
    assert errors(engine, path) == []
    described = json.loads((path / file).read_text())
    owner = described[keys[0]] if len(keys) > 1 else described
    del owner[keys[-1]]
    (path / file).write_text(json.dumps(described))
    assert errors(engine, path) == [
        f"{engine} quantizes lm_head, which is tied to the embedding and not listed as unquantized"
    ]
    found = check_checkpoint(engine, Checkpoint.open(path))[0]
    assert keys[-1] in found.remedy
    assert file in found.remedy


def test_engines_that_leave_a_tied_head_alone_do_not_ask_for_it(tmp_path: Path) -> None:
    path = write_packed(
        tmp_path / "model", TIED, tied_tensors(), compressed_int4.FORMAT, INT4_SYMMETRIC, linear
    )
    config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    config["quantization_config"]["ignore"] = []
    (path / "config.json").write_text(json.dumps(config))
    assert errors("vllm", path) == errors("sglang", path) == []


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        (INT4, "int4-asymmetric"),
        (INT4_SYMMETRIC, "int4-symmetric"),
        (IntGrid(4, None, True), "int4-channel"),
        (Nvfp4Grid(), "nvfp4"),
    ],
)
def test_grid_names(grid: Any, name: str) -> None:
    assert grid.engine_name == name
