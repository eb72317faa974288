"""Through the cache, in any chunks and block order, the model computes what a full causal pass
computes."""

from pathlib import Path

import pytest
import torch
from quantkit_kernels.reference import prompts as prompts_in_torch

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.attention_context import Chunk, DecodeContext, PrefillContext
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.models.context import CausalContext

LENGTHS = [19, 5, 33]
BLOCKS = [[3, 9, 1], [7], [2, 8, 4, 5, 6]]
SIZE = 8


@pytest.fixture(scope="module")
def loaded(tiny_dense_checkpoint: Path) -> LoadedModel:
    return load_model(tiny_dense_checkpoint, device="cpu", dtype="float32")


@pytest.fixture
def cache(loaded: LoadedModel) -> PagedCache:
    cache = PagedCache(
        loaded.config.num_hidden_layers,
        12,
        loaded.config.cache_width,
        block_size=SIZE,
        dtype=torch.float32,
        device="cpu",
    )
    for layer in cache.layers:
        layer.fill_(float("nan"))  # what was never written must never count
    return cache


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 320, (length,), generator=generator) for length in LENGTHS]


def causal(loaded: LoadedModel, tokens: list[torch.Tensor]) -> torch.Tensor:
    return loaded.model(torch.cat(tokens), CausalContext([len(part) for part in tokens]))


def prefill(
    loaded: LoadedModel, cache: PagedCache, spans: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """Hidden states of tokens start .. stop of each prompt."""
    tokens = torch.cat([prompt[start:stop] for prompt, (start, stop) in zip(prompts(), spans)])
    chunks = [
        Chunk(start, stop - start, torch.tensor(blocks))
        for (start, stop), blocks in zip(spans, BLOCKS)
        if stop > start
    ]
    return list(
        loaded.model(tokens, PrefillContext(cache, chunks)).split(
            [stop - start for start, stop in spans]
        )
    )


@torch.inference_mode()
@pytest.mark.parametrize("keys", [4096, 8])
def test_chunked_prefill_is_whole_prefill(
    loaded: LoadedModel, cache: PagedCache, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_in_torch, "_KEYS", keys)
    monkeypatch.setattr(prompts_in_torch, "AT_ONCE", keys)
    whole = causal(loaded, prompts()).split(LENGTHS)
    first = prefill(loaded, cache, [(0, 7), (0, 5), (0, 1)])
    second = prefill(loaded, cache, [(7, 19), (5, 5), (1, 33)])
    for a, b, expected in zip(first, second, whole):
        torch.testing.assert_close(torch.cat((a, b)), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_decode_after_prefill_is_causal(loaded: LoadedModel, cache: PagedCache) -> None:
    """Absorbed attention, token by token, for three sequences of different length at once."""
    whole = causal(loaded, prompts()).split(LENGTHS)
    steps = 4
    prefill(loaded, cache, [(0, length - steps) for length in LENGTHS])
    table = torch.zeros(3, 5, dtype=torch.int64)
    for row, blocks in enumerate(BLOCKS):
        table[row, : len(blocks)] = torch.tensor(blocks)
    for step in range(steps):
        positions = torch.tensor([length - steps + step for length in LENGTHS])
        slots = table.gather(1, positions[:, None] // SIZE)[:, 0] * SIZE + positions % SIZE
        tokens = torch.stack([prompt[position] for prompt, position in zip(prompts(), positions)])
        hidden = loaded.model(tokens, DecodeContext(cache, positions, table, slots))
        expected = torch.stack([whole[row][position] for row, position in enumerate(positions)])
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
