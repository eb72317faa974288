"""The Triton kernels compiled ahead for cards that are not here: every launch that the operators
make, as that card's plans have it.

What they need of registers and shared memory is held against what the card has. `make test-triton`
compiles for one card of each family, QUANTKIT_EVERY_CELL=1 for all.
"""

import os
import pkgutil
import re
import subprocess
import tempfile
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiling needs triton")

from quantkit_kernels import (  # noqa: E402
    ChosenEntries,
    DeltaInputs,
    DeltaSpan,
    DeltaSpans,
    DeltaStates,
    DeltaWeights,
    EntryPages,
    EntryPool,
    ExpertBiases,
    ExpertsBuilder,
    Gating,
    HeadNorm,
    IndexNorm,
    IndexPages,
    Norms,
    PagedKeys,
    PagedLatents,
    Prompts,
    RecentTokens,
    Rotation,
    Routing,
    StreamProduct,
    TopTokens,
    add_rms_norm,
    compressed_attend,
    delta_prefill,
    delta_step,
    float32_linear,
    gate_and_mul,
    gate_and_rotate,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    index_prepare,
    index_topk,
    likeliest,
    merge_streams,
    mix_streams,
    mla_decode,
    mla_prefill,
    mla_prepare,
    moe_gate,
    mx_rounded,
    pool_entries,
    prepare,
    rms_norm,
    rope,
    rotary_angles,
    rotate_heads,
    rotate_queries,
    route,
    route_chosen,
    silu_and_mul,
    store_recent,
    takes_selected,
    weigh_streams,
)
from quantkit_kernels.codes import empty_index_keys, empty_keys, empty_latents  # noqa: E402
from quantkit_kernels.gating import SILU  # noqa: E402
from quantkit_kernels.samples import random_weight  # noqa: E402
from quantkit_kernels.triton import cards  # noqa: E402
from quantkit_kernels.triton.dense_linear import multiply_rows  # noqa: E402
from quantkit_kernels.triton.dense_plans import dense_candidates  # noqa: E402
from quantkit_kernels.triton.small import multiply_small  # noqa: E402
from quantkit_kernels.triton.sorted_pairs import MANY_PAIRS  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.skipif(cards.interpreted(), reason="the interpreter compiles nothing")

MULTIPROCESSORS = {
    "sm_80": 108,
    "sm_86": 82,
    "sm_89": 142,
    "sm_90": 132,
    "sm_100": 148,
    "sm_120": 170,
    "gfx90a": 104,
    "gfx942": 304,
}
FEW, EVERY = ("sm_80", "gfx942"), bool(os.environ.get("QUANTKIT_EVERY_CELL"))
MOST_REGISTERS, MOST_SPILLED = {"sm": 255, "gf": 512}, 256
"""Of a thread; bytes of a thread that may lie in memory instead in attention of prompts, and a
quarter of them elsewhere."""
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int16: "i16",
}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv"}
HALF, SINGLE, INTS = torch.bfloat16, torch.float32, torch.int64


def target_of(name):
    return (
        GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
        if name.startswith("sm_")
        else GPUTarget("hip", name, 64)
    )


class Recorder:
    """Stands in for a launch: compiles it for a card."""

    def __init__(self, card):
        self.card, self.operator, self.lines = card, "", []
        self.asked, self.assembly = set(), []
        self._seen = set()

    def ask(self, operator, *args, **named):
        self.begin(operator.__name__)
        return operator(*args, **named, backend="triton")

    def begin(self, operator):
        """What is launched from now on is this operator's."""
        self.operator = operator
        self.asked.add(operator)

    def launch(self, kernel, *args, grid, warmup, **named):
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, args)) | {
            name: value for name, value in named.items() if name in names
        }
        options = {name: value for name, value in named.items() if name not in names}
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value, fixed = given[parameter.name], parameter.do_not_specialize
            if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not fixed):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            tensor = isinstance(value, torch.Tensor)
            if isinstance(value, TensorDescriptor):
                signature[parameter.name] = (
                    f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
                )
                continue
            signature[parameter.name] = (
                f"*{TYPES[value.dtype]}"
                if tensor
                else "fp32"
                if isinstance(value, float)
                else "i32"
            )
            if tensor or (isinstance(value, int) and value % 16 == 0 and not fixed):
                attributes[place,] = [["tt.divisibility", 16]]
        key = repr(
            (
                kernel.fn.__name__,
                signature,
                sorted((name, str(one)) for name, one in constants.items()),
                attributes,
                options,
            )
        )
        if key in self._seen:
            return
        self._seen.add(key)
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
            kernel, signature, constexprs=constants, attrs=attributes
        )
        self._judge(
            kernel.fn.__name__, triton.compile(source, target=target_of(self.card), options=options)
        )

    def _judge(self, name, compiled):
        registers, spilled = used(compiled)
        self.assembly.append((name, compiled.asm.get("ptx", "")))
        assert not scattered_sums(compiled.asm["ttgir"]), name
        shared, room = compiled.metadata.shared, cards.shared_bytes(self.card)
        self.lines.append(
            f"{self.card} {self.operator} {name}: {registers} registers, {spilled} bytes spilled, "
            f"{shared} of {room} shared"
        )
        assert shared <= room, self.lines[-1]
        assert registers <= MOST_REGISTERS[self.card[:2]], self.lines[-1]
        assert spilled <= (
            MOST_SPILLED if self.operator.endswith("_prefill") else MOST_SPILLED // 4
        ), self.lines[-1]


def scattered_sums(text):
    """Reductions over lanes whose numbers differ in bits that are not neighbours: Triton 3.6
    shuffles neighbours and leaves the others out (FP4 of 8 rows was wrong by 1e11)."""
    lanes = dict(re.findall(r"^(#\w+) = #ttg\.linear<.*?lane = \[(.*?)\], warp", text, re.M))
    found = []
    for axis, sliced, layout in re.findall(
        r'"tt\.reduce".*?<\{axis = (\d+) : i32\}>.*?\}\) : '
        r"\(tensor<\w+, ((?:#ttg\.slice<\{dim = \d+, parent = )*)(#\w+)",
        text,
        re.S,
    ):
        place = int(axis)
        for removed in map(int, re.findall(r"dim = (\d+)", sliced)):
            place += place >= removed
        bases = re.findall(r"\[([\d, ]+)\]", lanes.get(layout, ""))
        bits = [bit for bit, base in enumerate(bases) if int(base.split(", ")[place])]
        if bits and bits[-1] - bits[0] >= len(bits):
            found.append((layout, bits))
    return found


def used(compiled):
    """Registers of a thread, and bytes that did not fit them."""
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        return tuple(
            int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


@pytest.fixture(params=MULTIPROCESSORS if EVERY else FEW)
def card(request, monkeypatch):
    """The CPU takes itself for this card."""
    from quantkit_kernels import triton as backend

    recorder, name = Recorder(request.param), request.param
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *a, **k: recorder.launch(kernel, *a, **k)
    )
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    answers = {
        "architecture": name,
        "multiprocessors": MULTIPROCESSORS[name],
        "by_assembly": name.startswith("sm_"),
    }
    for found in pkgutil.walk_packages(backend.__path__, f"{backend.__name__}."):
        module = import_module(found.name)
        for function in answers.keys() & vars(module).keys():
            answer = answers[function]
            monkeypatch.setattr(module, function, lambda device, answer=answer: answer)
    cuts = (cards.decode_cut, cards.prefill_cut, cards.overlapped)
    for one in cuts:
        one.cache_clear()
    yield recorder
    for one in cuts:
        one.cache_clear()
    print("\n".join(recorder.lines))


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


def angles(tokens, rotary):
    side = zeros(tokens, rotary // 2, dtype=SINGLE)
    return Rotation(side, side)


def linear(grid, every=EVERY):
    """Of few tokens two programs share K. What is left out by default are tiles between the
    smallest and the largest."""
    prepared = prepare(
        random_weight(grid, 4096, 2048, torch.Generator().manual_seed(0)), backend="triton"
    )
    for tokens in (2, 20, 40, 100, 300, 2000) if every else (2, 300, 2000):
        prepared(zeros(tokens, 2048))
    small_linear(grid)


def small_linear(grid):
    small = prepare(
        random_weight(grid, 3072, 640, torch.Generator().manual_seed(0)), backend="triton"
    ).packed
    multiply_small(zeros(1, 640), small, zeros(640), 1e-5)
    multiply_small(zeros(1, 1280), small, residual=zeros(1, 3072))


def few_rows_of_16_bits(every=EVERY):
    """By the first plan that --tune tries on the card, or by all."""
    device = torch.device("cpu")
    multiply_small(zeros(1, 3072), zeros(576, 1536), residual=zeros(1, 576))
    multiply_small(zeros(1, 576), zeros(3072, 576), zeros(576), 1e-5)
    multiply_small(zeros(1, 2048), zeros(513, 2048, dtype=torch.float32))
    n = k = 4096
    plans = dense_candidates(
        cards.multiprocessors(device), n, k, cards.shared_bytes(cards.architecture(device))
    )
    for plan in plans if every else plans[:1]:
        for tokens in (2, 64):
            multiply_rows(zeros(tokens, k), zeros(n, k), plan)


def experts(grid, gated=False):
    """gated: with everything that a gate can have, as gpt-oss has it."""
    rng = torch.Generator().manual_seed(0)
    gate, down = random_weight(grid, 256, 2048, rng), random_weight(grid, 2048, 256, rng)
    gating = Gating(1.702, 7.0, 1.0, 4.0, 25.0) if gated else SILU
    builder = ExpertsBuilder(8, backend="triton", gating=gating)
    biases = ExpertBiases(torch.zeros(256), torch.zeros(256), torch.zeros(2048))
    for expert in range(8):
        builder.add(expert, gate, gate, down, biases=biases if gated else None)
    prepared = builder.finish()
    counts = (1, 20, 64, 128) if EVERY and not gated else (1, 128)
    for tokens in (*counts, *((MANY_PAIRS // 8,) if grid == "dense" else ())):
        given = (zeros(tokens, 8, dtype=INTS), zeros(tokens, 8, dtype=SINGLE))
        prepared(zeros(tokens, 2048), *given)
    if grid not in ("dense", "int8"):
        prepared.decoded(zeros(tokens, 2048), *given)


def linear_attention(card, by_channel):
    """Qwen3-Next's, and Kimi Linear's with narrower values."""
    groups, shared = (32, 1) if by_channel else (16, 2)
    width = 64 if by_channel else 128
    key, value = zeros(128, groups, 128), zeros(128, groups, shared, width)
    gates = zeros(128, groups, shared, dtype=SINGLE)
    decay = zeros(*gates.shape, *(128,) * by_channel, dtype=SINGLE)
    channels, heads = groups * (256 + shared * width), groups * shared
    shapes = ((channels, 4), (heads,), (heads, *decay.shape[3:]))
    weights = DeltaWeights(*(zeros(*one, dtype=SINGLE) for one in shapes), zeros(width), 1e-6)
    states = DeltaStates(
        zeros(2, 2, 3, channels, dtype=SINGLE),
        zeros(2, 2, heads, 128, width, dtype=SINGLE),
        zeros(2, 2, dtype=INTS),
    )
    inputs = DeltaInputs(key, key, value, value, decay, gates)
    spans = DeltaSpans.of([DeltaSpan(1, 0, 128)], torch.device("cpu"))
    card.ask(delta_prefill, inputs, weights, states, spans)
    places = zeros(128, dtype=INTS)
    card.ask(delta_step, inputs, weights, states, places, places)


def residual_streams(card, tokens):
    """DeepSeek-V4-Flash's, and independent ones, as Hy4's."""
    streams, gain = zeros(tokens, 4, 4096), zeros(4096)

    def made(rows, scales, steps=20):
        shapes = ((rows, 4 * 4096), (rows,), (scales,))
        return StreamProduct(*(zeros(*one, dtype=SINGLE) for one in shapes), 1e-6, 1e-6, steps)

    for of in (made(24, 3), made(8, 2, steps=0)):
        card.ask(weigh_streams, streams, of, gain, 1e-6)
        _, weights = weigh_streams(streams, of, gain, 1e-6, backend="reference")
        card.ask(mix_streams, streams, streams[:, 0], weights)
    card.ask(merge_streams, streams, made(4, 1), gain, 1e-6)


def windows(card, tokens):
    """DeepSeek-V4-Flash's: without entries, with all, with those chosen."""
    q, positions = zeros(tokens, 64, 512), zeros(tokens, dtype=INTS)
    recent = RecentTokens(zeros(256, 512), positions, 129, 128)
    table, counts = zeros(tokens, 128, dtype=torch.int32), zeros(tokens, dtype=torch.int32)
    rows = ChosenEntries(zeros(tokens, 512, dtype=torch.int32), counts)
    sinks = zeros(64, dtype=SINGLE)
    for rate, chosen in ((0, None), (128, None), (4, rows)):
        pages = EntryPages(zeros(64, 512), table, 64, rate) if rate else None
        card.ask(compressed_attend, q, positions, recent, pages, chosen, sinks, scale=1.0)
    rotation = angles(tokens, 64)
    for rate, widths in ((4, (512, 128)), (128, (512,))):
        halves = len(widths)  # groups that overlap
        pools = [
            EntryPool(
                zeros(rate, halves * one, dtype=SINGLE), zeros(one), 1e-6,
                EntryPages(zeros(64, one), table, 64, rate),
            )
            for one in widths
        ]  # fmt: skip
        raw = zeros(tokens, 2 * halves * sum(widths))
        card.ask(pool_entries, RecentTokens(raw, positions, 137, 0), positions, pools, rotation)
    rings, ends = zeros(2, 3, 128, 2560), zeros(2, 3, dtype=INTS)
    card.ask(store_recent, zeros(tokens, 2560), rings, ends, positions, positions)
    key_norm = HeadNorm(zeros(512), 1e-6)
    card.ask(rotate_queries, q, q[:, 0], rotation, HeadNorm(None, 1e-6), key_norm)
    card.ask(rotate_heads, q, rotation, back=True)


def indexer(card):
    """DeepSeek-V3.2's, over 8,192 tokens and 65,536, of one sequence and of four."""
    q, places, keys = zeros(4, 64, 128), zeros(4, dtype=INTS), zeros(2, 64, 128)
    norm = IndexNorm(zeros(128, dtype=SINGLE), zeros(128, dtype=SINGLE), 1e-6)
    many = zeros(1024, 64, 128)
    for cache in (keys, empty_index_keys((2, 64), 128, torch.device("cpu"))):
        card.ask(index_prepare, q, q[:, 0], norm, angles(4, 64), cache, places)
        for sequences, blocks in product((1, 4), (128, 1024)):
            pages = IndexPages(cache, zeros(sequences, blocks, dtype=torch.int32))
            card.ask(index_topk, q, zeros(4, 64, dtype=SINGLE), pages, places, 2048)
        pages, weights = IndexPages(cache, pages.block_table[:1]), zeros(1024, 64, dtype=SINGLE)
        card.ask(index_topk, many, weights, pages, zeros(1024, dtype=INTS), 2048)


def latent_attention(card):
    rotation, slots = angles(8, 64), zeros(8, dtype=INTS)
    norms, codes = Norms(zeros(1536), zeros(512), 1e-6), torch.float8_e4m3fn
    plain = zeros(64, 64, 576)
    coded = empty_latents((2, 64), 512, 64, codes, HALF, torch.device("cpu"))
    for cache in (plain, coded):
        card.ask(mla_prepare, zeros(8, 2112), norms, rotation, cache, slots)
    for rows, heads, cache in ((1, 128, plain), (8, 16, plain), (1, 128, coded), (32, 32, coded)):
        pages = PagedLatents(cache, zeros(rows, 64, dtype=INTS), zeros(rows, dtype=INTS))
        q, kv_b = zeros(rows, heads, 192), zeros(heads, 256, 512)
        card.ask(mla_decode, q, kv_b, angles(rows, 64), pages, scale=1.0)


def grouped_attention(card):
    norms, slots = Norms(zeros(128), zeros(128), 1e-6), zeros(8, dtype=INTS)
    coded = empty_keys((2, 64, 8, 128), torch.int8, torch.device("cpu"))
    for cache in ((zeros(2, 64, 8, 128), zeros(2, 64, 8, 128)), coded):
        card.ask(gqa_prepare, zeros(8, 48 * 128), norms, angles(8, 128), cache, slots)
    table, lengths = zeros(2, 64, dtype=INTS), zeros(2, dtype=INTS)
    pages = PagedKeys(*coded[:2], table, lengths, scales=coded.scales)
    card.ask(gqa_decode, zeros(2, 32, 128), pages, scale=1.0)
    for width, heads, window in HEADS:
        side = zeros(64, 64, 8, width)
        pages = PagedKeys(side, side, table, lengths)
        card.ask(gqa_decode, zeros(2, heads, width), pages, scale=1.0, window=window)


HEADS = ((128, 32, 0), (64, 64, 128), (256, 16, 0))
"""Width and number of heads, and the window of decoding."""


def prompts(card):
    """Attention of prompts; of DeepSeek-V3.2's with a selection, where it reads one."""
    for width, heads, _ in HEADS:
        side, of = zeros(64, 64, 8, width), Prompts.of([(0, 256)], zeros(1, 4, dtype=INTS))
        card.ask(gqa_prefill, zeros(256, heads, width), (side, side), of, scale=1.0)
    q, kv_b, rotation = zeros(64, 16, 192), zeros(16, 256, 512), angles(64, 64)
    given = (q, kv_b, rotation, zeros(1, 64, 576))
    whole = Prompts.of([(0, 64)], zeros(1, 1, dtype=torch.int32))
    card.ask(mla_prefill, *given, whole, scale=1.0)
    if takes_selected(q, kv_b, 64, 64, backend="triton"):
        places = zeros(64, 16, dtype=torch.int32)
        selected = TopTokens(places, places, places[:, 0])
        card.ask(mla_prefill, *given, whole, scale=1.0, selected=selected)


def operators(card):
    """Every operator, at R1's sizes and at those of models with grouped queries."""
    card.begin("experts_dense")
    experts("dense")
    card.begin("linear_dense")
    few_rows_of_16_bits()
    for kind, grid in (("int4", "int4-asym-128"), ("fp4", "fp4"), ("int8", "int8")):
        card.begin(f"linear_{kind}")
        linear(grid)
        for gated in (False, True):
            card.begin(f"experts_{kind}")
            experts(grid, gated)
    card.begin("linear_w8a16")
    small_linear("w8a16-32")
    x, rule = zeros(8, 7168), Routing(256, 8, n_group=8, topk_group=4, num_joined_experts=1)
    logits = zeros(8, 256, dtype=SINGLE)
    card.ask(rms_norm, x, x[0], 1e-6)
    card.ask(add_rms_norm, x, x, x[0], 1e-6)
    card.ask(silu_and_mul, x)
    card.ask(gate_and_mul, x, Gating(1.702, 7.0, 1.0, 4.0, 25.0))
    card.ask(gate_and_rotate, x, Gating(), 128)
    card.ask(mx_rounded, x, 8)
    card.ask(likeliest, zeros(8, 129280, dtype=SINGLE))
    card.ask(route, logits, logits[0], rule)
    card.ask(route_chosen, logits, zeros(8, 8, dtype=INTS), rule)
    card.ask(moe_gate, x, zeros(256, 7168, dtype=SINGLE), None, rule)
    card.ask(float32_linear, x[:1], zeros(64, 7168, dtype=SINGLE))
    card.ask(rope, zeros(8, 128, 64), zeros(8, dtype=INTS), *angles(64, 64)[:2])
    card.ask(rotary_angles, zeros(8, dtype=INTS), zeros(32, dtype=SINGLE), group=4)
    latent_attention(card)
    grouped_attention(card)
    for by_channel in (False, True):
        linear_attention(card, by_channel)
    for tokens in (1, 128):
        residual_streams(card, tokens)
    for tokens in (1, 512):
        windows(card, tokens)
    indexer(card)
    prompts(card)


def test_every_operator_compiles_within_the_limits_of_the_card(card):
    operators(card)
    assert {line.split()[1] for line in card.lines} == card.asked


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_on_hopper_products_are_by_wgmma(card):
    """One is under way while the next is issued, and softmax runs beside it; an indexer's waits for
    its own, beside those of other partitions. The memory of a barrier is nothing else's. PTX wants
    it so for as long as it is not invalidated: prompts' attention, where it was not so, never ended
    beside another process."""
    prompts(card)
    indexer(card)
    card.begin("linear_int8")
    linear("int8", every=True)
    made = {
        name: [text for one, text in card.assembly if one == name]
        for name in ("attend_prompts", "multiply_int8", "prompt_scores")
    }
    scores = made["prompt_scores"]
    assert min(map(len, made.values())) >= len(scores) == 2  # keys in 16 bits, and in FP8
    for text in (text for texts in made.values() for text in texts):
        assert "wgmma.mma_async.sync.aligned" in text
        assert "cp.async.bulk.tensor" in text
        assert text in scores or "wgmma.wait_group.sync.aligned 1;" in text
        initialized = (
            r"add\.s32 \s*%r\d+, %r\d+, (\d+);\n\s*// begin inline asm\n\s*@%p\d+ mbarrier\.init"
        )
        barriers = set(map(int, re.findall(initialized, text)))
        assert len(barriers) == text.count("mbarrier.init") > 0
        stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+) \s*\[global_smem\+(\d+)\]", text)
        written = {
            int(at) + byte
            for many, bits, at in stores
            for byte in range(int(many or 1) * int(bits) // 8)
        }
        assert not written & {at + byte for at in barriers for byte in range(8)}
    loops = []
    for text in made["attend_prompts"]:
        assert "mma.sync" not in text
        _, *under_way = text.split("wgmma.wait_group.sync.aligned 1;")
        loops.append(len(under_way))
        beside = [part.split("wgmma.wait_group.sync.aligned 0;")[0] for part in under_way]
        assert all("ex2.approx" in part for part in beside)
    # Blocks without a mask and with one, of both partitions; of a selection all have a mask.
    assert sorted(loops) == [2, *(4 for _ in loops[1:])]


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_a_decode_step_compiles_once_however_wide_its_table_is(card):
    """A server would wait for each variant. Shares of 64, 33, 26, 16 and 4 are of four powers of
    two."""
    side = zeros(64, 64, 2, 256)
    for rows, blocks in ((1, 128), (4, 130), (5, 129), (8, 130), (30, 144)):
        pages = PagedKeys(side, side, zeros(rows, blocks, dtype=INTS), zeros(rows, dtype=INTS))
        card.ask(gqa_decode, zeros(rows, 16, 256), pages, scale=1.0)
    launched = [line.split()[2] for line in card.lines]
    assert sorted(launched) == ["attend_cached:", *["merge:"] * 4], card.lines
