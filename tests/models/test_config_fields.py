"""Every field that transformers' configs have: what config.json then says is computed as
transformers does, or refused by name.

The reference is the config class itself: a field that a later release adds is asked for without a
change here.
"""

from dataclasses import fields

import pytest
import torch
import transformers
from plain_weights import PlainWeights
from refused import refused
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, TABLE
from transformers_peers import (
    CASES,
    SHARED,
    checkpoint_tensors,
    glm5_next,
    hy_v4,
    random_peer,
    whole,
)

from quantkit import QuantkitError
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.mlp import PROJ_NAMES

BASES = {
    name: (CASES[name][0], {**CASES[name][1], "mlp_only_layers": [], **extra})
    if isinstance(extra, dict)
    else (extra[0], {**TABLE["parts"][extra[1]], **extra[2]})
    for name, extra in TABLES["fields_of"].items()
}
NOT_OF_THE_MODEL = set(TABLES["fields_not_of_the_model"])


def others(name, value):
    """Values that the field does not have."""
    by_name = {
        "layer_types": [["sliding_attention", "full_attention"], ["full_attention"] * 2],
        "mlp_only_layers": [[1]],
        "mlp_layer_types": [["sparse", "dense"]],
        "indexer_types": [["full", "shared"]],
        "rope_parameters": [
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            {"rope_type": "default", "rope_theta": 300.0},
        ],
        "sliding_window": [3, None],
        "head_dim": [20],
        "hidden_act": ["gelu_pytorch_tanh", "relu"],
        "n_group": [2, 1],
        "topk_group": [1],
        "decoder_sparse_step": [2],
        "num_experts_per_tok": [2],
        "num_key_value_heads": [1],
        "num_hidden_layers": [1],
    }
    if name in by_name:
        return by_name[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2]
    return [value * 1.5 + 1e-5] if isinstance(value, float) else []


@pytest.mark.parametrize("base", BASES)
def test_every_field_is_computed_or_refused(base):
    """Asks for nothing of a value that transformers itself refuses."""
    kind, extra = BASES[base]
    declared = [field.name for field in fields(getattr(transformers, f"{kind}Config"))]
    plain = peer_of(kind, extra)[0].config.get_text_config()
    computed, refused = set(), set()
    for name in declared:
        if name in NOT_OF_THE_MODEL:
            continue
        for value in others(name, getattr(plain, name, None)):
            verdict = asked(kind, {**extra, name: value}, name)
            if verdict is not None:
                (computed if verdict else refused).add(name)
    named = {"rms_norm_eps", "intermediate_size", "tie_word_embeddings", "rope_parameters"} & {
        *declared
    }
    assert len(named) >= 3
    assert named <= computed | refused
    assert len(computed) > len(refused), (computed, refused)


def peer_of(kind, extra):
    """The model of transformers, and its config.json and tensors as they are published."""
    if kind.startswith(("Qwen3_5", "Qwen4Exp")):
        return whole(extra, kind.removesuffix("Text"))
    if kind.startswith("Glm5Next"):
        return glm5_next(extra)
    if kind == "HYV4":
        return hy_v4(extra)
    peer = random_peer(kind, extra)
    return peer, peer.config.to_dict(), checkpoint_tensors(peer)


def asked(kind, extra, name):
    """Whether it is computed; None where transformers has no such model."""
    token_ids = torch.arange(1, 13)
    try:
        peer, config_dict, tensors = peer_of(kind, extra)
        with torch.no_grad():
            expected = peer(token_ids[None]).logits[0]
    except Exception:  # whatever transformers says of such a config
        return None
    try:
        architecture = find_architecture(config_dict)
        config = architecture.Config.from_dict(config_dict)
    except QuantkitError:
        with refused(name):
            find_architecture(config_dict).Config.from_dict(config_dict)
        return False
    with torch.no_grad():
        names = config.mixture.linears if hasattr(config, "mixture") else PROJ_NAMES
        model = architecture.Model(config, PlainWeights(tensors, names))
        logits = model.logits(model(token_ids, CausalContext([12])))
    assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max())), (
        name,
        extra,
    )
    return True


def config_of(of):
    if "peer" in of:
        kind, extra = of["peer"]
        made = getattr(transformers, f"{kind}Config")(**SHARED, **extra).to_dict()
        return made
    if "table" in of:
        return dict(TABLES[of["table"]])
    found = CONFIGS[of["architecture"]]
    found = found["text_config"] if of.get("flat") else found
    return {**found, **of, "model_type": of["architecture"]}


@pytest.mark.parametrize("row", TABLES["refused"], ids=lambda row: str(row["of"]))
def test_what_is_not_computed_is_refused(row):
    config = config_of(row["of"])
    make = find_architecture(config).Config.from_dict
    make({**config, **row.get("computed", {})})
    for key, value in row["fields"].items():
        with refused(key):
            make({**config, key: value})
