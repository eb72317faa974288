"""Several ranks write what one process writes, to the byte."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import make_model
import pytest
import quantize_job
import torch
from forked_ranks import run_ranks
from letters import write_letters
from output_files import files

from quantkit.calibrate.expert_layer import ExpertLayer
from quantkit.calibrate.experts import ExpertWeights
from quantkit.executor.parallel import Parallel
from quantkit.quantization.output import Output


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("text") / "calibration.txt")


def test_ranks_write_the_bytes_of_one(text: Path, tmp_path: Path) -> None:
    """Two ranks solve a batch of experts of every layer each, and run them for the other; of three one has none."""
    config = make_model.tiny_config(num_hidden_layers=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
    source = make_model.write_fp8(tmp_path / "source", config, make_model.random_tensors(config))
    for ranks in (1, 2, 3):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = command if ranks > 1 else [sys.executable]
        arguments = [quantize_job.__file__, str(source), str(text), str(tmp_path / str(ranks)), "once"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert files(tmp_path / "2") == files(tmp_path / "1")
    assert files(tmp_path / "3") == files(tmp_path / "1")


def test_a_rank_reads_its_own_experts_alone(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer's experts; and finds out what the other's errors were without reading their weights."""
    config = make_model.tiny_config(num_hidden_layers=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
    source = make_model.write_fp8(tmp_path / "source", config, make_model.random_tensors(config))
    read: list[int] = []
    reading, load = ExpertLayer._read, Output.load

    def seen(self: ExpertLayer, batches: list[list[int]]) -> Iterator[dict[int, ExpertWeights]]:
        for originals in reading(self, batches):
            read.extend(originals)
            yield originals

    def loaded(self: Output, unit: str) -> object:
        assert "experts" not in unit, unit
        return load(self, unit)

    monkeypatch.setattr(ExpertLayer, "_read", seen)
    monkeypatch.setattr(Output, "load", loaded)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def compute(parallel: Parallel) -> object:
        errors = quantize_job.run(source, text, tmp_path / "two").findings.errors
        return {"read": torch.tensor(read), "errors": torch.tensor([errors[name] for name in sorted(errors)])}

    first, second = run_ranks(2, tmp_path, compute)
    assert set(first["read"].tolist()) == {0, 1}  # type: ignore[index]
    assert set(second["read"].tolist()) == {2, 3}  # type: ignore[index]
    monkeypatch.delenv("WORLD_SIZE")
    alone = quantize_job.run(source, text, tmp_path / "one").findings.errors
    assert first["errors"].tolist() == torch.tensor([alone[name] for name in sorted(alone)]).tolist()  # type: ignore[index]
    assert sum("experts" in name for name in alone) > 2 * 4 * 3, "all experts of both layers are told of"
