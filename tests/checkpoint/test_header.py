"""The header parser against the safetensors package, and every way a file can be damaged."""

import json

import pytest
import torch
from refused import refused
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.checkpoint.header import DTYPES, TensorSpec, encode_header, read_header


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


def test_safetensors_reads_what_we_encode(tmp_path):
    specs = [
        TensorSpec("b", torch.int64, (2,)),
        TensorSpec("ä", torch.float32, ()),
        TensorSpec("c", torch.uint8, (3,)),
    ]
    header, infos = encode_header(specs)
    assert len(header) % 8 == 0
    (tmp_path / "a.safetensors").write_bytes(header + bytes(range(23)))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("c").tolist() == [20, 21, 22]
        assert file.get_tensor("b").dtype == torch.int64
        assert file.get_tensor("ä").shape == ()
    assert [
        (i.name, i.dtype, i.shape, i.offset) for i in read_header(tmp_path, "a.safetensors")
    ] == [(i.name, i.dtype, i.shape, i.offset) for i in infos]


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
        (b"PK\x03\x04" + b"x" * 100, "is a pickle of PyTorch"),
        (b"\x08\0\0\0\0\0\0\0{{{{{{{{", "has a header that is not JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a JSON object"),
        (b'\x0f\0\0\0\0\0\0\0{"a":{},"a":{}}', "a appears twice"),
        (_file({"a": _entry()}, b"x" * 7), "is truncated: .* bytes, and its header describes"),
        (_file({"a": _entry()}, b"x" * 9), "has 1 bytes that its header does not describe"),
        (_file({"a": _entry(data_offsets=[4, 12])}, b"x" * 12), "has a gap or an overlap before a"),
        (
            _file({"a": _entry(), "b": _entry(data_offsets=[4, 12])}, b"x" * 12),
            "has a gap or an overlap before b",
        ),
        (_file({"a": _entry(shape=[3])}, b"x" * 8), "makes no sense for a"),
        (_file({"a": _entry(shape=[-2])}, b"x" * 8), "makes no sense for a"),
        (_file({"a": _entry(shape=[2.0])}, b"x" * 8), "makes no sense for a"),
        (_file({"a": _entry(data_offsets=[0])}, b"x" * 8), "makes no sense for a"),
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
