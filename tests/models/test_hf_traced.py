"""Architectures without a file of their own: what transformers computes is what is walked, and
scale groups are found by watching it."""

import re
from functools import partial

import pytest
import torch
import transformers
import yaml
from refused import refused
from tiny_models import MODELS
from torch.nn import functional as F
from transformers.core_model_loading import revert_weight_conversion
from transformers_peers import CASES, LATENT, SHARED, SPARSE

from quantkit.calibrate.sublayer import LayerWeights
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.hf_traced.architecture import TracedArchitecture

TABLE = yaml.safe_load((MODELS / "traced.yaml").read_text())
TINY, FOUND = TABLE["tiny"], TABLE["models"]


def traced(model_type, **changes):
    own = FOUND.get(model_type, {}).get("config", {})
    return {**TINY, "model_type": model_type, **own, **changes}


def found_in(architecture, layer=0):
    def short(name):
        return name.rpartition(".")[2]

    groups = architecture.scale_groups(architecture.config, layer)
    return {short(group.producer): " ".join(map(short, group.consumers)) for group in groups}


TABLES = {
    case: (kind, extra)
    for case, (kind, extra) in CASES.items()
    if not {"mqa", "windows", "gpt_oss"} & set(case.split("-"))
}
TABLES["deepseek_v3"] = ("DeepseekV3", {**LATENT, "num_nextn_predict_layers": 0})

TABLES |= {"deepseek_v32": ("DeepseekV32", SPARSE), "glm_moe_dsa": ("GlmMoeDsa", SPARSE)}


@pytest.mark.parametrize("case", TABLES)
def test_the_groups_of_a_table_are_found(case):
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


def moved(group):
    return group.producer, group.producer_is_norm, frozenset(group.consumers)


def peer_of(model_type):
    """A random model of transformers; norms and biases are random, too."""
    config = transformers.AutoConfig.for_model(**traced(model_type))
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


def published(architecture, model):
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


def experts_of(architecture, layer, tensors, x, ids, weights):
    """What the routed experts of a layer make, each of its own matrices."""
    made = torch.zeros_like(x)
    for expert, names in enumerate(architecture.experts[layer].names):
        gate, up, down = (tensors[name] for name in names)
        share = (weights * (ids == expert)).sum(-1, keepdim=True)
        made += (
            F.linear(architecture.config.gating(F.linear(x, gate), F.linear(x, up)), down) * share
        )
    return made


def after_experts(block, hidden, context):
    """As `calibrate.after_experts`, with all experts at once: what they make together is seen
    where the linears beside them are run."""
    op, width = block.weights.experts("", 0), hidden.shape[1]
    made = []

    def keep(x, ids, weights):
        made.append(op(x, ids, weights))
        return torch.zeros_like(x)

    block.weights.routed = keep
    block.fill()
    beside = block.mlp_output(hidden, context)
    return block.add_mlp_output(
        torch.cat((hidden, beside[:, width:]), dim=1), torch.cat(made), context
    )


def walked_logits(architecture, tensors, sequences):
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


@pytest.mark.parametrize("model_type", FOUND)
def test_norms_readers_and_logits_are_those_of_transformers(model_type):
    """What each norm is read by; and the logits of a model that is computed layer by layer."""
    walked, expected_groups = FOUND[model_type].get("walked"), FOUND[model_type]["found"]
    model = peer_of(model_type) if walked else None
    architecture = TracedArchitecture(model.config.to_dict() if walked else traced(model_type))
    groups = found_in(architecture)
    assert {producer: groups.get(producer) for producer in expected_groups} == expected_groups
    if model is None:
        return
    sequences = [torch.arange(5, 16), torch.arange(40, 70)]
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=ids[None]).logits[0] for ids in sequences])
        found = walked_logits(architecture, published(architecture, model), sequences)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", TABLE["refused"], ids=lambda row: row["reason"])
def test_what_cannot_be_walked_is_refused_in_a_line(row):
    with refused(re.escape(row["reason"])) as fault:
        TracedArchitecture(row["config"] if "whole" in row else {**TINY, **row["config"]})
    assert "rtn-w4a16" in fault.value.remedy


@pytest.mark.parametrize("row", TABLE["nothing"], ids=lambda row: row["reason"])
def test_what_has_nothing_to_calibrate_is_refused_in_a_line(row):
    with refused(re.escape(row["reason"])):
        TracedArchitecture({**TINY, **row["config"]})


def test_texts_longer_than_learned_positions_are_refused():
    skeleton = TracedArchitecture(traced("gpt_bigcode")).skeleton
    skeleton.check_length(32)
    with refused("32 positions computes no texts of 33 tokens") as fault:
        skeleton.check_length(33)
    assert "--seq-len 32" in fault.value.remedy


def test_a_stored_tensor_of_another_shape_is_named():
    architecture = TracedArchitecture(traced("gemma2"))
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in architecture.skeleton.model.state_dict().items()
    }
    with refused(r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[8, 64\]"):
        architecture.parameters({**shapes, "model.layers.1.mlp.up_proj.weight": (8, 64)})
    del shapes["model.layers.0.mlp.up_proj.weight"]
    with refused(r"model\.layers\.0\.mlp\.up_proj\.weight, and it is not stored"):
        architecture.parameters(shapes)
