"""Collectives over peers' memory: on GPUs against plain sums and concatenation, and refused for a
reason everywhere else."""

import os
import socket
import subprocess
import sys
import threading
from itertools import product, zip_longest

import pytest
import torch
from quantkit_kernels import UnsummedPairs, add_rms_norm
from quantkit_kernels.cuda import collectives as peers
from quantkit_kernels.cuda.collectives import MAX_SUM_BYTES, Peers
from quantkit_kernels.cuda.experts.sum_pairs import add_up

from quantkit.executor.ranks.parallel import Parallel

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


class Meeting:
    """`exchange` among threads."""

    def __init__(self, size):
        self.values = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank):
        def meet(value):
            self.barrier.wait(30)
            self.values[rank] = value
            self.barrier.wait(30)
            return list(self.values)

        return meet


def refusals(size, device):
    meeting, said = Meeting(size), [""] * size

    def rank_of(rank):
        try:
            Peers(rank, size, device, meeting.exchange(rank))
        except RuntimeError as fault:
            said[rank] = str(fault)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return said


def test_all_ranks_hear_the_same_refusal():
    assert refusals(3, torch.device("cpu")) == ["rank 0: runs on CUDA, not on cpu"] * 3


def test_one_rank_that_cannot_stops_all(monkeypatch):
    """Nothing is left half open where one of three ranks finds a fault."""
    calls = iter(range(3))
    lock = threading.Lock()

    def unusable(size, device):
        with lock:
            return "no compiler" if next(calls) == 1 else None

    monkeypatch.setattr(peers, "unusable", unusable)
    said = refusals(3, torch.device("cpu"))
    assert len(set(said)) == 1
    assert said[0].endswith("no compiler")


def _rank(rank, size, port):
    """Sums of all sizes and types, eager and captured, many times: exact where the values are, and
    the same bits on every rank."""
    device = torch.device("cuda", rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    parallel = Parallel(rank, size)
    parallel.connect(device)
    assert parallel.peers is not None, "no peer access here"
    check_sums(parallel, rank, size, device)
    check_norms(parallel, rank, size, device)
    check_pairs(parallel, rank, size, device)
    check_gather(parallel, rank, size, device)
    check_scatter(parallel, rank, size, device)
    check_graph(parallel, rank, size, device)
    torch.distributed.destroy_process_group()


def whole_numbers(turn, shape, dtype, device, size):
    """Of every rank small whole numbers, of which every sum is exact."""
    rngs = [torch.Generator(device).manual_seed(1000 * turn + rank) for rank in range(size)]
    return [torch.randint(-8, 9, shape, generator=rng, device=device).to(dtype) for rng in rngs]


def normal(seed, *shapes, dtype, device):
    rng = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=rng, device=device).to(dtype) for shape in shapes]


def check_sums(parallel, rank, size, device):
    for turn, (tokens, dtype) in enumerate(
        product((1, 2, 3, 8, 32, 64), (torch.bfloat16, torch.float16, torch.float32))
    ):
        shape = (tokens, 7168 if dtype != torch.float32 else 2048)
        every = whole_numbers(turn, shape, dtype, device, size)
        assert parallel.peers.adds(every[rank])
        expected = sum(one.float() for one in every)
        assert torch.equal(parallel.all_reduce(every[rank]).float(), expected), (turn, shape)
    (noise,) = normal(rank, (8, 7168), dtype=torch.bfloat16, device=device)
    noise[0, :8], noise[1, 0] = -0.0, float("nan")
    noise.view(torch.int16)[2, :8] = -1  # what an empty word looks like
    ours = parallel.all_reduce(noise)
    assert ours[1, 0].isnan()
    assert ours[2, :8].isnan().all()
    places = torch.arange(ours.numel(), device=device).view_as(ours)
    bits = parallel.gather(int((ours.view(torch.int16).long() * places).sum()))
    assert len(set(bits)) == 1, "the ranks' sums differ"
    library = noise.clone()
    torch.distributed.all_reduce(library)
    torch.testing.assert_close(ours[3:].float(), library[3:].float(), rtol=2e-2, atol=2e-2)
    large = torch.ones(MAX_SUM_BYTES // 2 + 8, dtype=torch.bfloat16, device=device)
    assert not parallel.peers.adds(large)
    assert (parallel.all_reduce(large) == size).all()


def check_norms(parallel, rank, size, device):
    """The sum over ranks, that with the residual and its norm in one launch: the bits of the three
    one after the other."""
    shapes = [(1, 7168), (3, 7168), (146, 7168), (8, 4096), (2, 24), (1, 8192), (2, 65536)]
    for turn, (shape, dtype) in enumerate(product(shapes, (torch.bfloat16, torch.float16))):
        (x,) = normal(1000 * turn + rank, shape, dtype=dtype, device=device)
        residual, gain = normal(turn, shape, shape[1:], dtype=dtype, device=device)
        assert parallel.peers.norms(x, gain)
        normed, total = parallel.add_rms_norm(x, residual, gain, 1e-6)
        one_by_one = add_rms_norm(parallel.all_reduce(x), residual, gain, 1e-6)
        assert torch.equal(total, one_by_one[1]), (shape, dtype)
        if shape[1] < 8192:
            assert torch.equal(normed, one_by_one[0]), (shape, dtype)
        else:  # threads of norm.cu add up several words
            torch.testing.assert_close(normed, one_by_one[0], rtol=1e-2, atol=1e-3)
    assert not parallel.peers.norms(x, gain.float())
    assert not parallel.peers.norms(x.new_zeros(1, 65544), x.new_zeros(65544))
    wide = parallel.add_rms_norm(x, residual, gain.float(), 1e-6)
    torch.testing.assert_close(wide[0], one_by_one[0], rtol=1e-2, atol=1e-2)


def check_pairs(parallel, rank, size, device):
    """The sum over each token's experts in that launch too: the bits of a launch more, and counters
    that are zero again."""
    turn = 0
    for (tokens, top_k), width in product(
        [(1, 9), (16, 9), (4, 1), (3, 20), (17, 9)], [7168, 2048, 24, 16384]
    ):
        for dtype, counters in product(
            (torch.bfloat16, torch.float16),
            (None, torch.ones(40000, dtype=torch.int32, device=device)),
        ):
            turn += 1
            shape, single = (tokens * top_k, width), torch.float32
            (weighed,) = normal(1000 * turn + rank, shape, dtype=single, device=device)
            residual, gain = normal(turn, (tokens, width), (width,), dtype=dtype, device=device)
            pairs = UnsummedPairs(weighed, tokens, dtype, counters, add_up)
            assert parallel.peers.norms_pairs(pairs, gain) == (tokens <= 16)
            found = parallel.add_rms_norm(pairs, residual, gain, 1e-6)
            assert counters is None or not counters.any()
            expected = parallel.add_rms_norm(pairs.summed(), residual, gain, 1e-6)
            assert all(map(torch.equal, found, expected)), (tokens, top_k, width, dtype)


def check_gather(parallel, rank, size, device):
    for turn, (tokens, dtype) in enumerate(
        product((1, 3, 16, 32, 33, 64, 127, 128), (torch.bfloat16, torch.float32))
    ):
        shape = (tokens, 32320 if dtype == torch.bfloat16 else 96)
        every = whole_numbers(turn, shape, dtype, device, size)
        mine = every[rank]
        assert parallel.peers.gathers(mine)
        assert torch.equal(parallel.all_gather(mine), torch.cat(every, dim=-1)), (turn, shape)
    assert not parallel.peers.gathers(mine.new_zeros(160, 32320, dtype=torch.bfloat16))
    odd = torch.full((2, 3), float(rank), device=device)
    assert not parallel.peers.gathers(odd)
    assert torch.equal(
        parallel.all_gather(odd)[0], torch.arange(size, device=device).repeat_interleave(3).float()
    )


def check_scatter(parallel, rank, size, device):
    """Through the ranks' memory, and what is too large through the library."""
    for turn, (tokens, dtype) in enumerate(
        product((1, 3, 128, 200), (torch.bfloat16, torch.float16, torch.float32))
    ):
        shape = (size * tokens, 7168 if dtype != torch.float32 else 2048)
        every = whole_numbers(turn, shape, dtype, device, size)
        mine = every[rank]
        assert parallel.peers.scatters(mine) == (tokens < 200 or dtype == torch.float32)
        expected = sum(one.float() for one in every).chunk(size)[rank]
        assert torch.equal(parallel.scatter_sum(mine).float(), expected), (turn, shape)
        rows = parallel.gather_rows(mine[: 2 * tokens])
        assert torch.equal(rows, torch.cat([one[: 2 * tokens] for one in every]))
    tokens = [[7 * r + i for i in range(r + 1)] for r in range(size)]
    assert (
        parallel.share(torch.tensor(tokens[rank], device=device), list(range(1, size + 1)))
        == tokens
    )


def check_graph(parallel, rank, size, device, sums=25, replays=400):
    """A graph of sums of changing sizes, each gathered, with work in between, replayed with other
    values: what a decode step is."""
    counts = [1 + i * 7 % 16 for i in range(sums)]
    inputs = [torch.zeros(count, 7168, dtype=torch.bfloat16, device=device) for count in counts]
    turn = torch.zeros((), dtype=torch.int64, device=device)
    zeros = torch.zeros(16, 7168, dtype=torch.bfloat16, device=device)
    gain = torch.ones_like(zeros[0])

    def fill():
        for index, x in enumerate(inputs):
            place = torch.arange(x.numel(), device=device)
            x.copy_(((place * (rank + 1) + turn * 31 + index) % 13 - 6).view_as(x))

    def run():
        fill()
        summed = [parallel.all_reduce(x * 2) for x in inputs[::2]]
        normed = [
            parallel.add_rms_norm(x * 2, zeros[: len(x)], gain, 1e-6)[1] for x in inputs[1::2]
        ]
        return [
            parallel.all_gather(one)
            for pair in zip_longest(summed, normed)
            for one in pair
            if one is not None
        ]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = run()
    total = torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(replays):
        turn.fill_(replay)
        graph.replay()
        for index, out in enumerate(outputs):
            place = torch.arange(out.numel() // size, device=device)
            expected = sum((place * (r + 1) + turn * 31 + index) % 13 - 6 for r in range(size)) * 2
            total += (out.float() != expected.view(out.shape[0], -1).repeat(1, size)).sum()
        if replay % 50 == 0:  # eager calls of another size in between
            assert (
                parallel.all_reduce(torch.ones(3, 7168, dtype=torch.bfloat16, device=device))
                == size
            ).all()
    assert int(total) == 0, f"{int(total)} values differ"


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("size", [size for size in (2, 4, 8) if size <= max(GPUS, 2)])
def test_sums_on_gpus(size):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *map(str, (rank, size, port))], stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=300)[1].decode()[-3000:] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)


if __name__ == "__main__":
    _rank(*map(int, sys.argv[1:]))
