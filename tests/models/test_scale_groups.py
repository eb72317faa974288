"""Scale groups of every architecture: a scale that moves between a producer and its readers changes
no logit."""

import pytest
import torch
from plain_weights import PlainWeights
from tiny_models import CONFIGS, random_tensors

from quantkit.models import find_architecture
from quantkit.models.context import CausalContext


def folded(architecture, config, tensors):
    """The tensors with a scale moved in every group: producers divided, all readers multiplied.
    Powers of two: nothing is rounded, so no choice of an indexer can flip."""
    made, generator = dict(tensors), torch.Generator().manual_seed(0)
    offsets = {row.name: row.gain_offset for row in architecture.parameters(config)}
    for layer in range(config.num_hidden_layers):
        for group in architecture.scale_groups(config, layer):
            name = f"{group.producer}.weight"
            producer, heads = made[name], group.heads
            count = heads.columns if heads else len(producer)
            by = scale = 2.0 ** torch.randint(-2, 3, (count,), generator=generator)
            if heads:
                scale = heads.tie(scale)
                by = heads.producer_scales(scale)
            by = by.view(-1, *[1] * (producer.dim() - 1))
            made[name] = (producer + offsets[name]) / by - offsets[name]
            for consumer in group.consumers:
                name = consumer if consumer in made else f"{consumer}.weight"
                made[name] = made[name] * scale
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_folding_a_group_keeps_the_logits(name):
    """Each group lists every reader of its producer: routers, compressors and indexers too. Norms
    of what a sublayer adds are left alone."""
    architecture = find_architecture(CONFIGS[name])
    config = architecture.Config.from_dict(CONFIGS[name])
    tensors = {
        key: tensor.float() if tensor.is_floating_point() else tensor
        for key, tensor in random_tensors(CONFIGS[name]).items()
    }

    def logits(weights):
        experts = [config.mixture.linears] if hasattr(config, "mixture") else []
        model = architecture.Model(config, PlainWeights(weights, *experts))
        return model.logits(model(torch.arange(3, 33), CausalContext([30])))

    expected, moved = logits(tensors), folded(architecture, config, tensors)
    assert (logits(moved) - expected).abs().max() < 1e-4 * expected.abs().max()
    changed = {key for key in tensors if not torch.equal(tensors[key], moved[key])}
    assert changed
    assert not [key for key in changed if "post_mlp" in key or "post_attention_norm" in key]
