"""What is no checkpoint that quantkit reads is named at sight, by every command, with what helps."""

import json
import shutil

import good_checkpoints
import make_model
import pytest
import torch
from commands import command
from refused import refused
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.assets import builtin_model
from quantkit.diagnosis.diagnose import diagnose

CONFIG = good_checkpoints.QWEN3 | {"num_hidden_layers": 1}
FILES = {
    "": r"is an empty folder; give that of a model: config\.json",
    "adapter_model.safetensors": r"a LoRA adapter \(adapter_.*peft .* base model, org/base$",
    "model.Q4_K_M.gguf": r"weights in GGUF .*give the file itself, .*/model\.Q4_K_M\.gguf$",
    "params.json": r"Mistral's own layout .*; download config\.json",
    "onnx/model.onnx": r"an ONNX model \(onnx/model\.onnx\); give the model that it was made from",
    "weights.00.npz": r"weights of MLX",
    "__0_0.distcp": r"a state of distributed training",
    "pytorch_model-00001-of-00002.bin": r"pickle weights, which can run code when opened .*"
    r"save_pretrained\('OUT'\) of transformers writes safetensors",
}
MLX = {"group_size": 64, "bits": 4}
SAID = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, r"\.dequantize\(\)\.save_pretrained"),
    "EXL2": ({"quant_method": "exl2", "bits": 4.0}, "give the model that it was made from"),
    "TorchAO": ({"quant_method": "torchao"}, "give the model that it was made from"),
    "HQQ": ({"quant_method": "hqq"}, "give the model that it was made from"),
}
PARTS = {
    "bitsandbytes": (".weight.quant_state.bitsandbytes__nf4", ".SCB"),
    "MLX": (".biases",),
    "EXL2": (".q_weight", ".q_scale_max"),
    "TorchAO": (".weight_qdata",),
}
STACKED = [
    *("gate_up_proj", "down_proj_weight_scale", "down_proj_blocks", "w13_weight"),
]


@pytest.fixture(scope="module")
def tensors():
    return good_checkpoints.random_weights(CONFIG)


@pytest.mark.parametrize("file", FILES)
def test_a_folder_is_named_by_its_files(file, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    if file:
        (tmp_path / file).write_bytes(b"{}")
    if file.startswith("adapter"):
        said = {"base_model_name_or_path": "org/base"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    for files in range(2 if file else 1):  # without, and with a config.json
        if files and not file.startswith("adapter"):
            (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        answers = {
            command(*words).err
            for words in (
                ("inspect", str(tmp_path)),
                ("check", str(tmp_path)),
                ("run", str(tmp_path), "x"),
                ("quantize", str(tmp_path), "--scheme", "rtn-w4a16", "--out", f"{tmp_path}-out"),
                ("convert", str(tmp_path), f"{tmp_path}-out", "--dtype", "bf16"),
            )
        }
        with refused(FILES[file]) as fault:
            Checkpoint.open(tmp_path)
        assert answers == {f"error: {fault.value}\n"}


def written(folder, tensors, **described):
    make_model.write_dense(folder, CONFIG | described, tensors)
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [*((kind, True) for kind in (*SAID, "MLX")), *((kind, False) for kind in PARTS)],
)
def test_another_programs_quantization_is_named_and_not_judged(kind, said, tensors, tmp_path):
    block, remedy = SAID.get(kind, (None, r"mlx_lm\.convert .* --dequantize"))
    said_in = {"quantization": MLX} if block is None else {"quantization_config": block}
    described = said_in if said else {}
    stored = dict(tensors)
    for name in tensors:
        if name.endswith("_proj.weight"):
            stored[name] = torch.ones(len(tensors[name]), 8, dtype=torch.uint8)
            for part in PARTS.get(kind, ()):
                stored[name.removesuffix(".weight") + part] = torch.ones(4)
    path = written(tmp_path / "model", stored, **described)
    with refused(rf"is (quantized by )?{kind} \(.*{remedy}"):
        Checkpoint.open(path)
    found = diagnose(str(path), depth="tensors").findings
    assert {(one.name, kind in one.evidence) for one in found.found} == {("not-read", True)}


@pytest.mark.parametrize("name", STACKED)
def test_quantized_experts_in_one_tensor_are_named(name, tmp_path):
    """sglang 27588, vllm 49638: not by the first dtype that a format does not have."""
    config = good_checkpoints.QWEN3_MOE | {"num_hidden_layers": 1}
    weights = good_checkpoints.random_weights(config)
    stored = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    stored[f"model.layers.0.mlp.experts.{name}"] = torch.ones(8, 64, 32, dtype=torch.uint8)
    block = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    make_model.write_dense(tmp_path / "model", config | {"quantization_config": block}, stored)
    with refused(f"all experts of a layer in one tensor .*{name}"):
        Checkpoint.open(tmp_path / "model")
    assert diagnose(str(tmp_path / "model"), depth="headers").findings.has("experts-fused")


INDEX = "model.safetensors.index.json"
_, SECOND, _ = sorted(file.name for file in builtin_model("tiny-r1").glob("*.safetensors"))


def again(folder):
    """Save the model once more in two shards, next to the three."""
    tensors = {
        name: one for file in folder.glob("model-*") for name, one in load_file(file).items()
    }
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        part = {name: tensors[name] for name in names}
        save_file(part, folder / f"model-{number:05}-of-00002.safetensors")


def renamed(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"model-0', '"pytorch-0'))


def begins(content):
    return lambda folder: (folder / SECOND).write_bytes(content)


def gone(*names, left=""):
    def remove(folder):
        for name in names:
            (folder / name).unlink()
        if left:
            (folder / left).parent.mkdir(parents=True, exist_ok=True)
            (folder / left).write_bytes(b"x")

    return remove


def linked(folder):
    target = folder.with_name("disk")
    target.mkdir()
    (folder / SECOND).rename(target / SECOND)
    (folder / SECOND).symlink_to(target / SECOND)


DOWNLOAD = ".cache/huggingface/download/abc.incomplete"
ONLY = "model.safetensors.part"
BROKEN = {
    "a shard is gone": (gone(SECOND), "shard-missing", f"{SECOND} is missing"),
    "and the index": (gone(SECOND, INDEX), "shard-missing", f"2 of 3 shards: {SECOND} is missing"),
    "it is under way": (gone(SECOND, left=DOWNLOAD), "shard-missing", "is not finished: there is"),
    "aria2 made room for it": (gone(left=f"{SECOND}.aria2"), "shard-damaged", "is not finished"),
    "the only one is under way": (
        lambda folder: gone(*(one.name for one in folder.glob("*.safetensors*")), left=ONLY)(
            folder
        ),
        "shard-missing",
        "is not finished: there is model.safetensors.part",
    ),
    "the index is gone": (gone(INDEX), "index-missing", "download the index too"),
    "a shard is zeros": (begins(bytes(4096)), "shard-damaged", "begins with zeros: .* interrupted"),
    "a shard is a page": (begins(b"<!DOCTYPE html>"), "shard-damaged", "is a web page"),
    "a shard is a pickle": (begins(b"PK\3\4" + bytes(9)), "shard-damaged", "is a pickle"),
    "a shard is elsewhere": (linked, "shard-damaged", "outside of the model's folder; put the"),
    "two saves": (
        lambda folder: (again(folder), gone(INDEX)(folder)),
        "index-missing tensor-twice",
        "shards of 2 saves .*; keep the files of one",
    ),
    "the index is another's": (
        renamed,
        "index-wrong",
        "pytorch-00001-of-000003.safetensors is missing",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_not_whole_is_named_as_what_it_is(case, tmp_path):
    """And what it lacks therefore is not reported as further faults."""
    breaks, finding, said = BROKEN[case]
    shutil.copytree(builtin_model("tiny-r1"), tmp_path / "model")
    breaks(tmp_path / "model")
    with refused(said):
        Checkpoint.open(tmp_path / "model")
    found = diagnose(str(tmp_path / "model"), depth="headers").findings
    assert {one.name for one in found.found} == set(finding.split()), found.to_json()


def test_shards_that_the_index_does_not_name_are_a_note(tmp_path):
    shutil.copytree(builtin_model("tiny-r1"), tmp_path / "model")
    again(tmp_path / "model")
    found = diagnose(str(tmp_path / "model"), depth="headers").findings
    assert [(one.name, one.severity) for one in found.found] == [("shards-unused", "note")]
