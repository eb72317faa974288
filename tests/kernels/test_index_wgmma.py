"""Index scores of prompts on Hopper, their kernel's source interpreted on the CPU."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gluon_interpreter import Descriptor, Pointer, interpreted
from quantkit_kernels import CodedIndexKeys, triton
from quantkit_kernels.codes import decode, encode_index
from quantkit_kernels.triton import indexer
from torch import Tensor

NAME = "index_wgmma_kernel"
KERNEL = interpreted(Path(triton.__file__).parent / f"{NAME}.py", "prompt_scores", readers=4)


class Launched:
    """Stands in for the kernel: runs it interpreted."""

    def __getitem__(self, grid):
        def launch(*args, num_warps, **named):
            given = (Pointer(one.flatten()) if isinstance(one, Tensor) else one for one in args)
            KERNEL(grid, *given, **named)

        return launch


@pytest.mark.parametrize("in_codes", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "seen", "page"),
    [(9, 64, 128, 150, 64), (13, 32, 64, 300, 128), (40, 16, 64, 700, 64)],
)
def test_every_key_up_to_a_token_has_its_score(
    tokens, heads, width, seen, page, in_codes, monkeypatch
):
    """Whatever lies in pages behind it, and in any order of the pages."""
    monkeypatch.setattr(indexer, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(indexer, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(indexer, "boxes", lambda rows, *box: Descriptor(rows, box))
    monkeypatch.setattr(indexer, "_STAGES", 2)
    monkeypatch.setattr(indexer, "_CODED_STAGES", 2)
    module = SimpleNamespace(prompt_scores=Launched())
    monkeypatch.setitem(sys.modules, f"{indexer.__package__}.{NAME}", module)
    torch.manual_seed(4)
    kind, blocks = torch.bfloat16, -(-seen // page)
    keys = torch.randn(blocks + 2, page, width).to(kind)
    table = torch.randperm(blocks + 2)[None, :blocks].int()
    positions = torch.arange(seen - tokens, seen)
    q, weights = torch.randn(tokens, heads, width).to(kind), torch.randn(tokens, heads)
    cache = CodedIndexKeys(*encode_index(keys)) if in_codes else keys
    found = indexer._scores(q, weights, cache, table, positions)
    if in_codes:
        keys, q = decode(*cache), decode(*encode_index(q))
    products = (q.double() @ keys[table[0].long()].flatten(0, 1).double().mT).relu()
    exact = (weights.double()[..., None] * products).sum(1)
    below = torch.arange(blocks * page) <= positions[:, None]
    assert (found - exact)[below].abs().max() < 1e-5 * exact[below].abs().max()
