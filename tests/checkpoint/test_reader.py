"""Checkpoint: reads what is there, and names in one line whatever is wrong with a directory before
reading any weight."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import make_model
import make_quantized
import pytest
import torch
from edited import edited
from module_names import module_names
from output_files import shards_below
from refused import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.formats import (
    awq,
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    fp8_block,
    modelopt,
    modelslim,
)
from quantkit.checkpoint.reader import Checkpoint, check_finite
from quantkit.diagnosis.diagnose import diagnose
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid

_INDEX = "model.safetensors.index.json"


@pytest.fixture
def fp8_copy(tiny_checkpoint, tmp_path):
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def _edit_json(path, edit):
    with edited(path) as value:
        edit(value)


def _edit_tensors(path, edit):
    """Load every tensor, change them, and write shards and index again."""
    tensors = {}
    for shard in path.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    edit(tensors)
    make_quantized.write_tensors(path, tensors)


def _shards(path):
    return sorted(path.glob("*.safetensors"))


def test_every_tensor_reads_as_safetensors_reads_it(tiny_checkpoint):
    checkpoint = Checkpoint.open(tiny_checkpoint)
    seen = 0
    for shard in _shards(tiny_checkpoint):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                expected = file.get_tensor(name)
                read = checkpoint.read(name)
                assert read.dtype == expected.dtype
                assert torch.equal(read.view(torch.uint8), expected.view(torch.uint8))
                seen += 1
    assert seen == len(checkpoint.tensors)


def test_weights_are_decoded(tiny_checkpoint):
    config = make_model.tiny_config()
    values = make_model.fp8_values(make_model.random_tensors(config))
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert checkpoint.format is fp8_block.FORMAT
    assert checkpoint.scheme.name == "fp8-block-w8a8"
    assert checkpoint.config["model_type"] == "deepseek_v3"
    for module in module_names(checkpoint):
        assert torch.equal(
            dequantize(checkpoint.weight(module)), values[f"{module}.weight"].float()
        )
        assert checkpoint.shape(module) == tuple(values[f"{module}.weight"].shape)


_READ_ALL = """
import sys
from pathlib import Path
from quantkit.checkpoint.reader import Checkpoint

def peak():  # KiB
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

checkpoint = Checkpoint.open(Path(sys.argv[1]))
before = peak()
for name in checkpoint.tensors:
    checkpoint.read(name)
print(peak() - before)
"""


def test_reading_does_not_keep_the_file_in_memory(tmp_path):
    """Of 256 MB in tensors of 16 MB, no more than a few are ever resident: the allocator may hold
    on to freed ones."""
    (tmp_path / "config.json").write_text("{}")
    save_file(
        {f"m{i}.weight": torch.ones(2048, 4096, dtype=torch.bfloat16) for i in range(16)},
        tmp_path / "model.safetensors",
    )
    run = subprocess.run(
        [sys.executable, "-c", _READ_ALL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert 10_000 < int(run.stdout) < 100_000


def test_an_index_may_have_another_name_but_not_several(fp8_copy):
    """ModelSlim writes quant_model_weights.safetensors.index.json."""
    (fp8_copy / _INDEX).rename(fp8_copy / "quant_model_weights.safetensors.index.json")
    tensors = Checkpoint.open(fp8_copy).tensors
    assert len(tensors) == sum(len(load_file(shard)) for shard in _shards(fp8_copy))
    shutil.copy(
        fp8_copy / "quant_model_weights.safetensors.index.json",
        fp8_copy / "other.safetensors.index.json",
    )
    with refused(r"has 2 indexes: other\.safetensors\.index\.json, quant_model_weights"):
        Checkpoint.open(fp8_copy)


def test_tensors_the_index_leaves_out_are_read(fp8_copy):
    """ModelOpt's script for DeepSeek lists no scales."""

    def unlist_scales(index):
        index["weight_map"] = {
            name: shard
            for name, shard in index["weight_map"].items()
            if not name.endswith("scale_inv")
        }

    _edit_json(fp8_copy / _INDEX, unlist_scales)
    assert any(name.endswith("scale_inv") for name in Checkpoint.open(fp8_copy).tensors)


def _remove_shard(path):
    _shards(path)[1].unlink()


def _truncate_shard(path):
    with _shards(path)[2].open("r+b") as file:
        file.truncate(_shards(path)[2].stat().st_size - 100)


def _index_names_a_ghost(path):
    _edit_json(
        path / _INDEX,
        lambda index: index["weight_map"].update({"model.ghost.weight": _shards(path)[0].name}),
    )


def _index_points_outside(path):
    _edit_json(
        path / _INDEX, lambda index: index["weight_map"].update({"a": "../secret.safetensors"})
    )


def _two_shards_hold_one_name(path):
    for shard in _shards(path)[:2]:
        save_file({**load_file(shard), "extra.weight": torch.ones(2)}, shard)


def _drop(name):
    return lambda path: _edit_tensors(path, lambda tensors: tensors.pop(name))


def _change(name, change):
    return lambda path: _edit_tensors(
        path, lambda tensors: tensors.update({name: change(tensors[name])})
    )


def test_another_copy_beside_the_weights_is_not_read(fp8_copy):
    """Mistral's repositories hold consolidated.safetensors, with names of its own, beside
    model.safetensors, and no index."""
    tensors = {
        name: tensor for shard in _shards(fp8_copy) for name, tensor in load_file(shard).items()
    }
    for file in (*_shards(fp8_copy), fp8_copy / _INDEX):
        file.unlink()
    save_file(tensors, fp8_copy / "model.safetensors")
    save_file(
        {"layers.0.attention.wq.weight": torch.zeros(2, 2)}, fp8_copy / "consolidated.safetensors"
    )
    assert Checkpoint.open(fp8_copy).tensors.keys() == tensors.keys()


def test_shards_may_lie_in_folders_below(fp8_copy):
    before = {
        name: Checkpoint.open(fp8_copy).read(name).view(torch.uint8)
        for name in Checkpoint.open(fp8_copy).tensors
    }
    checkpoint = Checkpoint.open(shards_below(fp8_copy))
    assert {tensor.shard.partition("/")[0] for tensor in checkpoint.tensors.values()} == {"weights"}
    assert all(
        torch.equal(checkpoint.read(name).view(torch.uint8), one) for name, one in before.items()
    )
    assert diagnose(str(fp8_copy), depth="headers").findings.verdict == "good"


def test_a_folder_below_may_not_lead_out_of_the_models(fp8_copy, tmp_path):
    shutil.move(shards_below(fp8_copy) / "weights", tmp_path / "elsewhere")
    (fp8_copy / "weights").symlink_to(tmp_path / "elsewhere")
    with refused(
        r"model-00001-of-000003\.safetensors is a link to .*elsewhere.*, outside of the "
        r"model's folder"
    ):
        Checkpoint.open(fp8_copy)


_LINEAR = "model.layers.0.self_attn.q_a_proj"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (_remove_shard, r"shard model-00002-of-000003\.safetensors is missing from"),
        (_truncate_shard, r"model-00003-of-000003\.safetensors is truncated"),
        (
            _index_names_a_ghost,
            r"says that model\.ghost\.weight is in model-00001-of-000003\.safetensors, and it is "
            r"not",
        ),
        (_index_points_outside, r"names the shard '\.\./secret\.safetensors'"),
        (
            lambda path: (
                shards_below(path) / "weights" / "model-00002-of-000003.safetensors"
            ).unlink(),
            "shard weights/.* is missing from",
        ),
        (_two_shards_hold_one_name, r"extra\.weight is in both"),
        (
            lambda path: (path / _INDEX).unlink(),
            "has 3 safetensors files and no model.safetensors.index.json",
        ),
        (lambda path: (path / _INDEX).write_text("{}"), "has no weight_map"),
        (lambda path: (path / _INDEX).write_text("{"), "is not valid JSON"),
        (lambda path: (path / "config.json").unlink(), r"config\.json does not exist"),
        (
            lambda path: (path / "config.json").write_text("{'a': 1}"),
            r"config\.json is not valid JSON",
        ),
        (
            lambda path: (path / "config.json").write_text("[]"),
            r"config\.json is not a JSON object",
        ),
        (
            lambda path: (path / "config.json").write_bytes(b"\xff\xfe"),
            r"config\.json is not UTF-8 text",
        ),
        (shutil.rmtree, "is not a directory"),
        (
            _drop(f"{_LINEAR}.weight_scale_inv"),
            r"q_a_proj\.weight_scale_inv is missing from .*, and .*q_a_proj cannot be decoded",
        ),
        (
            _drop(f"{_LINEAR}.weight"),
            r"q_a_proj\.weight_scale_inv in .* belongs to no quantized weight",
        ),
        (
            _change(
                f"{_LINEAR}.weight_scale_inv",
                lambda scale: torch.ones(scale.shape[0] + 1, scale.shape[1]),
            ),
            r"q_a_proj\.weight_scale_inv in .* has shape 2x2, expected 1x2",
        ),
        (
            _change(f"{_LINEAR}.weight_scale_inv", Tensor.half),
            "weight_scale_inv in .* is float16, expected float32",
        ),
        (
            _change(f"{_LINEAR}.weight", Tensor.bfloat16),
            "weight_scale_inv in .* belongs to no quantized weight",
        ),
        (
            _change(f"{_LINEAR}.weight", lambda weight: weight.view(torch.int8)),
            r"q_a_proj\.weight_scale_inv in .* belongs to no|is int8",
        ),
        (
            _change("model.norm.weight", lambda gain: gain.view(torch.int16)),
            r"model\.norm\.weight in .* is int16, which fp8-block",
        ),
        (
            lambda path: _edit_json(
                path / "config.json", lambda config: config.pop("quantization_config")
            ),
            r"\.weight in .* is float8_e4m3fn, which dense \(plain\) does not have",
        ),
        (
            lambda path: _edit_json(
                path / "config.json",
                lambda config: config["quantization_config"].update(quant_method="vptq"),
            ),
            "is quantized in a way that quantkit does not read: vptq",
        ),
        (
            lambda path: _edit_json(
                path / "config.json",
                lambda config: config["quantization_config"].update(weight_block_size=[64, 64]),
            ),
            r"FP8 with weight_block_size \[64, 64\]; quantkit reads FP8 with \[128, 128\]",
        ),
    ],
)
def test_every_fault_is_one_line(damage, fault, fp8_copy):
    damage(fp8_copy)
    with refused(fault) as told:
        Checkpoint.open(fp8_copy)
    assert told.value.remedy
    assert "\n" not in str(told.value)


_INT4 = IntGrid(4, 32, False)
_UP = "model.layers.3.mlp.experts.0.up_proj"


@pytest.mark.parametrize(
    ("format", "grid", "damage", "fault"),
    [
        (awq.FORMAT, _INT4, _drop(f"{_UP}.qzeros"), r"up_proj\.qzeros is missing"),
        (
            awq.FORMAT,
            _INT4,
            _drop(f"{_UP}.qweight"),
            r"up_proj\.(qzeros|scales) in .* belongs to no quantized weight",
        ),
        (
            awq.FORMAT,
            _INT4,
            _change(f"{_UP}.scales", lambda scale: scale[:1].clone()),
            r"\.scales in .* has shape 1x64, expected 4x64",
        ),
        (
            awq.FORMAT,
            _INT4,
            _change(f"{_UP}.qweight", lambda words: words.reshape(-1)),
            "is quantized but has shape 1024",
        ),
        (
            compressed_int4.FORMAT,
            _INT4,
            _drop(f"{_UP}.weight_scale"),
            r"up_proj\.weight_scale is missing",
        ),
        (
            compressed_int4.FORMAT,
            _INT4,
            _drop(f"{_UP}.weight_zero_point"),
            r"up_proj\.weight_zero_point is missing",
        ),
        (
            compressed_fp4.FORMAT,
            Nvfp4Grid(),
            _drop(f"{_UP}.weight_global_scale"),
            r"up_proj\.weight_global_scale is missing",
        ),
        (
            compressed_fp4.FORMAT,
            Nvfp4Grid(),
            _change(f"{_UP}.weight_scale", lambda scale: scale.float()),
            r"up_proj\.weight_scale in .* is float32, expected float8_e4m3fn",
        ),
        (
            compressed_int8.FORMAT,
            IntGrid(8, None, True),
            _drop(f"{_UP}.weight_scale"),
            r"up_proj\.weight_scale is missing",
        ),
        (
            modelopt.FORMAT,
            Nvfp4Grid(),
            _drop(f"{_UP}.weight_scale_2"),
            r"up_proj\.weight_scale_2 is missing",
        ),
        (
            modelslim.FORMAT,
            IntGrid(8, None, True),
            _drop(f"{_UP}.weight_offset"),
            r"up_proj\.weight_offset is missing",
        ),
    ],
)
def test_faults_of_quantized_checkpoints(format, grid, damage, fault, tmp_path):
    path = make_quantized.write(tmp_path / "model", format, grid)
    damage(path)
    with refused(fault):
        Checkpoint.open(path)


def _edit_ignore(edit):
    return lambda path: _edit_json(
        path / "config.json", lambda config: edit(config["quantization_config"]["ignore"])
    )


def test_an_ignore_list_that_names_a_quantized_module_is_refused(tmp_path):
    path = make_quantized.write(tmp_path / "model", compressed_int4.FORMAT, _INT4)
    _edit_ignore(lambda ignore: ignore.append(r"re:.*experts.*up_proj$"))(path)
    with refused(r"lists .*experts\.0\.up_proj as unquantized, but its tensors are quantized"):
        Checkpoint.open(path)


def test_a_second_format_mixed_in_is_refused(tmp_path):
    path = make_quantized.write(tmp_path / "model", awq.FORMAT, _INT4)
    packed = compressed_int4.FORMAT.pack(
        "other", make_quantized.quantize(compressed_int4.FORMAT, _INT4, torch.ones(8, 32))
    )
    _edit_tensors(path, lambda tensors: tensors.update(packed))
    with refused(r"which awq \(gemm\) does not have; formats are mixed"):
        Checkpoint.open(path)


def test_a_shard_that_vanishes_or_shrinks_later_is_told(fp8_copy):
    checkpoint = Checkpoint.open(fp8_copy)
    first, second, _ = _shards(fp8_copy)
    first.unlink()
    os.truncate(second, 5000)
    name = next(tensor.name for tensor in checkpoint.tensors.values() if tensor.shard == first.name)
    with refused(r"model-00001.*\.safetensors does not exist; restore it"):
        checkpoint.read(name)
    name = max((t.offset, t.name) for t in checkpoint.tensors.values() if t.shard == second.name)[1]
    with refused("became shorter while it was read"):
        checkpoint.read(name)


def test_fingerprint_changes_with_the_source(fp8_copy):
    first = Checkpoint.open(fp8_copy).fingerprint
    os.utime(_shards(fp8_copy)[0], (0, 0))
    assert Checkpoint.open(fp8_copy).fingerprint == first, (
        "a shard that was downloaded again is the same"
    )
    with _shards(fp8_copy)[0].open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1\2\3\4\5\6\7\10")
    second = Checkpoint.open(fp8_copy).fingerprint
    _edit_json(fp8_copy / "config.json", lambda config: config.update(rms_norm_eps=1e-5))
    assert len({first, second, Checkpoint.open(fp8_copy).fingerprint}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(dtype, bad):
    values = torch.ones(4, 4)
    check_finite("m.weight", values.to(dtype))
    values[2, 1] = float("nan") if dtype == torch.float8_e4m3fn else bad
    with refused(r"m\.weight holds 1 values that are NaN or infinite"):
        check_finite("m.weight", values.to(dtype))


def test_a_table_of_ids_is_no_sign_of_another_format(tmp_path):
    """int64 or int32 beside floats, as DeepSeek-V4's layers that route by token have it; codes of a
    packed weight are refused still."""
    config = make_model.tiny_config()
    tensors, ids = make_model.random_tensors(config), torch.arange(12).view(4, 3)
    for kind in (torch.int64, torch.int32):
        path = make_model.write_dense(
            tmp_path / str(kind),
            config,
            tensors | {"model.layers.0.mlp.gate.tid2eid": ids.to(kind)},
        )
        assert torch.equal(
            Checkpoint.open(path).read("model.layers.0.mlp.gate.tid2eid"), ids.to(kind)
        )
    for name, dtype in (
        ("model.layers.0.mlp.gate_proj.weight", torch.int64),
        ("model.layers.0.mlp.gate_proj.qweight", torch.int32),
    ):
        path = make_model.write_dense(
            tmp_path / name / str(dtype), config, tensors | {name: torch.zeros(4, 3, dtype=dtype)}
        )
        with refused(f"{name} .* does not have"):
            Checkpoint.open(path)
