"""What sums of prompts in 8 bits over ranks cost in quality, and the bytes they send.

    torchrun --nproc-per-node 2 benchmarks/coded_sums.py [MODEL] --text FILE [--device cpu]
    [--tokens 4096] [--chunk 512] [--dtype float32]

One JSON line each for sums in bfloat16, int8 and fp8: mean, median and largest KL divergence of the
next token's distribution from that of sums in the model's own numbers, how often both choose the
same token, and the bytes that a rank sends for a value of a hidden state.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quantkit_kernels import CODES
from torch import Tensor

from quantkit.checkpoint.hub import find_model
from quantkit.common.devices import find_device
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.ranks.quantized_all_reduce import GROUP, CodedSums
from quantkit.executor.runner.attention_context import Chunk, PrefillContext
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.tokenizer.chat import ChatTokenizer


def log_probabilities(loaded: LoadedModel, token_ids: list[int]) -> Tensor:
    """float32 [T, vocab] of every next token; one prompt."""
    blocks = -(-len(token_ids) // loaded.cache_layout.block_size)
    context = PrefillContext(
        loaded.new_cache(blocks + 1),
        [Chunk(0, len(token_ids), torch.arange(1, blocks + 1, device=loaded.device))],
    )
    hidden = loaded.model(torch.tensor(token_ids, device=loaded.device), context)
    return loaded.model.logits(hidden).log_softmax(dim=-1)


class HalfSums:
    """Sums that are rounded to bfloat16, as an accelerator's are."""

    def takes(self, x: Tensor) -> bool:
        return x.shape[-1] % GROUP == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.bfloat16().float()
        dist.all_reduce(total)
        return total.bfloat16().to(x.dtype)


@torch.inference_mode()
def compare(options: argparse.Namespace, rank: int, size: int) -> list[dict[str, Any]]:
    """Every rank computes; the figures are the same on each."""
    path = find_model(options.model)
    parallel = Parallel(rank, size)
    parallel.connect(find_device(options.device))
    loaded = load_model(path, device=options.device, dtype=options.dtype, parallel=parallel)
    token_ids = ChatTokenizer(path).encode(Path(options.text).read_text())[: options.tokens]
    chunks = [
        token_ids[start : start + options.chunk]
        for start in range(0, len(token_ids), options.chunk)
    ]
    rows = []
    for name, dtype in {"bfloat16": None, **CODES}.items():
        divergences, same = [], 0
        for chunk in chunks:
            parallel.coded_sums = None
            exact = log_probabilities(loaded, chunk)
            parallel.coded_sums = CodedSums(dtype, size, 0) if dtype is not None else HalfSums()  # type: ignore[assignment]
            coded = log_probabilities(loaded, chunk)
            divergences.append((exact.exp() * (exact - coded)).sum(dim=-1))
            same += int((exact.argmax(dim=-1) == coded.argmax(dim=-1)).sum())
        kl = torch.cat(divergences)
        hidden = loaded.model.embedding.shape[1]
        row = (
            2 * hidden
            if dtype is None
            else CodedSums(dtype, size, 0).packed(torch.zeros(1, hidden)).shape[1]
        )
        sent = 2 * (size - 1) / size * row / hidden
        figures = {
            "mean_kl": kl.mean().item(),
            "median_kl": kl.median().item(),
            "largest_kl": kl.max().item(),
            "same_token": same / len(kl),
        }
        rows.append(
            {"collectives": name, "tp": size, "tokens": len(kl), **figures, "bytes_a_value": sent}
        )
    parallel.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="tiny-r1")
    parser.add_argument("--text", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    options = parser.parse_args()
    found = compare(options, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        print("\n".join(map(json.dumps, found)))


if __name__ == "__main__":
    main()
