"""Architectures without a file of their own: what transformers computes is what is walked, and
scale groups are found by watching it."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.core_model_loading import revert_weight_conversion
from transformers_peers import CASES, EXPERTS, LATENT, SHARED, SPARSE

from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.common.errors import QuantkitError
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.hf_traced.architecture import TracedArchitecture
from quantkit.models.hf_traced.layer import DecoderLayer
from quantkit.models.table import ScaleGroup

TINY = {
    **SHARED,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QKV, GATE_UP = "q_proj k_proj v_proj", "gate_proj up_proj"
ROUTED = " ".join([GATE_UP] * EXPERTS["num_experts"])
LLAMA4 = {
    "num_experts_per_tok": 1,
    "num_local_experts": 3,
    "intermediate_size_mlp": 128,
    "head_dim": 16,
    "attention_chunk_size": 16,
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 3,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
AFMOE = {
    "head_dim": 16,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_dense_layers": 0,
}
FOUND: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "gemma2": ({"head_dim": 16}, {"input_layernorm": QKV, "pre_feedforward_layernorm": GATE_UP}),
    "gemma3_text": (
        {"head_dim": 16},
        {"input_layernorm": QKV, "pre_feedforward_layernorm": GATE_UP},
    ),
    "phi": ({}, {"input_layernorm": f"{QKV} fc1"}),
    "phi3": ({}, {"input_layernorm": "qkv_proj", "post_attention_layernorm": "gate_up_proj"}),
    "starcoder2": ({}, {"input_layernorm": QKV, "post_attention_layernorm": "c_fc"}),
    "cohere": ({}, {"input_layernorm": f"{QKV} {GATE_UP}"}),
    "granite": (
        {"residual_multiplier": 0.3},
        {"input_layernorm": QKV, "post_attention_layernorm": GATE_UP},
    ),
    "gpt_neox": (
        {},
        {"input_layernorm": "query_key_value", "post_attention_layernorm": "dense_h_to_4h"},
    ),
    "falcon": (
        {"new_decoder_architecture": False},
        {"input_layernorm": "query_key_value dense_h_to_4h"},
    ),
    "stablelm": ({}, {"input_layernorm": QKV, "post_attention_layernorm": GATE_UP}),
    "glm": ({"head_dim": 16}, {"input_layernorm": QKV, "post_attention_layernorm": "gate_up_proj"}),
    "smollm3": ({}, {"input_layernorm": QKV, "post_attention_layernorm": GATE_UP}),
    "nemotron": ({}, {"input_layernorm": QKV, "post_attention_layernorm": "up_proj"}),
    "opt": (
        {"ffn_dim": 128, "word_embed_proj_dim": 64},
        {"self_attn_layer_norm": QKV, "final_layer_norm": "fc1", "fc1": "fc2"},
    ),
    "bloom": (
        {"n_layer": 2, "n_head": 4},
        {"input_layernorm": "query_key_value", "post_attention_layernorm": "dense_h_to_4h"},
    ),
    "seed_oss": ({"head_dim": 16}, {"input_layernorm": QKV, "post_attention_layernorm": GATE_UP}),
    "hunyuan_v1_dense": (
        {"head_dim": 16},
        {"input_layernorm": QKV, "post_attention_layernorm": GATE_UP},
    ),
    "apertus": ({}, {"attention_layernorm": QKV, "feedforward_layernorm": "up_proj"}),
    "lfm2": ({}, {"operator_norm": QKV, "ffn_norm": "w1 w3"}),
    "mamba": ({}, {"norm": "in_proj"}),
    "gpt_bigcode": ({"max_position_embeddings": 32}, {"ln_1": "c_attn", "ln_2": "c_fc"}),
    "recurrent_gemma": (
        {
            "head_dim": 16,
            "lru_width": 64,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
        },
        {"temporal_pre_norm": "linear_y linear_x", "channel_pre_norm": GATE_UP},
    ),
    "bamba": (
        {
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
        },
        {"input_layernorm": "in_proj", "pre_ff_layernorm": GATE_UP},
    ),
    "qwen2_vl": (
        {
            "text_config": {**TINY, "model_type": "qwen2_vl_text", "rope_parameters": ROPE},
            "vision_config": VISION,
        },
        {"input_layernorm": QKV, "post_attention_layernorm": GATE_UP},
    ),
    "qwen3_5_text": (
        {"head_dim": 16, "num_hidden_layers": 4, **LINEAR_ATTENTION},
        {
            "input_layernorm": "in_proj_qkv in_proj_z in_proj_b in_proj_a",
            "post_attention_layernorm": GATE_UP,
        },
    ),
    "olmoe": ({**EXPERTS}, {"input_layernorm": QKV, "post_attention_layernorm": f"gate {ROUTED}"}),
    "granitemoe": (
        {"num_local_experts": 2},
        {"input_layernorm": QKV, "post_attention_layernorm": f"layer {GATE_UP} {GATE_UP}"},
    ),
    "phimoe": (
        {"num_local_experts": 2},
        {"input_layernorm": QKV, "post_attention_layernorm": "gate w1 w3 w1 w3"},
    ),
    "olmo2": ({}, {"up_proj": "down_proj"}),  # its norms come after what they would scale
    "exaone4": ({"sliding_window": 8}, {"up_proj": "down_proj"}),
    "arcee": ({}, {"input_layernorm": QKV, "post_attention_layernorm": "up_proj"}),
    "cohere2": ({}, {"input_layernorm": f"{QKV} {GATE_UP}"}),
    "persimmon": (
        {},
        {"input_layernorm": "query_key_value", "post_attention_layernorm": "dense_h_to_4h"},
    ),
    "llama4_text": (
        {
            **LLAMA4,
            "moe_layers": [0],
        },  # each expert reads what its router made of the norm's output
        {
            "input_layernorm": QKV,
            "post_attention_layernorm": f"router {GATE_UP} {GATE_UP} {GATE_UP} {GATE_UP}",
        },
    ),
    "gemma4_text": (
        GEMMA4,
        {
            "input_layernorm": QKV,
            "pre_feedforward_layernorm": GATE_UP,
            "pre_feedforward_layernorm_2": f"{GATE_UP} {GATE_UP} {GATE_UP}",
        },
    ),
    "afmoe": (
        AFMOE,
        {
            "input_layernorm": f"{QKV} gate_proj",
            "pre_mlp_layernorm": f"gate {GATE_UP} {GATE_UP} {GATE_UP}",
        },
    ),
    "flex_olmo": ({"num_experts": 3, "num_experts_per_tok": 2}, {"up_proj": "down_proj"}),
    "axk1": (
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
        },
        {
            "input_layernorm": "q_a_proj kv_a_proj_with_mqa",
            "post_attention_layernorm": f"gate {GATE_UP} {GATE_UP} {GATE_UP}",
        },
    ),
    "deepseek_v3": (
        {**LATENT, "q_lora_rank": None, "num_nextn_predict_layers": 0},  # of Moonlight
        {
            "input_layernorm": "q_proj kv_a_proj_with_mqa",
            "kv_a_layernorm": "kv_b_proj",
            "post_attention_layernorm": GATE_UP,
        },
    ),
}
"""model_type -> more of its config, and of its first layer: what makes a tensor -> what reads it,
by the last part of their names."""


WALKED = [
    "gemma2",
    "phi",
    "cohere",
    "granite",
    "gpt_neox",
    "falcon",
    "nemotron",
    "opt",
    "bloom",
    "mamba",
    "gpt_bigcode",
    "recurrent_gemma",
    "qwen2_vl",
    "qwen3_5_text",
    "olmo2",
    "olmoe",
    "llama4_text",
    "gemma4_text",
    "afmoe",
    "flex_olmo",
    "axk1",
    "deepseek_v3",
]


def found_in(architecture: TracedArchitecture, layer: int = 0) -> dict[str, str]:
    def short(name: str) -> str:
        return name.rpartition(".")[2]

    groups = architecture.scale_groups(architecture.config, layer)
    return {short(group.producer): " ".join(map(short, group.consumers)) for group in groups}


@pytest.mark.parametrize("model_type", FOUND)
def test_norms_and_their_readers_are_found(model_type: str) -> None:
    extra, expected = FOUND[model_type]
    found = found_in(TracedArchitecture({**TINY, "model_type": model_type, **extra}))
    assert {producer: found.get(producer) for producer in expected} == expected


MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DEEPSEEK = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    **MLA,
}
TABLES = {
    case: (kind, extra)
    for case, (kind, extra) in CASES.items()
    if not {"mqa", "windows", "gpt_oss"} & set(case.split("-"))
}
TABLES["deepseek_v3"] = (
    "DeepseekV3",
    {**DEEPSEEK, "num_experts_per_tok": 3, "num_nextn_predict_layers": 0},
)

TABLES |= {"deepseek_v32": ("DeepseekV32", SPARSE), "glm_moe_dsa": ("GlmMoeDsa", SPARSE)}


@pytest.mark.parametrize("case", TABLES)
def test_the_groups_of_a_table_are_found(case: str) -> None:
    kind, extra = TABLES[case]
    config = getattr(transformers, f"{kind}Config")(**{**SHARED, **extra}).to_dict()
    table, watched = find_architecture(config), TracedArchitecture(config)
    for layer in range(config["num_hidden_layers"]):
        listed = table.scale_groups(table.Config.from_dict(config), layer)
        found = watched.scale_groups(watched.config, layer)
        # Watching finds a producer's rows one by one, and no scale that several columns share.
        assert {moved(group) for group in listed if group.heads is None} <= {
            moved(group) for group in found
        }


def moved(group: ScaleGroup) -> tuple[str, bool, frozenset[str]]:
    return group.producer, group.producer_is_norm, frozenset(group.consumers)


def peer_of(model_type: str, extra: dict[str, Any]) -> Any:
    """A random model of transformers; norms and biases are random, too."""
    config = transformers.AutoConfig.for_model(**{**TINY, "model_type": model_type, **extra})
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    torch.manual_seed(7)
    model = (
        next(kind for kind in kinds if type(config) in kind._model_mapping)
        .from_config(config, dtype=torch.float32)
        .eval()
    )
    for parameter in model.parameters():
        drawn = torch.randn_like(parameter)
        parameter.data = (
            0.5 + drawn * 0.3 if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5
        )
    return model


def published(architecture: TracedArchitecture, model: Any) -> dict[str, Tensor]:
    """The state dict in the names of published checkpoints, with stacks of experts cut up."""
    tensors = {
        name: tensor.clone()
        for name, tensor in revert_weight_conversion(model, model.state_dict()).items()
    }
    for stack in architecture.stacks:
        whole = tensors.pop(stack.name)
        for names, one in zip(stack.parts, whole.mT if stack.transposed else whole):
            tensors |= dict(zip(names, one.chunk(len(names))))
    return tensors


def experts_of(
    architecture: TracedArchitecture,
    layer: int,
    tensors: dict[str, Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> Tensor:
    """What the routed experts of a layer make, each of its own matrices."""
    made = torch.zeros_like(x)
    for expert, names in enumerate(architecture.experts[layer].names):
        gate, up, down = (tensors[name] for name in names)
        share = (weights * (ids == expert)).sum(-1, keepdim=True)
        made += (
            F.linear(architecture.config.gating(F.linear(x, gate), F.linear(x, up)), down) * share
        )
    return made


def after_experts(block: DecoderLayer, hidden: Tensor, context: CausalContext) -> Tensor:
    """As `calibrate.after_experts`, with all experts at once: what they make together is seen
    where the linears beside them are run."""
    op, width = block.weights.experts("", 0), hidden.shape[1]
    made: list[Tensor] = []

    def keep(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made.append(op(x, ids, weights))
        return torch.zeros_like(x)

    block.weights.routed = keep  # type: ignore[attr-defined]
    block.fill()
    beside = block.mlp_output(hidden, context)
    return block.add_mlp_output(
        torch.cat((hidden, beside[:, width:]), dim=1), torch.cat(made), context
    )


def walked_logits(
    architecture: TracedArchitecture, tensors: dict[str, Tensor], sequences: list[Tensor]
) -> Tensor:
    """As a calibrated run goes: embedding, the halves of every layer over all sequences, last norm,
    head."""
    embed_and_head, context = (
        architecture.embed_and_head(tensors.__getitem__, torch.device("cpu")),
        CausalContext([len(ids) for ids in sequences]),
    )
    rows = architecture.parameters({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    hidden = embed_and_head.embed(sequences)
    for layer, kind in enumerate(architecture.kinds):
        experts = partial(experts_of, architecture, layer, tensors)
        block = architecture.DecoderLayer(
            architecture.config, layer, LayerWeights(tensors, experts)
        )
        if kind.plan.halves is not None:
            hidden = block.attend(hidden, context)
        hidden = (
            after_experts(block, hidden, context)
            if kind.after_experts
            else block.feed_forward(hidden, context)
        )
    head = min(
        (row for row in rows if row.role in ("head", "embedding")),
        key=lambda row: row.role != "head",
    )
    return embed_and_head.logits(embed_and_head.final_norm(hidden) @ tensors[head.name].t(), 0)


@pytest.mark.parametrize("model_type", WALKED)
def test_what_is_walked_is_what_transformers_computes(model_type: str) -> None:
    model = peer_of(model_type, FOUND[model_type][0])
    sequences = [torch.arange(5, 16), torch.arange(40, 70)]
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=ids[None]).logits[0] for ids in sequences])
        architecture = TracedArchitecture(model.config.to_dict())
        found = walked_logits(architecture, published(architecture, model), sequences)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "never"}, "does not know 'never'"),
        (
            {"model_type": "t5", "vocab_size": 64, "d_model": 32, "num_layers": 2},
            "gives no logits of its text model alone",
        ),
        ({**TINY, "model_type": "llama", "num_attention_heads": "four"}, "does not build it"),
        (
            {**TINY, "model_type": "gpt_oss", "num_local_experts": 4},
            "the experts of GptOssExperts hold",
        ),
        (
            {**TINY, "model_type": "olmo_hybrid"},
            "checkpoints hold linear_attn.conv1d in another form",
        ),
        (
            {**TINY, "model_type": "llama4_text", **LLAMA4, "num_experts_per_tok": 2},
            "gives each of the experts that it asks another input",
        ),
        (
            {**TINY, "model_type": "gemma4_text", **GEMMA4, "hidden_size_per_layer_input": 8},
            "layers cannot be run one by one",
        ),
    ],
)
def test_what_cannot_be_walked_is_refused_in_a_line(config: dict[str, Any], told: str) -> None:
    with pytest.raises(QuantkitError, match=re.escape(told)) as fault:
        TracedArchitecture(config)
    assert "rtn-w4a16" in fault.value.remedy


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "gpt2"}, "its matrices are of Conv1D"),
        (
            {"model_type": "bart", "d_model": 64, "decoder_layers": 2, "encoder_layers": 2},
            "leaves out encoder_attn.k_proj",
        ),
    ],
)
def test_what_has_nothing_to_calibrate_is_refused_in_a_line(
    config: dict[str, Any], told: str
) -> None:
    with pytest.raises(QuantkitError, match=re.escape(told)):
        TracedArchitecture({**TINY, **config})


def test_texts_longer_than_learned_positions_are_refused() -> None:
    skeleton = TracedArchitecture(
        {**TINY, "model_type": "gpt_bigcode", "max_position_embeddings": 32}
    ).skeleton
    skeleton.check_length(32)
    with pytest.raises(QuantkitError, match="32 positions computes no texts of 33 tokens") as fault:
        skeleton.check_length(33)
    assert "--seq-len 32" in fault.value.remedy


def test_a_stored_tensor_of_another_shape_is_named() -> None:
    architecture = TracedArchitecture({**TINY, "model_type": "gemma2", "head_dim": 16})
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in architecture.skeleton.model.state_dict().items()
    }
    with pytest.raises(
        QuantkitError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[8, 64\]"
    ):
        architecture.parameters({**shapes, "model.layers.1.mlp.up_proj.weight": (8, 64)})
    del shapes["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(
        QuantkitError, match=r"model\.layers\.0\.mlp\.up_proj\.weight, and it is not stored"
    ):
        architecture.parameters(shapes)
