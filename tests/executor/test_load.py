"""A rank reads its share of the file and what the ranks have in common, in every packed format."""

from pathlib import Path

import make_model
import pytest
import torch
from packed_model import write_packed

from quantkit.checkpoint import shards
from quantkit.checkpoint.formats import awq, compressed_fp4, compressed_int4, compressed_int8, modelopt, modelslim
from quantkit.checkpoint.formats.base import Format
from quantkit.executor.load import LoadedModel, load_model
from quantkit.executor.parallel import Parallel
from quantkit.schemes import Fp4Grid, Grid, IntGrid

CASES: dict[str, tuple[Format, Grid]] = {
    "awq": (awq.FORMAT, IntGrid(4, 32, False)),
    "compressed-tensors int4": (compressed_int4.FORMAT, IntGrid(4, 32, True)),
    "compressed-tensors int8": (compressed_int8.FORMAT, IntGrid(8, None, True)),
    "modelslim int8": (modelslim.FORMAT, IntGrid(8, None, True)),
    "modelopt NVFP4": (modelopt.FORMAT, Fp4Grid()),
    "compressed-tensors NVFP4": (compressed_fp4.FORMAT, Fp4Grid()),
}


SIZE = 4


@pytest.fixture(scope="module", params=CASES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_model.tiny_config()
    return write_packed(tmp_path_factory.mktemp("packed") / "model", config, make_model.random_tensors(config), *CASES[request.param])


def load(path: Path, rank: int) -> LoadedModel:
    """As one of SIZE ranks, which needs no others to load."""
    return load_model(path, device="cpu", dtype="float32", parallel=Parallel(rank, SIZE))


def stored_bytes(loaded: LoadedModel, *splits: str) -> int:
    """Of the tensors that the file holds of the model's parameters with these splits, but the MTP layer's."""
    checkpoint, found = loaded.checkpoint, 0
    for row in loaded.weights._parameters.values():
        if row.split in splits and not row.mtp:
            names = checkpoint.parts(row.module) if row.name.endswith(".weight") else (row.name,)
            found += sum(checkpoint.tensors[name].nbytes for name in names)
    return found


def test_a_rank_reads_its_share(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what four ranks share out, beside it only the scales per channel of linears cut along their inputs."""
    monkeypatch.setattr(shards, "SMALLEST_PIECE", 1)
    for rank in range(SIZE):
        loaded = load(packed, rank)
        common, shared = stored_bytes(loaded, "replicate"), stored_bytes(loaded, "column", "row", "vocab")
        assert shared > 2 * common, "most of the model is shared out"
        least = common + shared / SIZE
        assert least <= loaded.checkpoint.bytes_read < common + 1.1 * shared / SIZE


def test_rows_are_read_whole_where_their_pieces_are_small(packed: Path) -> None:
    """The same bytes at most as without ranks, and fewer: what lies together is read alone."""
    loaded = load(packed, 1)
    common, shared = stored_bytes(loaded, "replicate"), stored_bytes(loaded, "column", "row", "vocab")
    assert common + shared / SIZE < loaded.checkpoint.bytes_read < common + 0.8 * shared


def test_shares_are_those_of_the_whole_weight(packed: Path) -> None:
    whole = load_model(packed, device="cpu", dtype="float32")
    down, up = "model.layers.1.mlp.experts.3.down_proj", "model.layers.1.mlp.experts.3.up_proj"
    shares = [load(packed, rank).weights for rank in range(SIZE)]
    for module, dim in ((down, 1), (up, 0)):
        assert torch.equal(torch.cat([share.dequantized(module) for share in shares], dim=dim), whole.weights.dequantized(module))
