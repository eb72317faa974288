"""Scales of a model's groups, drawn and folded by hand."""

import torch


def any_scale(count):
    return torch.rand(count) + 0.5


def power_of_two(count):
    """Where an indexer reads: nothing is rounded, so no choice can flip."""
    return 2.0 ** torch.randint(-2, 3, (count,))


def folded(architecture, config, tensors, draw):
    """The tensors with a scale moved in every group: producers divided, all readers multiplied.
    draw: n -> n scales."""
    made = dict(tensors)
    offsets = {row.name: row.gain_offset for row in architecture.parameters(config)}
    for layer in range(config.num_hidden_layers):
        for group in architecture.scale_groups(config, layer):
            name = f"{group.producer}.weight"
            producer, offset = made[name], offsets[name]
            if group.heads is None:
                by = scale = draw(len(producer))
            else:
                scale = group.heads.tie(draw(group.heads.columns))
                by = group.heads.producer_scales(scale)
            made[name] = (producer + offset) / by.view(-1, *[1] * (producer.dim() - 1)) - offset
            for consumer in group.consumers:
                made[f"{consumer}.weight"] = made[f"{consumer}.weight"] * scale
    return made
