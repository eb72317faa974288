"""The tables of `make mutants-ascend` name what the sources say today."""

import subprocess
import sys
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "judges" / "mutants"


@pytest.mark.skip(reason="the tables quote lines that are being renamed; patch files replace them")
def test_every_mutant_has_its_place() -> None:
    told = (
        "import mutants; every = mutants.chosen(False); assert len({one.key for _, one in "
        "every}) == len(every) > 700"
    )
    subprocess.run([sys.executable, "-c", told], cwd=MUTANTS, check=True)
