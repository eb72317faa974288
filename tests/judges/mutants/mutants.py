"""All mutants of the Ascend side: those by patch, and those by rule or a sample of them."""

import random
from pathlib import Path

from areas import AREAS
from by_rule import of_cpp, of_python
from patches import of_patches

ROOT = Path(__file__).parents[3]
SAMPLE = 201
"""Of the mutants by rule, drawn area by area in proportion, always the same."""


def chosen(every):
    """every: all that the rules make."""
    found = []
    pool = {area: _generated(area) if area.ruled else [] for area in AREAS}
    total = sum(map(len, pool.values()))
    for area, generated in pool.items():
        source = (ROOT / area.path).read_text()
        found += [(area, one) for one in of_patches(area.path, source)]
        count = (
            len(generated)
            if every or not generated
            else min(len(generated), max(4, round(SAMPLE * len(generated) / total)))
        )
        found += [(area, one) for one in random.Random(area.path).sample(generated, count)]
    return found


def _generated(area):
    source = (ROOT / area.path).read_text()
    return (
        of_cpp(area.path, source)
        if area.path.endswith((".cpp", ".h"))
        else of_python(area.path, source)
    )
