"""Three prompts through a paged cache, and in one causal pass."""

import torch

from quantkit.executor.runner.attention_context import DecodeContext
from quantkit.executor.runner.prompt_context import Chunk, PrefillContext
from quantkit.models.context import CausalContext

PROMPTS = [[7 + i * 13 % 300 for i in range(length)] for length in (70, 5, 33)]
"""One of them longer than a block."""


def paged_pass(loaded):
    """In chunks, then one token a row -> what the last tokens give, the cache, and their slots."""
    paged, prompts = loaded.new_cache(8), [torch.tensor(one) for one in PROMPTS]
    assert paged.nbytes == 8 * paged.block_size * loaded.cache_token_bytes
    blocks, size = [torch.tensor(one) for one in ([5, 2], [7], [1])], paged.block_size
    first = [Chunk(0, min(40, len(ids) - 1), own) for ids, own in zip(prompts, blocks)]
    loaded.model(
        torch.cat([ids[: one.length] for ids, one in zip(prompts, first)]),
        PrefillContext(paged, first),
    )
    loaded.model(prompts[0][40:69], PrefillContext(paged, [Chunk(40, 29, blocks[0])]))
    positions = torch.tensor([len(ids) - 1 for ids in prompts])
    tables = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)
    slots = tables[torch.arange(3), positions // size] * size + positions % size
    last = torch.stack([ids[-1] for ids in prompts])
    return loaded.model(last, DecodeContext(paged, positions, tables, slots)), paged, slots


def causal_pass(loaded, codes, **steps):
    """What the last tokens give, over keys and values rounded to `codes`."""
    ids, lengths = torch.cat([torch.tensor(one) for one in PROMPTS]), [*map(len, PROMPTS)]
    out = loaded.model(ids, CausalContext(lengths, codes=codes, **steps))
    return out[torch.tensor(lengths).cumsum(0) - 1]
