"""Checkpoints with the shapes of published models and random weights, written in seconds, for
engines whose speed is compared.

One decoder layer is made, and rounded by quantkit where that is asked; every layer of the model has
its bytes.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
from made_weights import QWEN3_8B, QWEN3_30B_A3B
from make_model import write_dense
from safetensors import safe_open
from safetensors.torch import save_file
from word_tokenizer import write_word_tokenizer

from quantkit.calibrate.recipe import Recipe
from quantkit.grids.schemes import find_scheme
from quantkit.models import find_architecture
from quantkit.quantization import quantize

_PUBLISHED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
"""What a config.json says beside the sizes."""
_QWEN3 = _PUBLISHED | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_QWEN3_MOE = _PUBLISHED | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES = {"qwen3-8b": _QWEN3 | QWEN3_8B, "qwen3-30b-a3b": _QWEN3_MOE | QWEN3_30B_A3B}
FORMATS = ("awq", "bf16")


def write_shape(directory, model, form, layers, device):
    """DIRECTORY/MODEL/FORM, unless it is there. layers: 0 for as many as the model has."""
    config, folder = SHAPES[model], directory / model
    config = config | ({"num_hidden_layers": layers} if layers else {})
    one, out = folder / "one-bf16", folder / form
    if (out / "config.json").exists():
        return out
    single = config | {"num_hidden_layers": 1}
    if not (one / "config.json").exists():
        write_dense(one, single, random_tensors(single, device))
        write_word_tokenizer(one, config["vocab_size"])
    if form == "awq":
        rounded = folder / "one-awq"
        if not rounded.exists():
            quantize(
                one,
                rounded,
                find_scheme("rtn-w4a16"),
                "awq",
                Recipe(scheme="rtn-w4a16"),
                engine="vllm",
                device=device,
            )
        one = rounded
    repeat_layer(one, out, config["num_hidden_layers"])
    return out


def random_tensors(config, device):
    """Of every name in the architecture's table: bfloat16, of a size that keeps hidden states where
    they are."""
    architecture = find_architecture(config)
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        if row.role == "norm":
            tensors[row.name] = torch.ones(row.shape, dtype=torch.bfloat16)
        else:
            noise = torch.randn(row.shape, generator=generator, device=device)
            tensors[row.name] = (noise / row.shape[-1] ** 0.5).bfloat16().cpu()
    return tensors


def repeat_layer(one, out, layers):
    """The model at `one`, which has one layer, with `layers` of them, a file each."""
    tensors = {}
    for file in sorted(one.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - safe_open is no dictionary
    parts = [{name: tensor for name, tensor in tensors.items() if ".layers.0." not in name}]
    layer = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    parts += [
        {name.replace(".layers.0.", f".layers.{number}."): tensor for name, tensor in layer.items()}
        for number in range(layers)
    ]
    names = [
        f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))
    ]
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda part, name: save_file(part, out / name, metadata={"format": "pt"}),
                parts,
                names,
            )
        )
    weight_map = {tensor: name for part, name in zip(parts, names) for tensor in part}
    size = sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    )
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((one / name).read_bytes())
    config = json.loads((one / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}, indent=2))
