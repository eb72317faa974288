"""Norms, rotation, cache and the queries' product in one launch on a CUDA device: to the last bit
what two launches give."""

import pytest
import torch
from quantkit_kernels import Norms, Rotation, cuda, functional, prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.samples import latent_attention, random_weight

DEVICE = torch.device("cuda")
REASON = why_unusable("linear_int4", "cuda", DEVICE, torch.bfloat16)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory"),
]


GRIDS = ("int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128", "fp4")


class Case:
    """Random tokens and gains of given ranks, angles, and a cache of NaN."""

    def __init__(self, tokens, ranks, dtype, interleaved=True):
        q_lora, kv_lora, rope = ranks
        self.qkv_a = (torch.randn(tokens, sum(ranks), device=DEVICE) * 3).to(dtype)
        self.norms = Norms(
            torch.rand(q_lora, device=DEVICE).to(dtype),
            torch.rand(kv_lora, device=DEVICE).to(dtype),
            1e-6,
        )
        angles = torch.rand(tokens, rope // 2, device=DEVICE) * 6
        self.rotation = Rotation(angles.cos(), angles.sin(), interleaved)
        self.slots = torch.randperm(640, device=DEVICE)[:tokens]
        self.width, self.dtype = kv_lora + rope, dtype

    def run(self, operator, *more):
        """What the operator returns, and the cache as it leaves it."""
        cache = torch.full((10, 64, self.width), float("nan"), dtype=self.dtype, device=DEVICE)
        return operator(self.qkv_a, self.norms, self.rotation, cache, self.slots, *more), cache


R1 = (1536, 512, 64)


# R1 as one of four, of eight and whole; a rank of 2048; few chunks, more rows than strips have; a
# narrow latent.
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (R1, 6144),
        (R1, 3072),
        (R1, 24576),
        ((2048, 512, 64), 4096),
        ((256, 512, 64), 2080),
        ((1664, 256, 32), 2048),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_one_launch_gives_the_bits_of_two(grid, dtype, ranks, rows):
    if grid == "fp4" and dtype == torch.float16:
        pytest.skip("FP4 computes in bfloat16 only")
    rng = torch.Generator(DEVICE).manual_seed(rows)
    q_b = prepare(random_weight(grid, rows, ranks[0], rng), backend="cuda", dtype=dtype)
    together = 0
    for at, tokens in enumerate((1, 1, 2, 4, 8, 9, 16)):
        case = Case(tokens, ranks, dtype, interleaved=at % 2 == 0)
        q_a, expected_cache = case.run(functional.mla_prepare)
        queries, cache = case.run(functional.mla_queries, q_b)
        assert torch.equal(queries, q_b(q_a)), tokens
        assert torch.equal(cache.view(torch.int16), expected_cache.view(torch.int16)), tokens
        together += case.run(cuda.mla_queries, q_b)[0] is not None
    assert together >= 2, "no such plan took one launch"


def test_what_the_kernel_does_not_take_is_computed_by_two():
    rng = torch.Generator(DEVICE).manual_seed(0)
    for grid, rows, ranks, tokens in (
        ("int8", 6144, R1, 1),
        ("int4-sym-128", 6144, R1, 17),
        ("int4-sym-128", 4096, (2176, 512, 64), 1),
    ):
        case = Case(tokens, ranks, torch.bfloat16)
        q_b = prepare(random_weight(grid, rows, ranks[0], rng), backend="cuda")
        assert case.run(cuda.mla_queries, q_b)[0] is None
        assert torch.equal(
            case.run(functional.mla_queries, q_b)[0], q_b(case.run(functional.mla_prepare)[0])
        )
    case = Case(1, R1, torch.bfloat16)
    q_b = prepare(random_weight("int4-sym-128", 6144, 1536, rng), backend="cuda")
    other = case.run(cuda.mla_queries, lambda x: q_b(x))[0]
    assert other is None, "another call than a linear's may do more"


@pytest.mark.parametrize("users", [1, 8, 16])
def test_attention_behind_it_reads_the_newest_token(users):
    """Chains of both in a graph, whose attention asks for the cache before its predecessor has
    ended: replayed over other tokens."""
    lengths, dtype = [100 + 7 * user for user in range(users)], torch.bfloat16
    attention = latent_attention(lengths, 32, 64, (128, 64, 128, 512), dtype, "cuda")
    _, kv_b, rotation, pages = attention.arguments
    q_b = prepare(
        random_weight("int4-asym-128", 32 * 192, 1536, torch.Generator(DEVICE).manual_seed(1)),
        backend="cuda",
    )
    at = torch.tensor(lengths, device=DEVICE) - 1
    slots = pages.block_table[torch.arange(users, device=DEVICE), at // 64].long() * 64 + at % 64
    case = Case(users, R1, dtype)

    def step(queries):
        found = []
        for turn in range(6):
            q = queries(
                case.qkv_a * (1 + turn), case.norms, rotation, pages.cache, slots
            ).unflatten(-1, (32, 192))
            found.append(
                functional.mla_decode(
                    q, kv_b, rotation, pages, scale=attention.scale, backend="cuda"
                )
            )
        return torch.stack(found)

    def together(*where):
        return cuda.mla_queries(*where, q_b)

    step(together)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(together)
    for _ in range(20):
        case.qkv_a.copy_(torch.randn_like(case.qkv_a) * 3)
        graph.replay()
        torch.cuda.synchronize()
        expected = step(lambda *where: q_b(functional.mla_prepare(*where, backend="cuda")))
        assert torch.equal(out, expected)
