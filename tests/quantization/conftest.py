import pytest
from letters import write_letters


@pytest.fixture(scope="package")
def text(tmp_path_factory):
    """A calibration text, which no test changes."""
    return write_letters(tmp_path_factory.mktemp("text") / "calibration.txt")
