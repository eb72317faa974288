"""Where a sublayer's parameters are held as they are stored, each is read once, and a caller may do
with what it is given as it likes."""

import make_model
import pytest
import torch

from quantkit.calibrate.source_model import ParameterReader
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.table import Parameter

LINEAR = Parameter("model.layers.0.self_attn.q_a_proj.weight", (1, 1), "linear")  # FP8 in blocks
NORM = Parameter("model.layers.0.input_layernorm.weight", (1,), "norm")  # BF16
BIAS = Parameter("model.layers.1.mlp.gate.e_score_correction_bias", (1,), "router_bias")  # float32
ROWS = (LINEAR, NORM, BIAS)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    found = ParameterReader(
        Checkpoint.open(
            make_model.write_fp8(tmp_path / "source", config, make_model.random_tensors(config))
        ),
        torch.device("cpu"),
    )
    found.asked = []
    read = found.checkpoint.read

    def counted(name, device):
        found.asked.append(name)
        return read(name, device)

    monkeypatch.setattr(found.checkpoint, "read", counted)
    return found


def asked(reader, row):
    """How often its bytes were asked for in two readings, of which the first is written over."""
    times, before = [], None
    for _ in range(2):
        start = len(reader.asked)
        found = reader.dequantized(row)
        times.append(len(reader.asked) - start)
        assert before is None or torch.equal(found, before)
        before = found.clone()
        found.zero_()
    return times


def test_what_is_kept_is_read_once_and_nobody_changes_it(reader):
    reader.holds = True
    reader.keep(ROWS)
    assert [asked(reader, row) for row in ROWS] == [[2, 0], [1, 0], [1, 1]], (
        "float32 has no other form to be held in"
    )
    reader.keep([NORM])
    assert [asked(reader, row) for row in (LINEAR, NORM)] == [[2, 2], [1, 0]], (
        "others are let go of"
    )


def test_a_processor_holds_nothing(reader):
    assert not reader.holds
    reader.keep(ROWS)
    assert [asked(reader, row) for row in ROWS] == [[2, 2], [1, 1], [1, 1]]
