"""Several ranks write what one process writes, to the byte."""

import subprocess
import sys

import pytest
import quantize_job
import torch
from forked_ranks import run_ranks
from output_files import files

from quantkit.calibrate import ranks as ranks_module
from quantkit.calibrate.expert_layer import ExpertLayer, expert_batches
from quantkit.calibrate.output import Output
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.source_model import ParameterReader
from quantkit.models.table import GatedMlp, Parameter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def alone(source, text, tmp_path_factory):
    """What one process writes."""
    return quantize_job.run(source, text, tmp_path_factory.mktemp("alone") / "one")


def test_ranks_write_the_bytes_of_one(source, text, alone, tmp_path):
    """Three, as torchrun starts them: two solve a batch of experts of every layer each, and run
    them for the others; one has none."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    arguments = [quantize_job.__file__, str(source), str(text), str(tmp_path / "three"), "once"]
    command = [sys.executable, *torchrun, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "three") == files(alone.out)


def test_a_rank_reads_its_own_experts_alone(source, text, alone, tmp_path, monkeypatch):
    """In a layer's experts; and finds out what the other's errors were without reading their
    weights. Both write the bytes of one."""
    read = []
    ahead = []
    activation_quant, load = ExpertLayer._read, Output.load

    def seen(self):
        for originals in activation_quant(self):
            read.extend(originals)
            yield originals

    def announced(self, rows):
        ahead.extend(row.expert for row in rows if row.expert is not None)

    def loaded(self, unit):
        assert "experts" not in unit, unit
        return load(self, unit)

    monkeypatch.setattr(ExpertLayer, "_read", seen)
    monkeypatch.setattr(ParameterReader, "will_read", announced)
    monkeypatch.setattr(Output, "load", loaded)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def compute(parallel):
        errors = quantize_job.run(source, text, tmp_path / "two").findings.errors
        assert ahead == [expert for expert in read for _ in range(3)], (
            "each linear of what is read is announced before"
        )
        return {
            "read": torch.tensor(read),
            "errors": torch.tensor([errors[name] for name in sorted(errors)]),
        }

    first, second = run_ranks(2, tmp_path, compute)
    assert set(first["read"].tolist()) == {0, 1}
    assert set(second["read"].tolist()) == {2, 3}
    errors = alone.findings.errors
    assert (
        first["errors"].tolist() == torch.tensor([errors[name] for name in sorted(errors)]).tolist()
    )
    assert sum("experts" in name for name in errors) > 2 * 4 * 3, (
        "all experts of both layers are told of"
    )
    assert files(tmp_path / "two") == files(alone.out)


NCCL_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def as_nccl(broadcast):
    """gloo sends what lies transposed, too, and truncates what is longer than its place."""

    def sent(values, source, group=None):
        assert values.is_contiguous(), "NCCL: tensors must be contiguous"
        assert values.dtype in NCCL_DTYPES, values.dtype
        assert values.numel(), values.shape
        lengths = [
            torch.empty(1, dtype=torch.int64) for _ in range(ranks_module.dist.get_world_size())
        ]
        ranks_module.dist.all_gather(lengths, torch.tensor([values.nbytes]))
        assert all(int(one) == values.nbytes for one in lengths), f"NCCL waits for ever: {lengths}"
        broadcast(values, source, group=group)

    return sent


def test_any_dtype_and_shape_is_sent(tmp_path, monkeypatch):
    """NCCL knows neither 16-bit integers nor, everywhere, FP8; what is empty is nobody's to wait
    for; and what lies transposed is sent to ranks where it lies so, and to those where it does
    not."""
    monkeypatch.setattr(ranks_module.dist, "broadcast", as_nccl(ranks_module.dist.broadcast))
    told, turned = torch.tensor([[0, 1, 1], [1, 0, 1]]), torch.arange(6.0).view(3, 2).t()

    def compute(parallel):
        ranks, mine = Ranks(parallel.rank, parallel.size), parallel.rank == 1
        sent = [ranks.broadcast((told if mine else 0 * told).to(dtype), 1) for dtype in DTYPES]
        single = ranks.broadcast(torch.tensor(7.0 if mine else 0.0), 1)
        empty = ranks.broadcast(torch.empty(0, 4), 1)
        place = torch.zeros(3, 2).t() if parallel.rank == 2 else torch.zeros(2, 3)
        own = turned.clone() if mine else place
        assert ranks.broadcast(own, 1) is own
        kept = [
            torch.equal(one.long(), told) and one.dtype == dtype for one, dtype in zip(sent, DTYPES)
        ]
        return [*kept, float(single) == 7, not len(empty), torch.equal(own, turned)]

    for found in run_ranks(3, tmp_path, compute):
        assert found == [True] * (len(DTYPES) + 3), found


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int64,
)


def test_experts_are_in_as_many_batches_as_a_power_of_two():
    """So that 2, 4 and 8 ranks have as many each: 256 experts of which 24 could be solved together
    are 16 batches of 16."""
    side = Parameter("model.layers.0.mlp.experts.0.gate_proj.weight", (2, 2), "linear")
    expert = GatedMlp(side, side, side)
    for count, most, sizes in ((256, 24, [16] * 16), (60, 24, [15] * 4), (5, 2, [2, 2, 1])):
        batches = list(expert_batches(dict.fromkeys(range(count), expert), 3 * 4 * most))
        assert [len(batch) for batch in batches] == sizes, (count, most)
        assert [number for batch in batches for number in batch] == list(range(count))
