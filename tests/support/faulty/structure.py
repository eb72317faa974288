"""Faults of names, shapes and experts: what the model needs, and what is stored."""

import torch

from faulty.contents import Contents
from faulty.fault import fault, has_experts


@fault(
    "tensors-missing",
    replays="areal-project/AReaL 1403: a shard with MTP keys is skipped whole, and the index "
    "rebuilt without it",
)
def a_layer_is_not_stored(c: Contents) -> None:
    layer = f"model.layers.{c.config['num_hidden_layers'] - 1}."
    c.tensors = {name: tensor for name, tensor in c.tensors.items() if not name.startswith(layer)}


@fault("tensors-missing", suits=has_experts, replays="llm-compressor 2060, vllm-ascend 883")
def an_expert_is_not_stored(c: Contents) -> None:
    prefix = c.experts[-1]
    c.tensors = {
        name: tensor for name, tensor in c.tensors.items() if not name.startswith(f"{prefix}.")
    }


@fault("tensors-missing", suits=lambda c: any("e_score_correction_bias" in n for n in c.tensors))
def the_routers_bias_is_lost(c: Contents) -> None:
    c.tensors = {
        name: tensor for name, tensor in c.tensors.items() if "e_score_correction_bias" not in name
    }


@fault("tensors-missing")
def a_norm_is_lost(c: Contents) -> None:
    del c.tensors["model.layers.1.input_layernorm.weight"]


@fault("config-field", suits=lambda c: bool(c.config.get("q_lora_rank")))
def queries_are_said_to_have_no_low_rank(c: Contents) -> None:
    c.config["q_lora_rank"] = None


@fault("head-missing", suits=lambda c: "lm_head.weight" in c.tensors)
def the_head_is_lost(c: Contents) -> None:
    del c.tensors["lm_head.weight"]


@fault("config-differs", suits=lambda c: "lm_head.weight" in c.tensors, source=True)
def the_head_is_lost_and_said_to_be_tied(c: Contents) -> None:
    del c.tensors["lm_head.weight"]
    c.config["tie_word_embeddings"] = True


@fault("names-wrong", replays="GPTQModel 2694: model.layers for model.language_model.layers")
def names_have_another_prefix(c: Contents) -> None:
    c.tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in c.tensors.items()
    }


@fault("names-wrong")
def names_lack_their_prefix(c: Contents) -> None:
    c.tensors = {name.removeprefix("model."): tensor for name, tensor in c.tensors.items()}


@fault("names-wrong", suits=has_experts, replays="vllm 54047: block_sparse_moe.experts.w2")
def experts_have_mixtrals_names(c: Contents) -> None:
    renames = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}

    def new(name: str) -> str:
        if ".experts." not in name:
            return name
        for old, other in renames.items():
            name = name.replace(old, other)
        return name.replace(".mlp.experts.", ".block_sparse_moe.experts.")

    c.tensors = {new(name): tensor for name, tensor in c.tensors.items()}


@fault("experts-fused", suits=has_experts, replays="llm-compressor 2939, vllm 40885, 54444")
def experts_are_one_tensor(c: Contents) -> None:
    prefix = c.experts[0].rpartition(".")[0]
    own = [name for name in c.tensors if name.startswith(f"{prefix}.")]
    for ending in sorted({name.split(".", 6)[-1] for name in own}):
        each = [c.tensors.pop(f"{prefix}.{number}.{ending}") for number in range(len(c.experts))]
        c.tensors[
            f"{prefix}.{ending.replace('.weight_', '_').replace('.weight', '').replace('.q', '_q')}"
        ] = torch.stack(each)


@fault("layers-beyond")
def config_counts_too_few_layers(c: Contents) -> None:
    c.config["num_hidden_layers"] -= 1
    if "num_nextn_predict_layers" in c.config:
        c.config["num_nextn_predict_layers"] = 0
        c.tensors = {
            name: t
            for name, t in c.tensors.items()
            if not name.startswith(f"model.layers.{c.config['num_hidden_layers'] + 1}.")
        }


@fault("tensors-missing")
def config_counts_too_many_layers(c: Contents) -> None:
    c.config["num_hidden_layers"] += 2
    c.config.pop("num_nextn_predict_layers", None)


@fault("shape-wrong")
def config_is_of_a_wider_model(c: Contents) -> None:
    c.config["moe_intermediate_size" if c.experts else "intermediate_size"] *= 2


@fault("shape-wrong")
def a_plain_matrix_is_transposed(c: Contents) -> None:
    c.tensors["model.embed_tokens.weight"] = c.tensors["model.embed_tokens.weight"].T.contiguous()


@fault("config-field")
def config_lacks_a_size(c: Contents) -> None:
    del c.config["hidden_size"]


@fault("architecture-wrong", suits=lambda c: c.config["model_type"] == "qwen3_moe")
def the_model_is_said_to_be_an_older_one(c: Contents) -> None:
    """It has no norms of queries and keys."""
    c.config |= {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": len(c.experts),
    }
    c.config["intermediate_size"] = c.config["moe_intermediate_size"]
