"""What a folder or a Hub repository holds that is no checkpoint quantkit reads: one table, by which
every command names it at sight, with what helps.

Recognized by file names where there are no safetensors, else by config.json and tensor names.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import is_there, read_json

if TYPE_CHECKING:  # the command line imports this module, and torch takes seconds
    from quantkit.checkpoint.header import TensorSpec

_SAVED_AGAIN = (
    "AutoModelForCausalLM.from_pretrained('{path}'){change}.save_pretrained('OUT') of transformers "
    "writes safetensors"
)
_ORIGINAL = "give the model that it was made from{base}"
_A_MODEL = "give that of a model: config.json, tokenizer.json and *.safetensors"


@dataclass(frozen=True)
class Container:
    """kind: what it is. remedy: may have {path}, {file} and {base}, the model it was made from as
    its config says. files: patterns of file names that it has. methods: quant_method in config.json;
    suffixes: of tensor names that no other format has."""

    kind: str
    remedy: str
    files: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


_BY_FILE: tuple[Container, ...] = (
    Container(
        "a LoRA adapter",
        "PeftModel.from_pretrained(BASE, '{path}').merge_and_unload().save_pretrained('OUT') of "
        "peft writes the model, where BASE is its base model{base}",
        files=("adapter_config.json", "adapter_model.*"),
    ),
    Container("a pipeline of diffusers", "quantkit takes language models", ("model_index.json",)),
    Container(
        "a model in Mistral's own layout",
        "download config.json and the other safetensors of the same repository too",
        ("params.json",),
    ),
    Container("weights in GGUF", "give the file itself, {path}/{file}", ("*.gguf",)),
    Container("an ONNX model", _ORIGINAL, ("*.onnx", "*.onnx_data", "onnx/*.onnx")),
    Container("an OpenVINO model", _ORIGINAL, ("openvino_*.xml",)),
    Container("an engine of TensorRT-LLM", _ORIGINAL, ("*.engine",)),
    Container("a model of Core ML", _ORIGINAL, ("*.mlmodel*", "coreml")),
    Container("weights of MLX in NumPy's format", _ORIGINAL, ("weights*.npz",)),
    Container(
        "a state of distributed training",
        "give a folder that save_pretrained of transformers wrote",
        ("*.distcp", "zero_to_fp32.py", "global_step*", "latest_checkpointed_iteration.txt"),
    ),
    Container(
        "weights of TensorFlow or Flax",
        "give a repository of the model that has safetensors",
        ("*.h5", "*.msgpack"),
    ),
    Container(
        "pickle weights, which can run code when opened",
        _SAVED_AGAIN,
        ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.nemo"),
    ),
)
_BY_CONFIG: tuple[Container, ...] = (
    Container(
        "quantized by bitsandbytes",
        _SAVED_AGAIN.replace("{change}", ".dequantize()") + "; better, give its source{base}",
        methods=("bitsandbytes",),
        suffixes=(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".SCB"),
    ),
    Container(
        "quantized by MLX",
        "mlx_lm.convert --hf-path {path} --mlx-path OUT --dequantize writes it unquantized; better, "
        "give its source{base}",
        suffixes=(".biases",),
    ),
    Container("EXL2", _ORIGINAL, methods=("exl2",), suffixes=(".q_scale_max",)),
    Container("EXL3", _ORIGINAL, methods=("exl3",), suffixes=(".trellis",)),
    Container("quantized by TorchAO", _ORIGINAL, methods=("torchao",), suffixes=("weight_qdata",)),
    Container("quantized by HQQ", _ORIGINAL, methods=("hqq",), suffixes=(".W_q",)),
    Container("quantized by Quanto", _ORIGINAL, methods=("quanto",), suffixes=(".weight._data",)),
    Container("AQLM", _ORIGINAL, methods=("aqlm",), suffixes=(".codebooks",)),
)
_UNFINISHED = ("{}.part", "{}.partial", "{}.aria2", "{}.crdownload", "{}.incomplete", "{}.tmp")
"""Files that programs keep next to a file that they download."""
_DOWNLOADS = (".cache/huggingface/download/*.incomplete", "../../blobs/*.incomplete")
"""Downloads of huggingface_hub that are not finished, from a folder or a snapshot in its cache."""
_NUMBERED = re.compile(r"(.*-)(\d{5,6})-of-(\d{5,6})\.safetensors")
_STACKED = re.compile(r".*\bexperts\.[a-z]\w*(?:\.\w+)?")
STACKED_REMEDY = (
    "write one tensor per expert and projection, or quantize again with a writer that does"
)


def check_files(path: Path) -> None:
    """Raise QuantkitError if a folder is empty, or recognized by its files as something else than a
    checkpoint."""
    names = [file.name for file in path.iterdir()]
    if not names:
        raise QuantkitError(f"{path} is an empty folder", _A_MODEL)
    names += [f"{file.parent.name}/{file.name}" for file in path.glob("onnx/*.onnx")]
    if _has_weights(names):
        return
    said: dict[str, Any] = {}
    for name in ("adapter_config.json", "config.json"):
        if is_there(path / name) and not said:
            with suppress(QuantkitError):  # the fault of a file that is needed is reported later
                said = read_json(path / name)
    if found := foreign_files(names, said, str(path)):
        raise QuantkitError(f"{path} holds {found[0]}", found[1])


def _has_weights(names: Iterable[str]) -> bool:
    others = ("adapter_model", "consolidated")
    return any(name.endswith(".safetensors") and not name.startswith(others) for name in names)


def foreign_files(
    names: Collection[str], config: Mapping[str, Any], path: str
) -> tuple[str, str] | None:
    """What the files are, with one of them, and what helps; None where there are safetensors of a
    model. names: of all files, config: of the folder or its adapter."""
    if _has_weights(names):
        return None
    if container := next(
        (one for one in _BY_CONFIG if one.methods and _is_said(one, config)), None
    ):
        return f"a model {container.kind} (config.json)", _remedy(container, config, path)
    for container in _BY_FILE:
        for pattern in container.files:
            if file := min((name for name in names if fnmatch(name, pattern)), default=None):
                remedy = _remedy(container, config, path).replace("{file}", file)
                return f"{container.kind} ({file})", remedy
    return None


def check_readable(path: Path, config: Mapping[str, Any], tensors: "Iterable[TensorSpec]") -> None:
    """Raise QuantkitError if config.json or the tensors are those of a format that quantkit does
    not read."""
    if found := foreign_format(path, config, tensors):
        raise QuantkitError(f"{path} is {found[0]}", found[1])


def foreign_format(
    path: Path, config: Mapping[str, Any], tensors: "Iterable[TensorSpec]"
) -> tuple[str, str] | None:
    """What the checkpoint is that quantkit does not read, with the evidence, and what helps; None
    if it is not recognized."""
    stacked = None
    for container in _BY_CONFIG:
        if _is_said(container, config):
            return f"{container.kind} (config.json)", _remedy(container, config, str(path))
    for tensor in tensors:
        for container in _BY_CONFIG:
            if tensor.name.endswith(container.suffixes):
                return f"{container.kind} ({tensor.name})", _remedy(container, config, str(path))
        packed = tensor.dtype.itemsize == 1 or not tensor.dtype.is_floating_point
        if len(tensor.shape) > 2 and packed and _STACKED.fullmatch(tensor.name):
            stacked = stacked or tensor.name
    if stacked is not None:
        return f"quantized with all experts of a layer in one tensor ({stacked})", STACKED_REMEDY
    return None


def _is_said(container: Container, config: Mapping[str, Any]) -> bool:
    block = config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, dict) else None
    if method is None and container.kind == "quantized by MLX":
        own = config.get("quantization")
        return isinstance(own, dict) and {"group_size", "bits"} <= own.keys()
    return method in container.methods


def _remedy(container: Container, config: Mapping[str, Any], path: str) -> str:
    base = config.get("base_model_name_or_path") or config.get("_name_or_path")
    named = isinstance(base, str) and base and base != path
    text = container.remedy.replace("{path}", path).replace("{change}", "")
    return text.replace("{base}", f", {base}" if named else "")


def check_download(folder: Path, shard: str) -> None:
    """Raise QuantkitError if the download of a shard, missing or cut short, has not ended."""
    unfinished = (folder / pattern.format(shard) for pattern in _UNFINISHED)
    found = (file for pattern in _DOWNLOADS for file in sorted(folder.glob(pattern)))
    if file := next((file for file in (*unfinished, *found) if os.path.exists(file)), None):
        raise QuantkitError(
            f"the download of {folder / shard} is not finished: there is {file.name}",
            "wait for it, or give the command that downloads it again: it resumes",
        )


def numbering_fault(shards: Collection[str]) -> tuple[str, str]:
    """What is wrong with files `model-N-of-M.safetensors` that no index lists, and the remedy:
    shards are missing, or are of several saves; empty if all are there."""
    sets: dict[tuple[str, str], set[int]] = {}
    for shard in shards:
        if found := _NUMBERED.fullmatch(shard):
            sets.setdefault((found[1], found[3]), set()).add(int(found[2]))
    if len(sets) > 1:
        names = " and ".join(f"{stem}N-of-{count}" for stem, count in sorted(sets))
        return f"shards of {len(sets)} saves ({names})", "keep the files of one"
    for (stem, count), numbers in sets.items():
        if missing := sorted(set(range(1, int(count) + 1)) - numbers):
            digits = len(min(shards)[len(stem) :].partition("-")[0])
            first = f"{stem}{missing[0]:0{digits}}-of-{count}.safetensors"
            return f"{len(numbers)} of {int(count)} shards: {first} is missing", "download it"
    return "", ""
