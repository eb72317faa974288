"""Headers of shards against the safetensors package, every way a file can be damaged, and layouts: the
same shards every time."""

import json
from dataclasses import replace

import pytest
import torch
from refused import refused
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.checkpoint.header import DTYPES, TensorSpec, plan_layout, read_header, save_tensors


def test_reads_what_safetensors_writes(tmp_path):
    tensors = {name: torch.zeros(3, 2).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "a.safetensors").read_bytes()
    infos = read_header(tmp_path, "a.safetensors")
    assert {info.name: (info.dtype, info.shape) for info in infos} == {
        n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()
    }
    for info in infos:
        expected = tensors[info.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[info.offset : info.offset + info.nbytes] == expected
        assert info.shard == "a.safetensors"


def _file(entries, data):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty: a download"),
        (b"\x10\0\0\0", "is truncated or not safetensors"),
        (b"\x08\0\0\0\0\0\0\0{{{{{{{{", "has a header that is not JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a JSON object"),
        (b'\x0f\0\0\0\0\0\0\0{"a":{},"a":{}}', "a appears twice"),
        (_file({"a": _entry()}, b"x" * 7), "is truncated: .* bytes, and its header describes"),
        (_file({"a": _entry()}, b"x" * 9), "has 1 bytes that its header does not describe"),
        (
            _file({"a": _entry(), "b": _entry(data_offsets=[4, 12])}, b"x" * 12),
            "has a gap or an overlap before b",
        ),
        (_file({"a": _entry(shape=[3])}, b"x" * 8), "makes no sense for a"),
        (_file({"a": _entry(shape=[-2])}, b"x" * 8), "makes no sense for a"),
        (_file({"a": _entry(shape=[2.0])}, b"x" * 8), "makes no sense for a"),
        (_file({"a": _entry(extra=1)}, b"x" * 8), "makes no sense for a"),
        (_file({"a": 3}, b""), "makes no sense for a"),
        (_file({"a": _entry(dtype="Q4")}, b"x" * 8), "has dtype Q4; quantkit reads F64"),
    ],
)
def test_damaged_files_are_named(content, fault, tmp_path):
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(content)
    with refused(fault) as told:
        read_header(path.parent, path.name)
    assert str(path) in str(told.value)
    assert told.value.remedy


_SPECS = [
    TensorSpec(f"model.layers.{layer}.p.{part}", dtype, shape)
    for layer in range(4)
    for part, dtype, shape in (
        ("weight", torch.uint8, (5, 3)),
        ("scale", torch.float8_e4m3fn, (5,)),
        ("bias", torch.float32, (3,)),
    )
]


def test_shards_are_full_but_no_fuller_and_keep_modules_together():
    module_bytes = 15 + 5 + 12
    layout = plan_layout(_SPECS, shard_bytes=2 * module_bytes)
    assert [shard.name for shard in layout.shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert {tensor.shard for name, tensor in layout.tensors.items() if ".2." in name} == {
        "model-00002-of-00002.safetensors"
    }
    assert layout.total_size == 4 * module_bytes
    assert sum(shard.size for shard in layout.shards) == 4 * module_bytes + sum(
        len(shard.header) for shard in layout.shards
    )
    assert len(plan_layout(_SPECS, shard_bytes=2 * module_bytes - 1).shards) == 4


def test_every_tensor_is_aligned_and_none_overlap():
    layout = plan_layout(_SPECS, shard_bytes=10**9)
    end = len(layout.shards[0].header)
    for tensor in sorted(layout.tensors.values(), key=lambda tensor: tensor.offset):
        assert tensor.offset == end
        assert tensor.offset % tensor.dtype.itemsize == 0
        end += tensor.nbytes
    assert end == layout.shards[0].size


def test_the_digest_tells_layouts_apart():
    digests = {
        plan_layout(specs, shard_bytes).digest
        for specs, shard_bytes in [
            (_SPECS, 10**9),
            (_SPECS, 64),
            (_SPECS[:-1], 10**9),
            ([*_SPECS[:-1], replace(_SPECS[-1], dtype=torch.int32)], 10**9),
        ]
    }
    assert len(digests) == 4
    assert plan_layout(list(_SPECS), 10**9).digest in digests


def test_the_library_reads_what_is_saved(tmp_path):
    path = tmp_path / "some.safetensors"
    path.write_bytes(b"x" * 10_000)  # left by another
    tensors = {
        "a": torch.arange(6, dtype=torch.int8).view(2, 3),
        "b": torch.randn(5, 7),
        "c": torch.randn(0, 7).bfloat16(),
    }
    tensors["d"] = torch.tensor(3.0)
    save_tensors(path, tensors, {"layer": "7", "facts": '{"\u00fc": 1}'})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "layer": "7", "facts": '{"\u00fc": 1}'}
        assert set(file.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype
