"""Tiny random models of transformers, and their tensors as checkpoints are published: what our
forwards are held against."""

import torch
import transformers
from tiny_models import TABLE
from transformers.core_model_loading import revert_weight_conversion

from quantkit.checkpoint.tensor_aliases import aliases

SHARED, _PARTS = TABLE["shared"], TABLE["parts"]
EXPERTS, HY_V3, LATENT, SPARSE, COMPRESSED, POOLED, GATED, QWEN_3_5, QWEN_3_5_DENSE, FLASH_NEXT = (
    _PARTS[name]
    for name in (
        *("experts", "hy_v3", "latent", "sparse", "compressed", "pooled", "gated"),
        *("qwen_3_5", "qwen_3_5_dense", "flash_next"),
    )
)
CASES = {name: (kind, extra) for name, (kind, extra) in TABLE["peers"].items()}


def random_peer(kind, extra, model_class=None):
    """A transformers model with every parameter drawn at random, biases and norms included.
    model_class: where it is not called so."""
    shared = {
        key: value
        for key, value in SHARED.items()
        if kind != "DeepseekV4" or key != "intermediate_size"
    }
    config = getattr(transformers, f"{kind}Config")(**{**shared, **extra})
    torch.manual_seed(7)
    model = getattr(transformers, model_class or f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        matrix, noise = parameter.ndim > 1, torch.randn_like(parameter)
        parameter.data = noise * 1.6 / parameter.shape[-1] ** 0.5 if matrix else 1 + noise * 0.3
        if name.endswith("A_log"):
            # States last. What forgets at once gives v (k q), whose norm divides by k q, which may
            # be nearly 0.
            parameter.data -= 5
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
        if name.endswith("tid2eid"):
            buffer.copy_(
                torch.rand(len(buffer), config.n_routed_experts).topk(buffer.shape[1]).indices
            )
    return model


def checkpoint_tensors(model):
    """The state dict in the names of published checkpoints, by transformers' own conversion: it
    holds experts stacked. Those that are published stacked too are taken apart here, by hand."""
    tensors = {}
    stored = revert_weight_conversion(model, model.state_dict())
    names = aliases({"model_type": model.config.model_type}, stored)
    for name, tensor in stored.items():
        name = names.get(name, name)
        module, _, last = name.rpartition(".")
        if not module.endswith("experts"):
            tensors[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            turned = model.config.model_type == "gpt_oss"
            weight = own.t() if own.dim() == 2 and turned else own
            both = (weight[::2], weight[1::2]) if turned else weight.chunk(2)
            sides = (
                dict(zip(("gate_proj", "up_proj"), both))
                if last.startswith("gate_up")
                else {"down_proj": weight}
            )
            kind = "bias" if last.endswith("_bias") else "weight"
            tensors |= {
                f"{module}.{expert}.{side}.{kind}": part.contiguous()
                for side, part in sides.items()
            }
    return tensors


def whole(extra, kind="Qwen3_5Moe"):
    """A random text model of Qwen3.5-MoE, Qwen3.5 or Qwen3.8-Flash-Next, with the config.json and the names of the
    model around it."""
    peer = random_peer(f"{kind}Text", extra, f"{kind}ForCausalLM")
    rope = {**peer.config.rope_parameters, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
    config = {
        "model_type": peer.config.model_type.removesuffix("_text"),
        "text_config": {**peer.config.to_dict(), "rope_parameters": rope},
    }
    tensors = {}
    for name, tensor in checkpoint_tensors(peer).items():
        bare = name.replace("model.language_model.", "model.", 1)
        tensors[
            bare.replace("model.", "model.language_model.", 1)
            if bare.startswith("model.")
            else bare
        ] = tensor
    return peer, config, tensors


def glm5_next(extra):
    """A random GLM-5.3-Flash, its config.json, and the tensors of its text model."""
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision |= {"out_hidden_size": 64, "projection_intermediate_size": 32}
    parts = {"text_config": {**SHARED, **extra}, "vision_config": vision}
    peer = random_peer("Glm5Next", parts, "Glm5NextForConditionalGeneration")
    tensors = checkpoint_tensors(peer)
    text = {name: own for name, own in tensors.items() if not name.startswith("model.visual.")}
    return peer, peer.config.to_dict(), text


def hy_v4(extra):
    """A random Hy4, its config.json, which says that halves are rotated, and its tensors."""
    peer = random_peer("HYV4", extra)
    return peer, {**peer.config.to_dict(), "rope_interleave": False}, checkpoint_tensors(peer)
