"""How far a result moves by itself: a bound of comparing floating-point numbers that neither a
processor nor a person chose.

Two right programs differ in the last place of every sum, and a network may make much of it: a norm
of a small vector, a recurrence. What it makes of it is measured: the reference runs again with each
weight moved by a unit in its last place at random.
"""

import shutil

import torch
from safetensors.torch import load_file, save_file

FACTOR = 8
"""A number goes through more roundings than its weight's. Of 34 small models, under AVX2, AVX-512
and MKL's portable code, our forward and transformers' are 0.1 to 1.3 times as far apart as a unit
in the last place of its weights moves the latter."""
DRAWS = 4


def nudged(tensor, generator):
    """Each number a unit in its last place up or down, or as it was."""
    way = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.dtype)
    return torch.where(way == 0, tensor, torch.nextafter(tensor, way * torch.inf))


def write_nudged(source, target, seed):
    """A checkpoint of float32 tensors beside `source`, each nudged; integers stay."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    for shard in target.glob("*.safetensors"):
        held = load_file(shard).items()
        save_file(
            {
                name: nudged(one, generator) if one.dtype == torch.float32 else one
                for name, one in held
            },
            shard,
            {"format": "pt"},
        )
    return target


@torch.no_grad()
def movement(compute, weights):
    """The largest movement of a number that `compute` gives, when the weights that it reads are
    nudged, in place, and set back."""
    moving = [one for one in weights if one.is_floating_point()]
    kept, generator = [one.clone() for one in moving], torch.Generator().manual_seed(5)
    expected, moved = compute(), 0.0
    for _ in range(DRAWS):
        for one, before in zip(moving, kept):
            one.copy_(nudged(before, generator))
        moved = max(moved, (compute() - expected).abs().max().item())
    for one, before in zip(moving, kept):
        one.copy_(before)
    return moved


def assert_near(found, expected, moved, factor=FACTOR, most=None):
    """That they differ by less than `factor` times what `expected` moves by itself, which must be
    little, so that a fault is more: below `most`, or a thousandth of its largest number."""
    apart, bound = (found - expected).abs().max().item(), factor * moved
    most = 1e-3 * expected.abs().max().item() if most is None else most
    assert 0 < bound < most, (
        f"{moved} by itself, and {most} is a fault: compare a model that makes less of a last place"
    )
    assert apart < bound, f"{apart} apart, where the last place of weights makes {moved}"
