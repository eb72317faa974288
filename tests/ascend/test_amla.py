"""AMLA's numerics: rescaling by integer addition is multiplication by a power of two, and attention
stays within its stated error."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from ascend import ascendc, npu_double
from ascend.test_r1_attention import forced


@pytest.fixture(scope="module")
def amla() -> ModuleType:
    return ascendc.twin("amla")


def test_addition_to_the_exponent_is_multiplication(amla: ModuleType) -> None:
    """Bit for bit where the result is a normal number; zeros stay, and what would be subnormal is
    zero."""
    rng = np.random.default_rng(0)
    sums = (rng.standard_normal((64, 32)) * np.exp2(rng.integers(-60, 60, (64, 32)))).astype(
        np.float32
    )
    sums[0, :4] = [0.0, -0.0, 2.0**-126, -(2.0**-125)]
    for step in (0, -1, -7, -40, -125, -126, -150, -300, -40000):
        exact = sums.astype(np.float64) * (2.0**step if step > -1000 else 0.0)
        expected = np.where(np.abs(exact) >= 2.0**-126, exact, 0).astype(np.float32)
        assert np.array_equal(amla.rescaled(sums, np.full((64, 1), step, np.int32)), expected), step


def test_bf16_is_torchs(amla: ModuleType) -> None:
    """Ties, on both sides, go to even."""
    bits = np.random.default_rng(2).integers(0x3F000000, 0x41000000, 4096, dtype=np.uint32)
    bits[:2048] = bits[:2048] & 0xFFFF0000 | 0x8000
    values = bits.view(np.float32)
    assert np.array_equal(amla.bf16(values), torch.from_numpy(values).bfloat16().float().numpy())


def exact(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The attention in float64, and the mean size of the values by probability."""
    scores = q.astype(np.float64) @ keys.astype(np.float64).T * scale
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    return chances @ values.astype(np.float64), chances @ np.abs(values.astype(np.float64))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("length", "block"), [(1, 512), (1000, 128), (1000, 7), (3000, 512)])
@pytest.mark.parametrize("rising", [False, True])
def test_the_error_stays_within_its_bound(
    amla: ModuleType, length: int, block: int, rounded: bool, rising: bool
) -> None:
    """Small whole keys, so that scores are exact; rising ones, so that every block rescales."""
    rng = np.random.default_rng(length + block)
    q, keys = (
        rng.integers(-3, 4, (8, 64)).astype(np.float32),
        rng.integers(-3, 4, (length, 64)).astype(np.float32),
    )
    if rising:
        keys[:, 0], q[:, 0] = np.arange(length) // 8, 1
    q[0] *= 40  # whose largest score lies far above the other rows'
    values = rng.standard_normal((length, 32)).astype(np.float32)
    scale = 1 / 8
    found, (expected, size) = (
        amla.attend(q, keys, values, scale, block=block, rounded=rounded),
        exact(q, keys, values, scale),
    )
    blocks = -(-length // block)
    largest = np.abs(q @ keys.T).max() * scale * np.log2(np.e)
    bound = (length + 4 * blocks + 16 + 4 * largest) * 2.0**-24 * size + (
        2.0**-8 * size if rounded else 0
    )
    assert (np.abs(found - expected) <= bound).all()


def test_scores_far_below_zero(amla: ModuleType) -> None:
    """A row is kept relative to its own largest, however small; a page's rows of one token and of
    none too."""
    q, keys = np.full((2, 16), -8.0, np.float32), np.full((3, 16), 8.0, np.float32)
    keys[1:, 0], q[1] = [7.5, 8.5], 1.0
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_allclose(
        amla.attend(q, keys, values, 1.0), exact(q, keys, values, 1.0)[0], rtol=1e-5
    )
    cache, table = (
        np.concatenate([np.zeros((1, 3, 16), np.float32), keys[None]]),
        np.array([[1], [0], [1]], np.int32),
    )
    paged = amla.attend_pages(np.stack([q, q, q]), cache, 2, table, [1, 0, 3], 1.0, rounded=False)
    assert np.array_equal(paged[0], np.full((2, 2), 8.0))
    assert not paged[1].any()
    np.testing.assert_allclose(paged[2], exact(q, keys, keys[:, :2], 1.0)[0], rtol=1e-5)


def test_a_wrong_step_is_seen(amla: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    q, keys = (
        rng.standard_normal((4, 16)).astype(np.float32),
        rng.standard_normal((256, 16)).astype(np.float32) * 3,
    )
    values = rng.standard_normal((256, 8)).astype(np.float32)
    plain = amla.rescaled
    monkeypatch.setattr(amla, "rescaled", lambda sums, steps: plain(sums, np.minimum(steps + 1, 0)))
    assert (
        np.abs(amla.attend(q, keys, values, 1.0, block=16) - exact(q, keys, values, 1.0)[0]).max()
        > 0.01
    )


def test_a_model_whose_attention_rescales_by_addition(
    amla: ModuleType, r1_attention: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1's sizes of attention on the double, every decode step by the twin: each call within its
    bound, the tokens' distribution near."""
    text = torch.randint(6, 310, (32,), generator=torch.Generator().manual_seed(1)).tolist()
    calls = []

    def by_addition(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.cat([a.key, a.key_rope], dim=-1).squeeze(1).float().numpy()
        query = torch.cat([a.query, a.query_rope], dim=-1).squeeze(2).float().numpy()
        found = amla.attend_pages(
            query, cache, a.value.shape[-1], a.block_table.numpy(), a.actual_seq_lengths_kv, a.scale
        )
        for row, length in enumerate(a.actual_seq_lengths_kv):
            seen = cache[a.block_table[row].numpy()].reshape(-1, cache.shape[-1])[:length]
            expected, size = exact(query[row], seen, seen[:, : found.shape[-1]], a.scale)
            largest = np.abs(query[row] @ seen.T).max() * a.scale * np.log2(np.e)
            bound = (
                (length + 4 * -(-length // 512) + 16 + 4 * largest) * 2.0**-24 + 2.0**-8
            ) * size
            products = np.abs(query[row]) @ np.abs(seen).T  # scores of float32 sums, not exact ones
            assert (
                np.abs(found[row] - expected)
                <= bound + 2 * cache.shape[-1] * 2.0**-24 * a.scale * products.max() * size
            ).all()
        calls.append(len(found))
        assert a.input_layout == "BNSD_NBSD"
        return torch.from_numpy(found).unsqueeze(2).transpose(0, 1).contiguous().to(
            a.query.dtype
        ), torch.full((1,), float("nan"))

    with npu_double.installed():
        plain = forced(r1_attention("bf16"), "bfloat16", "torch_npu", [(text, 24)])
        monkeypatch.setitem(npu_double.RESULTS, "npu_fused_infer_attention_score", by_addition)
        ours = forced(r1_attention("bf16"), "bfloat16", "torch_npu", [(text, 24)])
    assert len(calls) >= 2 * 7
    assert (plain.exp() * (plain - ours)).sum(dim=-1).median() < 1e-3
