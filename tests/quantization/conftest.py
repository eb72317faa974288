import make_model
import pytest
from letters import write_letters


@pytest.fixture(scope="package")
def text(tmp_path_factory):
    """A calibration text, which no test changes."""
    return write_letters(tmp_path_factory.mktemp("text") / "calibration.txt", 3000)


@pytest.fixture(scope="package")
def source(tmp_path_factory):
    """A dense layer, one of four experts and the MTP layer, in FP8; no test changes it."""
    path = tmp_path_factory.mktemp("models") / "source"
    return make_model.random_fp8(path, 4, num_hidden_layers=2, **make_model.FEW_EXPERTS)
