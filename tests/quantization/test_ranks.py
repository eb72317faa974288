"""Several ranks write what one process writes, to the byte."""

import subprocess
import sys
from pathlib import Path

import make_model
import pytest
import quantize_job
import torch
from output_files import files

RANKS = 2


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(map(chr, torch.randint(97, 123, (400,), generator=torch.Generator().manual_seed(0)).tolist())))
    return path


def test_two_ranks_write_the_bytes_of_one(text: Path, tmp_path: Path) -> None:
    """Each solves a batch of experts of every layer, and reads the other's."""
    config = make_model.tiny_config(num_hidden_layers=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
    source = make_model.write_fp8(tmp_path / "source", config, make_model.random_tensors(config))
    for out in ("one", "two"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = command if out == "two" else [sys.executable]
        arguments = [quantize_job.__file__, str(source), str(text), str(tmp_path / out), "once"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert files(tmp_path / "two") == files(tmp_path / "one")
