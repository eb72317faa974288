"""Mixtures of experts of middle size, hidden 2048 and 64 experts, with random weights and rounded:
in seconds, the same on every machine.

Weights are whole random numbers times powers of two, and grids are those of rounding to nearest, so
that a machine with GPUs and the one that judges write the same bytes.

Which experts a token gets is decided by the token: random routers have an eighth and a ninth expert
that BF16 cannot tell apart in one position of three, and a position where engines may choose
otherwise says nothing. As many channels as there are experts hold a code in the embedding, 1 to 2
for the chosen and -1 for the others; what writes to the residual stream afterwards leaves them
nearly alone, and the router of every layer reads them in another order. So scores lie far apart,
whatever the other channels have gone through.
"""

import torch
from make_model import CONFIGS

from quantkit.models import find_architecture

MIDDLE = CONFIGS["middle"]
_LEFT_ALONE = (
    2.0**-8
)  # what is added to a channel that holds a code, and what a router makes of the other channels
_ROUTER = 8.0


def weights(config):
    """BF16 tensors of every row of the architecture's table, evenly spread with the deviations of
    dense_models.random_weights."""
    architecture = find_architecture(config)
    generator = torch.Generator().manual_seed(0)
    codes = _codes(config, generator)
    experts = codes.shape[1]
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        even = (
            torch.randint(-127, 128, row.shape, generator=generator, dtype=torch.int16).bfloat16()
        ) * 2.0**-6  # deviation 1.15
        if row.projection in ("o", "down"):
            even[-experts:] *= _LEFT_ALONE
        if row.role == "embedding":
            even[:, -experts:] = codes
        match row.role:
            case "norm":
                tensors[row.name] = 1 + even * 2.0**-3
            case "router_bias":
                tensors[row.other_name or row.name] = even.float() * 2.0**-3
            case "bias" | "embedding":
                tensors[row.name] = even
            case "head":
                tensors[row.name] = even * 2.0 ** round(2 - _half_bits(row.shape[1]))
            case "router":
                assert row.layer is not None, row.name
                tensors[row.name] = even * _LEFT_ALONE
                tensors[row.name][range(experts), _channels(config, row.layer)] = _ROUTER
            case _:
                tensors[row.name] = even * 2.0 ** -round(_half_bits(row.shape[1]))
    return tensors


def _groups(config):
    """Experts, groups of them, and groups that a token's experts are of."""
    return (
        config.get("n_routed_experts") or config["num_experts"],
        config.get("n_group", 1),
        config.get("topk_group", 1),
    )


def _codes(config, generator):
    """BF16 [vocab, experts]: 1, 1.5 or 2 for the experts of a token, the same number in each of its
    groups; -1 for the others."""
    experts, groups, chosen_groups = _groups(config)
    codes = torch.full((config["vocab_size"], groups, experts // groups), -1.0)
    each = config["num_experts_per_tok"] // chosen_groups
    for code in codes:
        for group in torch.randperm(groups, generator=generator)[:chosen_groups]:
            strength = torch.randint(2, 5, (each,), generator=generator) / 2
            code[group, torch.randperm(experts // groups, generator=generator)[:each]] = strength
    return codes.flatten(1).bfloat16()


def _channels(config, layer):
    """The channel that each expert of a layer is chosen by, counted from the end: groups and their
    experts move on by one a layer."""
    experts, groups, _ = _groups(config)
    size = experts // groups
    return [
        (expert // size + layer) % groups * size + (expert + layer) % size - experts
        for expert in range(experts)
    ]


def _half_bits(columns):
    return (columns.bit_length() - 1) / 2
