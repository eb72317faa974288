"""openPangu-Ultra-MoE against a plain statement of its public description, written apart from the
model code."""

from dataclasses import replace

import pytest
import torch
from pangu_statement import BIASES, Statement, random_tensors
from plain_weights import PlainWeights
from tiny_models import CASES

from quantkit.models import find_architecture, pangu_ultra_moe
from quantkit.models.context import CausalContext
from quantkit.models.pangu_ultra_moe import FIRST_RELEASE_NAMES
from quantkit.models.table import resolve

CONFIG = CASES["pangu_ultra_moe"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", [None, *BIASES])
def test_logits_equal_the_statement(interleaved, bias):
    config = {**CONFIG, "rope_interleave": True} if interleaved else CONFIG
    architecture, stated, tensors = find_architecture(config), BIASES[0], {}
    for name, tensor in random_tensors(config).items():
        if not name.endswith(stated):
            tensors[name] = tensor
        elif bias is not None:
            tensors[f"{name.removesuffix(stated)}{bias}"] = tensor
    token_ids = torch.randint(0, 97, (11,), generator=torch.Generator().manual_seed(1))
    in_double = {name: tensor.double() for name, tensor in tensors.items()}
    expected = Statement(config, in_double).logits(token_ids)
    model = architecture.Model(architecture.Config.from_dict(config), PlainWeights(tensors))
    logits = model.logits(model(token_ids, CausalContext([11])))
    assert expected.abs().max() > 1
    assert (logits.double() - expected).abs().max() < 1e-4
    rows = resolve(architecture.parameters(model.config), tensors)
    assert {row.name for row in rows} == set(tensors)


def test_both_releases_name_the_same_model():
    first = {old: CONFIG[new] for old, new in FIRST_RELEASE_NAMES.items()}
    rest = {key: value for key, value in CONFIG.items() if key not in FIRST_RELEASE_NAMES.values()}
    architecture = find_architecture(CONFIG)
    assert architecture.Config.from_dict({**rest, **first}) == architecture.Config.from_dict(CONFIG)


def test_mtp_layer_has_the_sandwich_norms():
    architecture = find_architecture(CONFIG)
    config = architecture.Config.from_dict(CONFIG)
    tensors = random_tensors(CONFIG)
    weights = PlainWeights(tensors)
    mtp = architecture.MtpLayer(config, weights)
    hidden = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(5))
    plain = mtp(torch.arange(9), hidden, CausalContext([9]))
    doubled = {
        name: tensor * 2 if "3.post_mlp" in name else tensor for name, tensor in tensors.items()
    }
    assert not torch.allclose(
        plain,
        architecture.MtpLayer(config, PlainWeights(doubled))(
            torch.arange(9), hidden, CausalContext([9])
        ),
    )
    assert config == replace(config)


def test_the_pass_over_a_layer_is_every_layers():
    """Which rows go on behind the attention is decided in one place; of a sandwich only what is
    added differs."""
    assert "__call__" not in vars(pangu_ultra_moe.DecoderLayer)
