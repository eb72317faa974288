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
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.formats import (
    awq,
    compressed_fp4,
    compressed_int4,
    fp8_block,
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


READ_ALL = """
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
    tensors = {f"m{i}.weight": torch.ones(2048, 4096, dtype=torch.bfloat16) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 10_000 < int(run.stdout) < 100_000


def test_an_index_may_have_another_name_but_not_several(fp8_copy):
    """ModelSlim writes quant_model_weights.safetensors.index.json."""
    other = fp8_copy / "quant_model_weights.safetensors.index.json"
    (fp8_copy / _INDEX).rename(other)
    tensors = Checkpoint.open(fp8_copy).tensors
    assert len(tensors) == sum(len(load_file(shard)) for shard in _shards(fp8_copy))
    shutil.copy(other, fp8_copy / "other.safetensors.index.json")
    with refused(r"has 2 indexes: other\.safetensors\.index\.json, quant_model_weights"):
        Checkpoint.open(fp8_copy)


def test_tensors_the_index_leaves_out_are_read(fp8_copy):
    """ModelOpt's script for DeepSeek lists no scales."""
    with edited(fp8_copy / _INDEX) as index:
        for name in [name for name in index["weight_map"] if name.endswith("scale_inv")]:
            del index["weight_map"][name]
    assert any(name.endswith("scale_inv") for name in Checkpoint.open(fp8_copy).tensors)


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
    def read(checkpoint):
        return {name: checkpoint.read(name).view(torch.uint8) for name in checkpoint.tensors}

    before = read(Checkpoint.open(fp8_copy))
    checkpoint = Checkpoint.open(shards_below(fp8_copy))
    assert {tensor.shard.partition("/")[0] for tensor in checkpoint.tensors.values()} == {"weights"}
    assert all(torch.equal(one, before[name]) for name, one in read(checkpoint).items())
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


def _index(**entries):
    def edit(path):
        with edited(path / _INDEX) as index:
            index["weight_map"] |= entries

    return edit


def _described(**changes):
    def edit(path):
        with edited(path / "config.json") as config:
            config["quantization_config"] |= changes

    return edit


def _config(content):
    return lambda path: (path / "config.json").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: os.truncate(_shards(path)[2], 5000), r"model-00003-.* is truncated"),
        (_index(ghost="model-00001-of-000003.safetensors"), r"ghost is in model-00001-.* is not"),
        (_index(a="../secret.safetensors"), r"names the shard '\.\./secret\.safetensors'"),
        (
            lambda path: _shards(shards_below(path) / "weights")[1].unlink(),
            r"shard weights/model-00002-.* is missing from",
        ),
        (_two_shards_hold_one_name, r"extra\.weight is in both"),
        (lambda path: (path / _INDEX).write_text("{}"), "has no weight_map"),
        (lambda path: (path / _INDEX).write_text("{"), "is not valid JSON"),
        (_config(b"[]"), r"config\.json is not a JSON object"),
        (_config(b"\xff\xfe"), r"config\.json is not UTF-8 text"),
        (shutil.rmtree, "is not a directory"),
        (
            _drop(f"{_LINEAR}.weight_scale_inv"),
            r"q_a_proj\.weight_scale_inv is missing from .*, and .*q_a_proj cannot be decoded",
        ),
        (_drop(f"{_LINEAR}.weight"), r"weight_scale_inv in .* belongs to no quantized weight"),
        (_change(f"{_LINEAR}.weight_scale_inv", lambda one: one.repeat(2, 1)), "shape 2x2, expect"),
        (_change(f"{_LINEAR}.weight_scale_inv", Tensor.half), "is float16, expected float32"),
        (_change(f"{_LINEAR}.weight", Tensor.bfloat16), "belongs to no quantized weight"),
        (
            _change("model.norm.weight", lambda gain: gain.view(torch.int16)),
            r"model\.norm\.weight in .* is int16, which fp8-block",
        ),
        (_config(b"{}"), r"float8_e4m3fn, which dense \(plain\) does not have"),
        (_described(quant_method="vptq"), "in a way that quantkit does not read: vptq"),
        (_described(weight_block_size=[64, 64]), r"quantkit reads FP8 with \[128, 128\]"),
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
        (awq.FORMAT, _INT4, _drop(f"{_UP}.qweight"), "belongs to no quantized weight"),
        (awq.FORMAT, _INT4, _change(f"{_UP}.scales", lambda one: one[:1]), "1x64, expected 4x64"),
        (awq.FORMAT, _INT4, _change(f"{_UP}.qweight", Tensor.flatten), "but has shape 1024"),
        (
            compressed_int4.FORMAT,
            _INT4,
            _drop(f"{_UP}.weight_zero_point"),
            r"up_proj\.weight_zero_point is missing",
        ),
        (
            compressed_fp4.FORMAT,
            Nvfp4Grid(),
            _change(f"{_UP}.weight_scale", Tensor.float),
            r"up_proj\.weight_scale in .* is float32, expected float8_e4m3fn",
        ),
    ],
)
def test_faults_of_quantized_checkpoints(format, grid, damage, fault, tmp_path):
    path = make_quantized.write(tmp_path / "model", format, grid)
    damage(path)
    with refused(fault):
        Checkpoint.open(path)


def test_an_ignore_list_that_names_a_quantized_module_is_refused(tmp_path):
    path = make_quantized.write(tmp_path / "model", compressed_int4.FORMAT, _INT4)
    _described(ignore=[r"re:.*experts.*up_proj$"])(path)
    with refused(r"lists .*experts\.0\.up_proj as unquantized, but its tensors are quantized"):
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
    """A shard that was downloaded again is the same."""
    first, shard = Checkpoint.open(fp8_copy).fingerprint, _shards(fp8_copy)[0]
    os.utime(shard, (0, 0))
    assert Checkpoint.open(fp8_copy).fingerprint == first
    shard.write_bytes(shard.read_bytes()[:-8] + b"\1\2\3\4\5\6\7\10")
    second = Checkpoint.open(fp8_copy).fingerprint
    with edited(fp8_copy / "config.json") as config:
        config["rms_norm_eps"] = 1e-5
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
    tensors, mlp = make_model.random_tensors(config), "model.layers.0.mlp"
    for number, (name, dtype, read) in enumerate(
        (
            ("gate.tid2eid", torch.int64, True),
            ("gate.tid2eid", torch.int32, True),
            ("gate_proj.weight", torch.int64, False),
            ("gate_proj.qweight", torch.int32, False),
        )
    ):
        ids = {f"{mlp}.{name}": torch.arange(12, dtype=dtype).view(4, 3)}
        path = make_model.write_dense(tmp_path / str(number), config, tensors | ids)
        if read:
            assert torch.equal(Checkpoint.open(path).read(f"{mlp}.{name}"), ids[f"{mlp}.{name}"])
        else:
            with refused(f"{mlp}.{name} .* does not have"):
                Checkpoint.open(path)
