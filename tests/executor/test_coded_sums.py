"""Sums of prompts over ranks in 8 bits: within their bound, the same on every rank, in bytes, and
off unless asked for."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engines import note
from forked_ranks import run_ranks
from quantkit_kernels import CODES
from refused import refused

from quantkit.executor.options import EngineOptions
from quantkit.executor.ranks.quantized_all_reduce import GROUP, LEAST_ROWS, CodedSums, codes_of_sums

CPU = torch.device("cpu")
SIZE, ROWS, WIDTH = 3, 53, 4 * GROUP


def part(rank, dtype):
    """Rows of very different sizes, a group with one large value, a row of zeros and one of numbers
    that are none."""
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, WIDTH, generator=rng) * torch.logspace(-6, 3, ROWS).unsqueeze(1)
    x[5, GROUP + 3] *= 1e4
    x[7] = 0.0
    x[11, 2] = float("nan") if rank == 1 else 0.5
    return x.to(dtype)


def steps(x, codes):
    """How far a coded value may be from it."""
    groups = x.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-8)
    step = (
        largest / 252 if codes == torch.int8 else torch.maximum(groups.abs() / 16, largest / 455000)
    )
    return step.expand_as(groups).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_sum_is_within_its_bound(name, dtype, tmp_path):
    def compute(parallel):
        parallel.coded_sums = CodedSums(CODES[name], SIZE, 0)
        mine = part(parallel.rank, dtype)
        return [parallel.all_reduce(mine.clone()), parallel.all_reduce(mine[4:44].clone())]

    found = run_ranks(SIZE, tmp_path, compute)
    whole, cut = found[0]
    assert all(
        torch.equal(one, other) or one.isnan().any()
        for ours in found[1:]
        for one, other in zip(ours, (whole, cut))
    )
    parts = [part(rank, dtype).double() for rank in range(SIZE)]
    exact = torch.stack(parts).sum(dim=0)
    per_rank = torch.stack([steps(one, CODES[name]) for one in parts]).sum(dim=0)
    bound = (per_rank + steps(exact.abs() + per_rank, CODES[name])) * (1 + 1e-5) + (
        exact.abs() * 2**-8 if dtype == torch.bfloat16 else 0
    )
    good = ~exact.isnan().any(dim=1)
    assert ((whole.double() - exact).abs() <= bound)[good].all()
    assert whole.dtype == dtype
    assert whole[11, :GROUP].isnan().all(), "what is no number does not become one"
    assert not whole[11, GROUP:].isnan().any()
    assert torch.equal(whole[4:44].nan_to_num(), cut.nan_to_num()), (
        "a row's sum depends on nothing but the row"
    )
    coarse = (whole.double() - exact).abs()[good].sum() / exact.abs()[good].sum()
    assert coarse > 1e-4, "these are not 8 bits"


def test_what_is_sent(tmp_path, monkeypatch):
    """130 bytes for 128 values, each way; short sums, and those of another width, as they were."""
    sent = []
    for name in ("all_to_all_single", "all_gather"):
        note(monkeypatch, dist, name, lambda _, x: sent.append(x.nbytes))
    note(monkeypatch, dist, "all_reduce", lambda x: sent.append(-x.nbytes))

    def compute(parallel):
        parallel.coded_sums = CodedSums(torch.int8, SIZE, 40)
        for shape in ((48, WIDTH), (40, WIDTH), (48, WIDTH + 2), (48, 2, GROUP)):
            found, expected = parallel.all_reduce(torch.ones(shape)), torch.full(shape, float(SIZE))
            torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
            assert shape == (48, WIDTH) or torch.equal(found, expected)
        parallel.coded_sums = None
        parallel.all_reduce(torch.ones(48, WIDTH))
        return sent

    coded = 48 * WIDTH // GROUP * 130
    exact = [-4 * 40 * WIDTH, -4 * 48 * (WIDTH + 2), -4 * 48 * 2 * GROUP, -4 * 48 * WIDTH]
    assert run_ranks(SIZE, tmp_path, compute) == [[coded, coded // SIZE, *exact]] * SIZE


def test_steps_of_answers_are_exact():
    """However many guesses they check; and no sum of few rows is coded."""
    options = EngineOptions(
        Path("model"), max_batch=20, draft_length=1, prompt_lookup=3, tp=2, collectives="int8"
    )
    sums = CodedSums(torch.int8, 2, options.answer_rows)
    assert not sums.takes(torch.zeros(80, GROUP))
    assert sums.takes(torch.zeros(81, GROUP))
    few = CodedSums(torch.int8, 2, replace(options, max_batch=1, prompt_lookup=0).answer_rows)
    assert not few.takes(torch.zeros(LEAST_ROWS - 1, GROUP))
    assert few.takes(torch.zeros(LEAST_ROWS, GROUP))


@pytest.mark.parametrize(
    ("asked", "tp", "device", "told"),
    [
        ("int4", 2, CPU, "collectives of 'int4' are not known; use --collectives int8 or fp8"),
        ("", 2, CPU, "collectives of '' are not known"),
        ("int8", 1, CPU, "--collectives int8 is for several ranks, and there is one; give --tp"),
        ("fp8", 2, SimpleNamespace(type="npu"), "a 910B has no FP8"),
    ],
)
def test_what_cannot_be_met_is_refused(asked, tp, device, told):
    with refused(told):
        codes_of_sums(asked, tp, device)
    assert codes_of_sums(None, tp, device) is None


def test_a_processor_adds_in_fp8():
    assert codes_of_sums("fp8", 2, CPU) == torch.float8_e4m3fn
