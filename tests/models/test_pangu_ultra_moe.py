"""openPangu-Ultra-MoE against a plain statement of its public description, written apart from the
model code."""

import pytest
import torch
from pangu_statement import BIASES, Statement, random_tensors
from plain_weights import PlainWeights
from stated_logits import check_logits, opened
from tiny_models import CASES

from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.pangu_ultra_moe import FIRST_RELEASE_NAMES
from quantkit.models.table import resolve

CONFIG = CASES["pangu_ultra_moe"]


@pytest.mark.parametrize("is_other", [False, True])
def test_logits_equal_the_statement(is_other):
    """Halves are rotated, or pairs; routers have no bias, or one."""
    config = {**CONFIG, "rope_interleave": is_other}
    tensors = random_tensors(config)
    tensors = {name: tensors[name] for name in tensors if is_other or not name.endswith(BIASES[0])}
    token_ids = torch.randint(0, 97, (14,), generator=torch.Generator().manual_seed(1))
    check_logits(Statement(config, tensors), config, tensors, [11, 3], token_ids)


def test_the_routers_bias_has_two_names():
    tensors, found = random_tensors(CONFIG), []
    for named in (tensors, {name.replace(*BIASES): one for name, one in tensors.items()}):
        architecture, config, weights = opened(CONFIG, named)
        found.append(architecture.Model(config, weights)(torch.arange(11), CausalContext([11])))
        assert {row.name for row in resolve(architecture.parameters(config), named)} == {*named}
    assert torch.equal(*found)


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
