"""The tables of `make mutants-ascend` name what the sources say today."""

import subprocess
import sys
from pathlib import Path

MUTANTS = Path(__file__).parents[1] / "judges" / "mutants"


def test_every_mutant_has_its_place():
    count = (
        "import mutants; every = [one.key for _, one, _ in mutants.of_ascend(False)]; "
        "assert len(set(every)) == len(every) > 500"
    )
    subprocess.run([sys.executable, "-c", count], cwd=MUTANTS, check=True)
