"""How even `quantkit place` makes devices, beside the balancer that engines have: DeepSeek's EPLB,
on the same counts.

make test-placement                                        # R1's shape, synthetic counts: about 1 minute of one processor
python tests/judges/placement.py --counts A --held-out B   # counts of a model, placed by A and judged by B

EPLB's global policy is written here once more from its description (github.com/deepseek-ai/EPLB): a
copy at a time for the expert whose copies have most to do, then the heaviest first to the device
that has least. It is what vLLM, SGLang and vllm-ascend begin with. Exits with 1 where the mean
balance is below 0.95 for a redundancy that is called enough, or below EPLB's by more than chance.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from quantkit.models.expert_counts import ExpertCounts
from quantkit.planning.expert_balance import balance
from quantkit.planning.expert_placement import ENOUGH, place_layers

EXPERTS, LAYERS, TOPK = 256, 58, 8
COUNTED, HELD_OUT = 200_000, 1_000_000
WORLDS = {8: (0, 8, 32), 16: (0, 16, 32), 32: (0, 32, 64), 144: (32, 176, 320)}
ENOUGH_COPIES = {8: 8, 16: 16, 32: 32, 144: 176}
"""By devices: the redundancy from which 0.95 is asked of the mean of R1's layers."""
CHANCE = 0.005


def eplb(loads, devices, slots):
    """One layer, [devices, slots]."""
    placed = list(range(len(loads)))
    copies = np.ones(len(loads))
    while len(placed) < devices * slots:
        expert = int((loads / copies).argmax())
        placed.append(expert)
        copies[expert] += 1
    each = (loads / copies)[placed]
    taken, held = np.zeros(devices), [[] for _ in range(devices)]
    for index in np.argsort(-each, kind="stable"):
        device = min((d for d in range(devices) if len(held[d]) < slots), key=lambda d: taken[d])
        held[device].append(placed[index])
        taken[device] += each[index]
    return np.array(held)


def compare(counted, held_out, devices, redundant):
    """Balance of every layer on held-out counts, by who placed."""
    experts = len(next(iter(counted.values())))
    slots = (experts + redundant) // devices
    placed = {
        "ours": place_layers(counted, devices, redundant),
        "uneven": place_layers(counted, devices, redundant, uneven=True),
        "eplb": {layer: eplb(loads, devices, slots) for layer, loads in counted.items()},
    }
    return {
        name: [balance(layers[layer], held_out[layer]) for layer in layers]
        for name, layers in placed.items()
    }


def zipf(skew, seed):
    """Two texts' counts of R1's layers; skew None: another one in each layer, 0.3 to 1.1."""
    generator = np.random.default_rng(seed)
    counted, held_out = {}, {}
    for layer in range(LAYERS):
        shares = 1 / np.arange(1, EXPERTS + 1) ** (
            generator.uniform(0.3, 1.1) if skew is None else skew
        )
        shares = generator.permutation(shares / shares.sum())
        counted[layer], held_out[layer] = (
            generator.multinomial(TOPK * tokens, shares).astype(float)
            for tokens in (COUNTED, HELD_OUT)
        )
    return counted, held_out


def tell(name, devices, redundant, found):
    figures = " | ".join(
        f"{np.mean(found[who]):.3f} ({min(found[who]):.3f})" for who in ("ours", "uneven", "eplb")
    )
    print(f"| {name} | {devices} | {redundant} | {figures} |", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--held-out", type=Path)
    given = parser.parse_args()
    print("balance on held-out counts, mean over layers (worst)\n")
    print("| counts | devices | copies | place | place, uneven | EPLB |\n|---|---|---|---|---|---|")
    if given.counts is not None:
        mine, theirs = (
            {n: np.array(row, float) for n, row in ExpertCounts.read(one).layers.items()}
            for one in (given.counts, given.held_out)
        )
        experts = len(next(iter(mine.values())))
        for devices in (2, 4, 8, 16):
            for redundant in (0, devices, 2 * devices, 3 * devices):
                if not (experts + redundant) % devices and redundant <= experts * (devices - 1):
                    tell(
                        given.counts.stem,
                        devices,
                        redundant,
                        compare(mine, theirs, devices, redundant),
                    )
        return 0
    failed = False
    for skew in (0.5, 0.8, 1.0, None):
        counted, held_out = zipf(skew, seed=1)
        for devices, choices in WORLDS.items():
            for redundant in choices:
                found = compare(counted, held_out, devices, redundant)
                tell("mixed" if skew is None else f"Zipf {skew}", devices, redundant, found)
                ours, eplbs = np.mean(found["ours"]), np.mean(found["eplb"])
                failed |= bool(redundant >= ENOUGH_COPIES[devices] and ours < ENOUGH) or bool(
                    ours < eplbs - CHANCE
                )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
