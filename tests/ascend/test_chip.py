"""The tile budget of every configuration that the Ascend kernels ship, and what they refuse."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from ascend.row_blocks import in_order
from quantkit_kernels import ascend
from quantkit_kernels.ascend import chip, launch, layout
from quantkit_kernels.samples import random_weight


def test_block_rows():
    assert [chip.block_rows(m) for m in (1, 16, 17, 64, 65, 4096)] == [16, 16, 32, 64, 128, 128]
    assert chip.EXPERT_BLOCK_ROWS in chip.BLOCK_ROWS


def test_what_a_step_holds_in_the_cubes_buffers():
    """Of 4-bit weights half a span in 16 bits, both halves twice in L1."""
    assert chip.cube_bytes("int4", 16) == {"L0A": 2048, "L0B": 8192, "L0C": 4096, "L1": 40960}
    assert chip.cube_bytes("int8", 16) == {"L0A": 2048, "L0B": 16384, "L0C": 8192, "L1": 36864}


@pytest.mark.parametrize("n", [64, 100])
def test_nibbles_come_back(n):
    codes = torch.randint(
        0, 16, (n, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    packed = layout.pack_nibbles(codes.to(torch.int8), 64)
    assert packed.shape == (-(-n // 64), 2, 64, 64)
    assert torch.equal(layout.unpack_nibbles(packed, n), codes)
    # Byte (s, r, c) of tile t: W[64 t + c, 128 s + r] low, W[64 t + c, 128 s + 64 + r] high.
    assert int(packed[0, 1, 5, 7]) & 255 == int(codes[7, 133]) | int(codes[7, 197]) << 4


@pytest.mark.parametrize(
    ("grid", "bits"), [("int4-asym-128", 4 + 40 / 128), ("fp4", 4.5), ("int8", 8.0)]
)
def test_bytes_per_weight(grid, bits):
    packed = layout.pack(random_weight(grid, 256, 7168, torch.Generator().manual_seed(0)))
    held = sum(tensor.numel() * tensor.element_size() for tensor in packed.tensors)
    assert held * 8 / (256 * 7168) == pytest.approx(bits, rel=2e-3)


@pytest.mark.parametrize(("n", "k"), [(64, 7168), (7168, 128)])
def test_rows_beyond_offsets_of_32_bits_are_refused(n, k, monkeypatch):
    """Of x and of the outputs."""
    monkeypatch.setattr(launch, "cores", lambda device: (24, 48))
    packed = layout.pack(random_weight("fp4", n, k, torch.Generator().manual_seed(0)))
    most = (2**31 - 1) // 7168
    for rows in (most, most + 1):
        x, out = (torch.zeros(1, 1).bfloat16().expand(rows, width) for width in (k, n))
        blocks = in_order(torch.zeros(-(-rows // 128), dtype=torch.int32), rows, 128)
        if rows == most:
            assert launch.blocks(packed, x, None, blocks, out).kernel == "fp4_blocks"
            continue
        with pytest.raises(ValueError, match=f"{rows} rows, at most {most}"):
            launch.blocks(packed, x, None, blocks, out)


def test_refusals_name_the_reason():
    npu_free = torch.device("cpu")
    assert ascend.unusable("linear_int4", npu_free, None, ()) == "runs on Ascend NPUs, not on cpu"
    assert "multiples of 128, not 96" in (
        ascend.refused("linear_int4", torch.bfloat16, (64, 96)) or ""
    )
    assert "bfloat16 only" in (ascend.refused("experts_fp4", torch.float16, None) or "")
    assert "bfloat16 and float16" in (ascend.refused("linear_int8", torch.float32, None) or "")
    assert "quantized weights" in (ascend.refused("rms_norm", None, None) or "")
    assert "8 bits only" in (ascend.refused("linear_w8a16", torch.bfloat16, None) or "")
    assert ascend.refused("linear_int8", torch.bfloat16, (2112, 7168)) is None
    assert ascend.refused("linear_int4", torch.bfloat16, None) is None


def test_another_triton_is_not_triton_ascend(monkeypatch):
    both = ["triton", "triton.backends.ascend"]
    for known in ([], both[:1], both):
        monkeypatch.setattr(importlib.util, "find_spec", dict.fromkeys(known, "found").get)
        assert ascend.has_triton_ascend.__wrapped__() == (known == both)


def test_cores_are_the_devices(monkeypatch):
    """Elsewhere the 910B3's, the fewest of the family."""
    assert chip.cores(torch.device("cpu")) == (20, 40)
    limit = {2: {"cube_core_num": 24, "vector_core_num": 48}}
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda device: SimpleNamespace(get_device_limit=lambda index: limit[index]),
    )
    assert chip.cores.__wrapped__(SimpleNamespace(type="npu", index=2)) == (24, 48)
