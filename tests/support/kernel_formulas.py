"""Norms, rotations and the router's choice of the kernel tests, written out in float64."""

import torch


def normed(x, gain=None, eps=1e-6):
    """RMSNorm over the last dimension."""
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if gain is None else x * gain.double()


def rotated(x, angles, interleaved):
    """x [T, heads, D], its first R channels by angles [T, R/2]: pairs next to each other, or half of
    R apart."""
    x, rest = x.double().split([2 * angles.shape[1], x.shape[-1] - 2 * angles.shape[1]], dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turns = torch.polar(torch.ones_like(angles.double()), angles.double()).unsqueeze(1)
    pairs = torch.view_as_real(torch.complex(first, second) * turns)
    sides = pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), dim=-1)
    return torch.cat([sides, rest], dim=-1)


def chosen_experts(choice, rule):
    """The choice, spelled out for one token at a time, by scores and bias [T, E]."""
    chosen, size = [], choice.shape[1] // rule.n_group
    for row in choice.tolist():
        groups = sorted(
            range(rule.n_group), key=lambda g: -sum(sorted(row[g * size : (g + 1) * size])[-2:])
        )
        kept = [e for e in range(len(row)) if e // size in groups[: rule.topk_group]]
        chosen.append(sorted(kept, key=lambda e: -row[e])[: rule.num_experts_per_tok])
    return chosen
