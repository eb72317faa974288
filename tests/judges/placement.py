"""How even `quantkit place` makes devices, beside the balancer that engines have: DeepSeek's EPLB,
on the same counts.

make test-placement   # R1's shape, synthetic counts: about 1 minute of one processor

EPLB's global policy is written here once more from its description (github.com/deepseek-ai/EPLB): a
copy at a time for the expert whose copies have most to do, then the heaviest first to the device
that has least. It is what vLLM, SGLang and vllm-ascend begin with. Exits with 1 where the mean
balance is below 0.95 for a redundancy that is called enough, or below EPLB's by more than chance.
"""

import sys

import numpy as np

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


def main():
    print("balance on held-out counts, mean over layers (worst)\n")
    print("| counts | devices | copies | place | place, uneven | EPLB |\n|---|---|---|---|---|---|")
    failed = False
    for skew in (0.5, 0.8, 1.0, None):
        counted, held_out = zipf(skew, seed=1)
        for devices, choices in WORLDS.items():
            for redundant in choices:
                found = compare(counted, held_out, devices, redundant)
                figures = [f"{np.mean(one):.3f} ({min(one):.3f})" for one in found.values()]
                name = "mixed" if skew is None else f"Zipf {skew}"
                print(
                    "|", " | ".join([name, str(devices), str(redundant), *figures]), "|", flush=True
                )
                ours, eplbs = np.mean(found["ours"]), np.mean(found["eplb"])
                enough = ENOUGH if redundant >= ENOUGH_COPIES[devices] else 0
                failed |= bool(ours < max(enough, eplbs - CHANCE))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
