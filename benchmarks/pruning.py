"""What pruning routed experts costs: KL and tiny-math of tiny-r1 by how many experts go, by who
chooses them, and beside fewer bits.

    python benchmarks/pruning.py --out /tmp/pruning --limit 200       a row as each is done; about 10 CPU minutes

Random pruning is the same run with random numbers in the place of what each expert adds. Rows that
are there are not made again.
"""

import argparse
import random
from pathlib import Path
from unittest.mock import patch

from quantkit import api
from quantkit.common.assets import builtin_model
from quantkit.quantization import pruning
from quantkit.quantization.pruning import experts_to_keep

ROWS: tuple[tuple[str, float, int | None], ...] = (
    ("int8-a8w8c16", 0.0, None),
    ("int8-a8w8c16", 0.25, None),
    ("int8-a8w8c16", 0.25, 1),
    ("awq-w4a16", 0.0, None),
    ("int8-a8w8c16", 0.5, None),
    ("int8-a8w8c16", 0.5, 1),
    ("awq-w4a16", 0.25, None),
    ("int8-a8w8c16", 0.25, 2),
    ("awq-w4a16", 0.5, None),
)
"""Scheme, share of experts that go, and the seed of a random choice."""
TEXT = Path(__file__).parent.parent / "eval" / "data" / "tiny-heldout.jsonl"


def make(out: Path, scheme: str, share: float, seed: int | None) -> None:
    def at_random(saliency: dict[int, list[float]], groups: int, kept: int) -> dict[int, list[int]]:
        draw = random.Random(seed)
        return experts_to_keep(
            {layer: [draw.random() for _ in values] for layer, values in saliency.items()},
            groups,
            kept,
        )

    with patch.object(pruning, "experts_to_keep", experts_to_keep if seed is None else at_random):
        api.quantize("tiny-r1", out, scheme, prune=share or None, device="cpu")


def row(out: Path, scheme: str, share: float, seed: int | None, limit: int) -> str:
    name = out / f"{scheme}-{round(share * 100)}{'' if seed is None else f'-random{seed}'}"
    if not name.exists():
        make(name, scheme, share, seed)
    far = api.perplexity(name, TEXT, baseline=builtin_model("tiny-r1"), device="cpu")
    scored = (
        api.evaluate(
            name, "tiny-math", limit=limit, out=name.with_name(f"{name.name}.scores"), device="cpu"
        )
        .tasks["tiny-math"]
        .to_json()["accuracy"]
    )
    size = sum(file.stat().st_size for file in name.glob("*.safetensors")) / 1e6
    chosen = "-" if not share else "what each adds" if seed is None else f"random ({seed})"
    return (
        f"| {scheme} | {share:.0%} | {chosen} | {size:.1f} MB | {far.kl:.2e} ± "
        f"{far.kl_stderr:.0e} | {scored:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print(
        f"| scheme | pruned | chosen by | size | KL on {TEXT.name} | tiny-math, {given.limit} "
        "problems |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for scheme, share, seed in ROWS:
        print(row(given.out, scheme, share, seed, given.limit), flush=True)


if __name__ == "__main__":
    main()
