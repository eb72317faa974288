"""Checkpoints with the shapes of published models and random weights, written in seconds, for
engines whose speed is compared.

One decoder layer of each kind is made, and rounded by quantkit where that is asked; every layer of
the model has the bytes of its kind. Of gpt-oss, GLM-4.5-Air, Qwen3-Next and DeepSeek-V3.2 there are
fewer layers than published, with all experts, of DeepSeek-V3.2 a quarter.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import torch
from made_weights import QWEN3_8B, QWEN3_30B_A3B, QWEN3_NEXT_80B, V32
from make_model import write_dense
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.stacked_experts import is_expert_tensor
from quantkit.evaluation.speed.targets import WORDS
from quantkit.grids.schemes import find_scheme
from quantkit.models import find_architecture
from quantkit.quantization import quantize

_SPECIAL = ("<s>", "</s>")
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
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
_LLAMA_3_1_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_GPT_OSS_20B = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_GLM_4_5_AIR = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "attention_bias": True,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


_V32_CUT = {
    "num_hidden_layers": 4,
    "n_routed_experts": 64,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def _named(model_type, architecture):
    return _PUBLISHED | {"model_type": model_type, "architectures": [f"{architecture}ForCausalLM"]}


SHAPES = {
    "qwen3-8b": _QWEN3 | QWEN3_8B,
    "qwen3-30b-a3b": _QWEN3_MOE | QWEN3_30B_A3B,
    "llama-3.1-8b": _named("llama", "Llama") | _LLAMA_3_1_8B,
    "gpt-oss-20b": _named("gpt_oss", "GptOss") | _GPT_OSS_20B,
    "glm-4.5-air": _named("glm4_moe", "Glm4Moe") | _GLM_4_5_AIR,
    "deepseek-v3.2": _named("deepseek_v32", "DeepseekV32") | V32 | _V32_CUT,
    "qwen3-next-80b": _named("qwen3_next", "Qwen3Next") | QWEN3_NEXT_80B | _QWEN3_NEXT,
}
FORMATS = ("awq", "bf16", "mxfp4")
"""mxfp4: of gpt-oss, as published: experts stacked."""
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_E2M1, _EXPONENT = 32, 120
"""Values that share an exponent; 2^-7 gives codes drawn at random the size of the other weights."""


def write_shape(directory, model, form, layers, device):
    """DIRECTORY/MODEL/FORM, unless it is there. layers: 0 for as many as SHAPES says."""
    config, folder = SHAPES[model], directory / model
    config = config | ({"num_hidden_layers": layers} if layers else {})
    out = folder / form
    if (out / "config.json").exists():
        return out
    kinds, few = kinds_of(config)
    one = folder / ("one-mxfp4" if form == "mxfp4" else "one-bf16")
    if not (one / "config.json").exists():
        tensors = random_tensors(few, device, stacked=form == "mxfp4")
        write_dense(one, few | ({"quantization_config": MXFP4} if form == "mxfp4" else {}), tensors)
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
    repeat_layers(one, out, config, kinds)
    return out


def kinds_of(config):
    """Of every layer the number of its kind, and the config of a model with a layer of each kind."""
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
    types = config.get("layer_types", [""] * layers)[:layers]
    kinds = [(kind, number < dense) for number, kind in enumerate(types)]
    distinct = list(dict.fromkeys(kinds))
    few = config | {"num_hidden_layers": len(distinct)}
    if "layer_types" in config:
        few["layer_types"] = [kind for kind, _ in distinct]
    if dense:
        few["first_k_dense_replace"] = sum(first for _, first in distinct)
    return [distinct.index(kind) for kind in kinds], few


def random_tensors(config, device, stacked=False):
    """Of every name in the architecture's table: bfloat16, of a size that keeps hidden states where
    they are. stacked: experts as gpt-oss has them."""
    architecture = find_architecture(config)
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        if stacked and is_expert_tensor(row.name):
            continue
        if row.role == "norm":
            tensors[row.name] = torch.ones(row.shape, dtype=torch.bfloat16)
        else:
            noise = torch.randn(row.shape, generator=generator, device=device)
            tensors[row.name] = (noise / row.shape[-1] ** 0.5).bfloat16().cpu()
    for layer in range(config["num_hidden_layers"] if stacked else 0):
        tensors |= stacked_experts(f"model.layers.{layer}.mlp.experts", config, generator)
    return tensors


def stacked_experts(prefix, config, generator):
    """MXFP4: two codes a byte, an exponent for 32 values."""
    experts, hidden, width = (
        config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    tensors = {}
    for name, rows, columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        shape = (experts, rows, columns // _E2M1)
        blocks = torch.randint(
            256,
            (*shape, _E2M1 // 2),
            dtype=torch.uint8,
            generator=generator,
            device=generator.device,
        )
        tensors |= {
            f"{prefix}.{name}_proj_blocks": blocks.cpu(),
            f"{prefix}.{name}_proj_scales": torch.full(shape, _EXPONENT, dtype=torch.uint8),
            f"{prefix}.{name}_proj_bias": torch.zeros(experts, rows, dtype=torch.bfloat16),
        }
    return tensors


def repeat_layers(one, out, config, kinds):
    """The model at `one`, which has a layer of each kind, with one for each of `kinds`, a file
    each."""
    tensors = {}
    for file in sorted(one.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - safe_open is no dictionary
    parts = [{name: tensor for name, tensor in tensors.items() if ".layers." not in name}]
    for number, kind in enumerate(kinds):
        made, own = f".layers.{kind}.", f".layers.{number}."
        parts.append({name.replace(made, own): tensors[name] for name in tensors if made in name})
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
    written = json.loads((one / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(written | config, indent=2))


def write_word_tokenizer(path, vocab_size):
    """tokenizer.json and its settings, in place of those that are there: a token for each word of
    `quantkit bench`'s prompts, so that a prompt has the length asked for, and a word for every
    other id, so that each token of an answer arrives as text."""
    names = [*_SPECIAL, *WORDS]
    names += [f"w{number}" for number in range(len(names), vocab_size)]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[-1])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "pad_token": _SPECIAL[1],
        "unk_token": names[-1],
        "chat_template": _TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
