"""Faults of what is said of the quantization, and of the parts of a quantized linear."""

import torch

from faulty.contents import Contents
from faulty.fault import (
    arguments,
    fault,
    has_block,
    has_experts,
    has_groups,
    has_quantized_experts,
    is_quantized,
    listed,
    lists_plain_modules,
    of_format,
    relist,
)


@fault("description-missing", suits=has_block, replays="vllm 39256")
def quantization_config_is_lost(c: Contents) -> None:
    del c.config["quantization_config"]
    c.files.pop("hf_quant_config.json", None)


@fault("description-wrong", suits=has_block)
def another_format_is_said(c: Contents) -> None:
    method = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    }
    other = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    c.config["quantization_config"] = other if c.format.name == "awq" else method
    c.files.pop("hf_quant_config.json", None)


@fault("nothing-quantized", suits=has_block)
def everything_is_plain(c: Contents) -> None:
    for module in list(c.linears):
        c.plain(module)


@fault("group-size-wrong", suits=has_groups)
def another_group_size_is_said(c: Contents) -> None:
    if c.format.name == "compressed-tensors":
        c.block["config_groups"]["group_0"]["weights"]["group_size"] *= 2
    else:
        c.block["group_size"] *= 2


@fault("part-missing", suits=is_quantized, replays="vllm-ascend 4096: a scale that is not there")
def a_scale_is_lost(c: Contents) -> None:
    module = c.linear()
    names = [name for name in c.parts(module) if name.endswith((".scales", ".weight_scale"))]
    del c.tensors[names[0]]


@fault("part-orphan", "tensors-missing", suits=is_quantized)
def codes_are_lost(c: Contents) -> None:
    module = c.linear()
    del c.tensors[module + c.linears[module].format.marker]


@fault("part-malformed", suits=is_quantized)
def a_scale_has_another_shape(c: Contents) -> None:
    module = c.linear()
    name = next(name for name in c.parts(module) if name.endswith((".scales", ".weight_scale")))
    c.tensors[name] = c.tensors[name][:-1]


@fault(
    "listed-but-quantized",
    suits=lists_plain_modules,
    replays="llm-compressor 2060: experts in the ignore list",
)
def experts_are_listed_as_plain(c: Contents) -> None:
    entry = {
        "compressed-tensors": r"re:.*down_proj$",
        "awq": "down_proj",
        "modelopt": "*down_proj",
    }[c.format.name]
    relist(c, [*listed(c), entry])


@fault(
    "listed-but-quantized",
    suits=lambda c: c.format.name == "awq" and any(".mlp.gate_proj" in m for m in c.linears),
    replays="formats.md, pitfall 3",
)
def the_router_is_listed_by_a_part_of_its_name(c: Contents) -> None:
    relist(c, ["mlp.gate", "kv_b_proj", "lm_head"])


@fault("plain-not-listed", suits=lists_plain_modules, replays="vllm 45212")
def a_linear_was_left_out_and_not_listed(c: Contents) -> None:
    if not listed(c):
        relist(c, ["lm_head"])
    for ending in ("gate_proj", "up_proj", "down_proj"):
        c.plain(c.linear().rpartition(".")[0] + f".{ending}")


@fault(
    "experts-mixed",
    suits=has_quantized_experts,
    replays="GPTQModel 1680: some experts are not quantized",
)
def one_expert_was_left_plain(c: Contents) -> None:
    for module in [m for m in c.linears if m.startswith(f"{c.experts[1]}.")]:
        c.plain(module)


@fault(
    "experts-plain",
    suits=lambda c: has_quantized_experts(c) and any(".experts." not in m for m in c.linears),
    replays="llm-compressor 2060",
)
def no_expert_was_quantized(c: Contents) -> None:
    for module in [m for m in c.linears if ".experts." in m]:
        c.plain(module)
    if lists_plain_modules(c):
        relist(
            c,
            [
                *listed(c),
                {
                    "compressed-tensors": r"re:.*\.experts\..*",
                    "awq": ".experts.",
                    "modelopt": "*.experts.*",
                }[c.format.name],
            ],
        )


@fault(
    "siblings-mixed",
    suits=lambda c: is_quantized(c) and any(m.endswith("mlp.gate_proj") for m in c.linears),
)
def gate_is_quantized_and_up_is_not(c: Contents) -> None:
    module = next(m for m in c.linears if m.endswith("mlp.gate_proj")).replace(
        "gate_proj", "up_proj"
    )
    c.plain(module)
    if lists_plain_modules(c):
        relist(c, [*listed(c), module])


@fault("description-wrong", suits=of_format("compressed-tensors pack", "awq", "gptq"))
def three_bits_are_said(c: Contents) -> None:
    args = arguments(c)
    args["num_bits" if "num_bits" in args else "bits"] = 3


@fault("description-wrong", suits=has_block)
def the_method_is_misspelt(c: Contents) -> None:
    c.block["quant_method"] += "-x"
    c.files.pop("hf_quant_config.json", None)


@fault("listed-but-quantized", suits=of_format("compressed-tensors"))
def a_group_is_for_no_module(c: Contents) -> None:
    c.block["config_groups"]["group_0"]["targets"] = []


@fault("listed-but-quantized", suits=of_format("compressed-tensors"))
def the_group_is_for_attention_alone(c: Contents) -> None:
    c.block["config_groups"]["group_0"]["targets"] = [r"re:.*self_attn.*"]


@fault(
    "group-size-wrong",
    "part-malformed",
    suits=lambda c: has_groups(c) and c.format.name == "compressed-tensors",
)
def groups_are_said_to_be_channels(c: Contents) -> None:
    c.block["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}


@fault("descriptions-disagree", suits=of_format("modelopt"))
def modelopts_two_files_disagree(c: Contents) -> None:
    side = c.json("hf_quant_config.json")
    side["quantization"]["exclude_modules"] = []
    c.set_json("hf_quant_config.json", side)


@fault("listed-but-quantized", suits=of_format("modelslim"))
def modelslim_does_not_describe_a_linear(c: Contents) -> None:
    module, side = c.linear(), c.json("quant_model_description.json")
    c.set_json(
        "quant_model_description.json",
        {name: kind for name, kind in side.items() if not name.startswith(f"{module}.")},
    )


@fault("plain-not-listed", suits=of_format("modelslim"))
def modelslim_says_that_the_head_is_quantized(c: Contents) -> None:
    c.set_json(
        "quant_model_description.json",
        {**c.json("quant_model_description.json"), "lm_head.weight": "W8A8_DYNAMIC"},
    )


@fault("plain-not-listed", suits=of_format("compressed-tensors", "modelopt"))
def the_head_is_in_no_list(c: Contents) -> None:
    relist(c, [entry for entry in listed(c) if "lm_head" not in entry])


@fault("plain-not-listed", suits=of_format("gptq"))
def gptq_says_that_the_head_is_quantized(c: Contents) -> None:
    c.block["lm_head"] = True


@fault(
    "part-missing",
    suits=is_quantized,
    replays="Model-Optimizer 1340: experts that were never calibrated have no input_scale",
)
def a_scale_of_inputs_is_lost(c: Contents) -> None:
    c.tensors |= {f"{module}.input_scale": torch.tensor(0.01) for module in list(c.linears)[1:]}


@fault("part-orphan", suits=lambda c: is_quantized(c) and has_experts(c))
def a_routers_scale_is_left(c: Contents) -> None:
    router = next(name for name in c.tensors if name.endswith("mlp.gate.weight"))
    c.tensors[f"{router}_scale"] = torch.ones(len(c.tensors[router]), 1)


@fault("cache-scales-missing", suits=lambda c: has_block(c) and "config_groups" in c.block)
def the_cache_is_said_to_have_scales(c: Contents) -> None:
    c.block["kv_cache_scheme"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }


@fault("part-missing", suits=of_format("compressed-tensors pack"))
def an_order_of_groups_is_said_and_not_stored(c: Contents) -> None:
    arguments(c)["actorder"] = "group"


@fault("description-unreadable", suits=of_format("gptq"))
def an_exception_is_no_pattern(c: Contents) -> None:
    c.block["dynamic"] = {"+:*down(": {"bits": 8}}


@fault("listed-but-quantized", suits=lambda c: bool(c.linears) and c.format.name == "fp8-block")
def fp8_linears_are_listed_as_plain(c: Contents) -> None:
    c.block["modules_to_not_convert"] = [c.linear().rpartition(".")[0]]


@fault("part-missing", suits=lambda c: is_quantized(c) and c.config["num_hidden_layers"] > 1)
def a_layers_cache_has_no_scale(c: Contents) -> None:
    layers = range(c.config["num_hidden_layers"] + (1 if c.mtp else 0))
    c.tensors |= {
        f"model.layers.{layer}.self_attn.k_scale": torch.tensor(0.01)
        for layer in layers
        if layer != 1
    }


@fault("description-old-key", suits=of_format("compressed-tensors"))
def the_description_has_its_old_key(c: Contents) -> None:
    c.config["compression_config"] = c.config.pop("quantization_config")


@fault("description-old-key", suits=of_format("compressed-tensors"))
def an_older_description_says_otherwise(c: Contents) -> None:
    c.config["compression_config"] = {**c.block, "ignore": []}


@fault(
    "list-matches-nothing",
    suits=lambda c: of_format("compressed-tensors", "modelopt")(c) and has_experts(c),
)
def routers_are_listed_under_another_name(c: Contents) -> None:
    relist(c, [entry.replace("mlp", "feed_forward") for entry in listed(c)])


@fault("description-wrong", suits=of_format("modelslim"))
def modelslim_says_other_bits(c: Contents) -> None:
    said = {"W8A8_DYNAMIC": "W4A8_DYNAMIC", "W4A8_DYNAMIC": "W8A8_DYNAMIC"}
    side = c.json("quant_model_description.json")
    c.set_json(
        "quant_model_description.json",
        {
            name: said.get(kind, kind) if isinstance(kind, str) else kind
            for name, kind in side.items()
        },
    )


@fault(
    "part-missing",
    suits=of_format("modelslim"),
    replays="vllm-ascend 2144, 5630: a cache without its offsets",
)
def a_cache_in_8_bits_has_no_offsets(c: Contents) -> None:
    for layer in range(c.config["num_hidden_layers"] + (1 if c.mtp else 0)):
        c.tensors[f"model.layers.{layer}.self_attn.k_proj.kv_cache_scale"] = torch.full((64,), 0.02)


@fault(
    "part-missing", suits=lambda c: of_format("modelslim")(c) and c.config["num_hidden_layers"] > 1
)
def latents_in_8_bits_lack_a_scale(c: Contents) -> None:
    for layer in range(c.config["num_hidden_layers"] + (1 if c.mtp else 0)):
        for one, heads in (("fa_q", 4), ("fa_k", 1), ("fa_v", 1)):
            c.tensors[f"model.layers.{layer}.self_attn.{one}.offset"] = torch.zeros(
                heads, 1, dtype=torch.int8
            )
            if (layer, one) != (1, "fa_k"):
                c.tensors[f"model.layers.{layer}.self_attn.{one}.scale"] = torch.full(
                    (heads, 1), 0.02
                )


@fault("part-missing", suits=lambda c: bool(c.linears) and c.format.name == "fp8-block")
def fp8_inputs_are_said_to_be_static(c: Contents) -> None:
    c.block["activation_scheme"] = "static"
