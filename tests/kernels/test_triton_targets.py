"""The Triton kernels compiled ahead for cards that are not here: every launch that the operators
make, as that card's plans have it.

What they need of registers and shared memory is held against what the card has. `make test-triton`
compiles for one card of each family, QUANTKIT_EVERY_CELL=1 for all.
"""

import os
import re
import subprocess
import tempfile
from functools import partial
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
    pool_entries,
    prepare,
    rms_norm,
    rope,
    rotate_heads,
    route,
    route_chosen,
    silu_and_mul,
    store_recent,
    takes_selected,
    weigh_streams,
)
from quantkit_kernels.codes import empty_keys, empty_latents  # noqa: E402
from quantkit_kernels.gating import SILU  # noqa: E402
from quantkit_kernels.samples import random_weight  # noqa: E402
from quantkit_kernels.triton import cards  # noqa: E402
from quantkit_kernels.triton.dense_experts import MANY_PAIRS  # noqa: E402
from quantkit_kernels.triton.dense_linear import multiply_rows, multiply_small  # noqa: E402
from quantkit_kernels.triton.dense_plans import dense_candidates  # noqa: E402
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
TYPES |= {torch.int32: "i32", torch.int64: "i64"}
HALF = torch.bfloat16


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
        self.assembly = []
        self._seen = set()

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


@pytest.fixture(
    params=[pytest.param(name, id=name) for name in (MULTIPROCESSORS if EVERY else FEW)]
)
def card(request, monkeypatch):
    """The CPU takes itself for this card."""
    from quantkit_kernels import triton as backend

    recorder, name = Recorder(request.param), request.param
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *a, **k: recorder.launch(kernel, *a, **k)
    )
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    modules = (
        "cards",
        "linear",
        "dense_linear",
        "experts",
        "delta",
        "indexer",
        "dense_experts",
        "operators",
        "rows",
        "launch",
        "wgmma",
        "streams",
        "compressed",
    )
    for module in (*modules, "attention.decode", "attention.heads", "attention.wgmma"):
        found = __import__(f"quantkit_kernels.triton.{module}", fromlist=["x"])
        for function, answer in (
            ("architecture", name),
            ("multiprocessors", MULTIPROCESSORS[name]),
            ("by_assembly", name.startswith("sm_")),
        ):
            if hasattr(found, function):
                monkeypatch.setattr(found, function, lambda device, answer=answer: answer)
    for one in (cards.decode_cut, cards.prefill_cut, cards.overlapped):
        one.cache_clear()
    yield recorder
    for one in (cards.decode_cut, cards.prefill_cut, cards.overlapped):
        one.cache_clear()
    print("\n".join(recorder.lines))


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


def angles(tokens, rotary):
    return Rotation(
        zeros(tokens, rotary // 2, dtype=torch.float32),
        zeros(tokens, rotary // 2, dtype=torch.float32),
    )


def linear(grid, every=EVERY):
    """Of few tokens two programs share K. What is left out by default are tiles between the
    smallest and the largest."""
    prepared = prepare(
        random_weight(grid, 4096, 2048, torch.Generator().manual_seed(0)), backend="triton"
    )
    for tokens in (2, 20, 40, 100, 300, 2000) if every else (2, 300, 2000):
        prepared(zeros(tokens, 2048))


def few_rows_of_16_bits(every=EVERY):
    """By the first plan that --tune tries on the card, or by all."""
    device = torch.device("cpu")
    multiply_small(zeros(1, 3072), zeros(576, 1536), gated=True)
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
        ids = zeros(tokens, 8, dtype=torch.int64)
        prepared(zeros(tokens, 2048), ids, zeros(tokens, 8, dtype=torch.float32))


def linear_attention(by_channel, prompt):
    """Qwen3-Next's, and Kimi Linear's with narrower values."""
    groups, shared = (32, 1) if by_channel else (16, 2)
    width = 64 if by_channel else 128
    key, value = zeros(128, groups, 128), zeros(128, groups, shared, width)
    gates = zeros(128, groups, shared, dtype=torch.float32)
    decay = zeros(*gates.shape, *(128,) * by_channel, dtype=torch.float32)
    channels, heads = groups * (256 + shared * width), groups * shared
    weights = DeltaWeights(
        *(
            zeros(*shape, dtype=torch.float32)
            for shape in ((channels, 4), (heads,), (heads, *decay.shape[3:]))
        ),
        zeros(width),
        1e-6,
    )
    states = DeltaStates(
        zeros(2, 2, 3, channels, dtype=torch.float32),
        zeros(2, 2, heads, 128, width, dtype=torch.float32),
        zeros(2, 2, dtype=torch.int64),
    )
    inputs = DeltaInputs(key, key, value, value, decay, gates)
    if prompt:
        spans = DeltaSpans.of([DeltaSpan(1, 0, 128)], torch.device("cpu"))
        delta_prefill(inputs, weights, states, spans, backend="triton")
    else:
        places = zeros(128, dtype=torch.int64)
        delta_step(inputs, weights, states, places, places, backend="triton")


def residual_streams(tokens):
    """DeepSeek-V4-Flash's, and independent ones, as Hy4's."""
    streams, gain = zeros(tokens, 4, 4096), zeros(4096)

    def product(rows, scales):
        shapes = ((rows, 4 * 4096), (rows,), (scales,))
        return StreamProduct(*(zeros(*one, dtype=torch.float32) for one in shapes), 1e-6, 1e-6, 20)

    before = (streams, product(24, 3), gain, 1e-6)
    _, weights = weigh_streams(*before, backend="reference")
    yield "weigh_streams", lambda: weigh_streams(*before, backend="triton")
    yield "mix_streams", lambda: mix_streams(streams, streams[:, 0], weights, backend="triton")
    apart = (streams, product(8, 2)._replace(steps=0), gain, 1e-6)
    _, kept = weigh_streams(*apart, backend="reference")
    yield "weigh_streams", lambda: weigh_streams(*apart, backend="triton")
    yield "mix_streams", lambda: mix_streams(streams, streams[:, 0], kept, backend="triton")
    end = product(4, 1)
    yield "merge_streams", lambda: merge_streams(streams, end, gain, 1e-6, backend="triton")


def windows(tokens):
    """DeepSeek-V4-Flash's: without entries, with all, with those chosen."""
    q, ints = zeros(tokens, 64, 512), torch.int64
    positions, sinks = zeros(tokens, dtype=ints), zeros(64, dtype=torch.float32)
    recent = RecentTokens(zeros(256, 512), positions, 129, 128)
    table, counts = zeros(tokens, 128, dtype=torch.int32), zeros(tokens, dtype=torch.int32)
    rows = ChosenEntries(zeros(tokens, 512, dtype=torch.int32), counts)
    for rate, chosen in ((0, None), (128, None), (4, rows)):
        pages = EntryPages(zeros(64, 512), table, 64, rate) if rate else None
        yield (
            "compressed_attend",
            partial(
                compressed_attend, q, positions, recent, pages, chosen, sinks, scale=1.0,
                backend="triton",
            ),
        )  # fmt: skip
    norm, rotation = HeadNorm(None, 1e-6), angles(tokens, 64)
    rings, single = zeros(2, 3, 128, 2560), torch.float32
    for width, more in ((512, 128), (512, 0)):
        raw = zeros(tokens, 4 * (width + more) if more else 2 * width)
        rate = 4 if more else 128
        pools = [
            EntryPool(
                zeros(rate, one * (2 if more else 1), dtype=single), zeros(one), 1e-6,
                EntryPages(zeros(64, one), table, 64, rate),
            )
            for one in (width, more)[: 1 + (more > 0)]
        ]  # fmt: skip
        where = RecentTokens(raw, positions, 137, 0)
        yield (
            "pool_entries",
            partial(pool_entries, where, positions, pools, rotation, backend="triton"),
        )
    yield (
        "store_recent",
        lambda: store_recent(
            zeros(tokens, 2560),
            rings,
            zeros(2, 3, dtype=ints),
            positions,
            positions,
            backend="triton",
        ),
    )
    yield "rotate_heads", lambda: rotate_heads(q, rotation, norm, backend="triton")
    yield "rotate_heads", lambda: rotate_heads(q, rotation, back=True, backend="triton")


def indexer(one_sequence, prepare=False):
    """DeepSeek-V3.2's, over 8,192 tokens and 65,536."""
    q, single = zeros(4, 64, 128), torch.float32
    places, keys = zeros(4, dtype=torch.int64), zeros(2, 64, 128)
    if prepare:
        norm = IndexNorm(zeros(128, dtype=single), zeros(128, dtype=single), 1e-6)
        index_prepare(q, q[:, 0], norm, angles(4, 64), keys, places, backend="triton")
        return
    for blocks in (128, 1024):
        table = zeros(1 if one_sequence else 4, blocks, dtype=torch.int32)
        pages, weights = IndexPages(keys, table), zeros(4, 64, dtype=single)
        index_topk(q, weights, pages, places, 2048, backend="triton")


def selected_prompt():
    """Attention of DeepSeek-V3.2's prompts, where it reads a selection."""
    q, kv_b, rotation = zeros(64, 16, 192), zeros(16, 256, 512), angles(64, 64)
    prompts = Prompts.of([(0, 64)], zeros(1, 1, dtype=torch.int32))
    if takes_selected(q, kv_b, 64, 64, backend="triton"):
        places = zeros(64, 16, dtype=torch.int32)
        selected = TopTokens(places, places, places[:, 0])
        cache = zeros(1, 64, 576)
        mla_prefill(
            q, kv_b, rotation, cache, prompts, scale=1.0, selected=selected, backend="triton"
        )


def operators():
    """Every operator, at R1's sizes and at those of models with grouped queries."""
    yield "experts_dense", lambda: experts("dense")
    yield "linear_dense", few_rows_of_16_bits
    for kind, grid in (("int4", "int4-asym-128"), ("fp4", "fp4"), ("int8", "int8")):
        yield f"linear_{kind}", lambda grid=grid: linear(grid)
        yield f"experts_{kind}", lambda grid=grid: experts(grid)
        yield f"gated_experts_{kind}", lambda grid=grid: experts(grid, gated=True)
    x, rule = zeros(8, 7168), Routing(256, 8, n_group=8, topk_group=4, num_joined_experts=1)
    single, ints = torch.float32, torch.int64
    yield "rms_norm", lambda: rms_norm(x, x[0], 1e-6, backend="triton")
    yield "add_rms_norm", lambda: add_rms_norm(x, x, x[0], 1e-6, backend="triton")
    yield "silu_and_mul", lambda: silu_and_mul(x, backend="triton")
    yield (
        "gate_and_mul",
        lambda: gate_and_mul(x, Gating(1.702, 7.0, 1.0, 4.0, 25.0), backend="triton"),
    )
    yield "likeliest", lambda: likeliest(zeros(8, 129280, dtype=single), backend="triton")
    yield (
        "route",
        lambda: route(
            zeros(8, 256, dtype=single), zeros(256, dtype=single), rule, backend="triton"
        ),
    )
    by_table = zeros(8, 8, dtype=ints)
    yield (
        "route_chosen",
        lambda: route_chosen(zeros(8, 256, dtype=single), by_table, rule, backend="triton"),
    )
    yield (
        "moe_gate",
        lambda: moe_gate(x, zeros(256, 7168, dtype=single), None, rule, backend="triton"),
    )
    yield (
        "float32_linear",
        lambda: float32_linear(x[:1], zeros(64, 7168, dtype=single), backend="triton"),
    )
    yield (
        "rope",
        lambda: rope(
            zeros(8, 128, 64), zeros(8, dtype=ints), *angles(64, 64)[:2], backend="triton"
        ),
    )
    norms, slots = Norms(zeros(1536), zeros(512), 1e-6), zeros(8, dtype=ints)
    yield (
        "mla_prepare",
        lambda: mla_prepare(
            zeros(8, 2112), norms, angles(8, 64), zeros(2, 64, 576), slots, backend="triton"
        ),
    )
    codes = empty_latents((2, 64), 512, 64, torch.float8_e4m3fn, HALF, torch.device("cpu"))
    yield (
        "mla_prepare",
        lambda: mla_prepare(zeros(8, 2112), norms, angles(8, 64), codes, slots, backend="triton"),
    )
    for rows, heads, cache in (
        (1, 128, zeros(64, 64, 576)),
        (8, 16, zeros(64, 64, 576)),
        (1, 128, codes),
        (32, 32, codes),
    ):
        pages = PagedLatents(cache, zeros(rows, 64, dtype=ints), zeros(rows, dtype=ints))
        q, kv_b = zeros(rows, heads, 192), zeros(heads, 256, 512)
        yield (
            "mla_decode",
            lambda q=q, kv_b=kv_b, pages=pages: mla_decode(
                q, kv_b, angles(len(q), 64), pages, scale=1.0, backend="triton"
            ),
        )
    of_head, cache = (
        Norms(zeros(128), zeros(128), 1e-6),
        (zeros(2, 64, 8, 128), zeros(2, 64, 8, 128)),
    )
    yield (
        "gqa_prepare",
        lambda: gqa_prepare(
            zeros(8, 48 * 128), of_head, angles(8, 128), cache, slots, backend="triton"
        ),
    )
    coded = empty_keys((2, 64, 8, 128), torch.int8, torch.device("cpu"))
    yield (
        "gqa_prepare",
        lambda: gqa_prepare(
            zeros(8, 48 * 128), of_head, angles(8, 128), coded, slots, backend="triton"
        ),
    )
    of_codes = PagedKeys(
        *coded[:2], zeros(2, 64, dtype=ints), zeros(2, dtype=ints), scales=coded.scales
    )
    yield "gqa_decode", lambda: gqa_decode(zeros(2, 32, 128), of_codes, scale=1.0, backend="triton")
    for width, heads, window in ((128, 32, 0), (64, 64, 128), (256, 16, 0)):
        side, q = zeros(64, 64, 8, width), zeros(2, heads, width)
        keys = PagedKeys(side, side, zeros(2, 64, dtype=ints), zeros(2, dtype=ints))
        yield (
            "gqa_decode",
            lambda q=q, keys=keys, window=window: gqa_decode(
                q, keys, scale=1.0, window=window, backend="triton"
            ),
        )
        long, several = zeros(256, heads, width), Prompts.of([(0, 256)], zeros(1, 4, dtype=ints))
        yield (
            "gqa_prefill",
            lambda q=long, side=side, p=several: gqa_prefill(
                q, (side, side), p, scale=1.0, backend="triton"
            ),
        )
    for by_channel in (False, True):
        yield "delta_step", partial(linear_attention, by_channel, False)
        yield "delta_prefill", partial(linear_attention, by_channel, True)
    for tokens in (1, 128):
        yield from residual_streams(tokens)
    for tokens in (1, 512):
        yield from windows(tokens)
    for one_sequence in (True, False):
        yield "index_topk", partial(indexer, one_sequence)
    yield "index_prepare", lambda: indexer(True, prepare=True)
    whole = Prompts.of([(0, 64)], zeros(1, 1, dtype=ints))
    yield "mla_prefill", selected_prompt
    yield (
        "mla_prefill",
        lambda: mla_prefill(
            zeros(64, 16, 192),
            zeros(16, 256, 512),
            angles(64, 64),
            zeros(1, 64, 576),
            whole,
            scale=1.0,
            backend="triton",
        ),
    )


def test_every_operator_compiles_within_the_limits_of_the_card(card):
    for card.operator, run in operators():
        run()
    assert len({line.split()[1] for line in card.lines}) == len({name for name, _ in operators()})


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_int8_on_hopper_is_by_wgmma_and_one_product_is_under_way_while_the_next_is_issued(card):
    card.operator = "linear_int8"
    linear("int8", every=True)
    by_wgmma = [text for name, text in card.assembly if name == "multiply_int8"]
    assert len(by_wgmma) >= 4
    for text in by_wgmma:
        assert "wgmma.mma_async.sync.aligned" in text
        assert "cp.async.bulk.tensor" in text
        assert "wgmma.wait_group.sync.aligned 1;" in text


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_prompts_on_hopper_are_by_wgmma_and_softmax_runs_beside_a_product(card):
    for card.operator, run in operators():
        if card.operator.endswith("_prefill"):
            run()
    by_wgmma = [text for name, text in card.assembly if name == "attend_prompts"]
    assert len(by_wgmma) >= 4
    assert not any("mma.sync" in text for text in by_wgmma)
    loops = []
    for text in by_wgmma:
        assert "cp.async.bulk.tensor" in text
        _, *under_way = text.split("wgmma.wait_group.sync.aligned 1;")
        loops.append(len(under_way))
        assert all(
            "ex2.approx" in part.split("wgmma.wait_group.sync.aligned 0;")[0] for part in under_way
        )
    # Blocks without a mask and with one, of both partitions; of a selection all have a mask.
    assert sorted(loops) == [2, *(4 for _ in by_wgmma[1:])]


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_on_hopper_the_memory_of_a_barrier_is_nothing_elses(card):
    """PTX wants it so for as long as it is not invalidated; prompts' attention, where it was not
    so, never ended beside another process."""
    for card.operator, run in operators():
        if card.operator.endswith("_prefill"):
            run()
    card.operator = "linear_int8"
    linear("int8", every=True)
    found = [
        text
        for name, text in card.assembly
        if name in ("attend_prompts", "multiply_int8") and "mbarrier.init" in text
    ]
    assert len(found) >= 8
    for text in found:
        barriers = set(
            map(
                int,
                re.findall(
                    r"add\.s32 \s*%r\d+, %r\d+, (\d+);\n\s*// begin inline asm\n\s*@%p\d+ "
                    r"mbarrier\.init",
                    text,
                ),
            )
        )
        assert len(barriers) == text.count("mbarrier.init")
        stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+) \s*\[global_smem\+(\d+)\]", text)
        written = {
            int(at) + byte
            for many, bits, at in stores
            for byte in range(int(many or 1) * int(bits) // 8)
        }
        assert not written & {at + byte for at in barriers for byte in range(8)}
