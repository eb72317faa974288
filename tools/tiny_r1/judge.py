"""Does tiny-r1 tell methods apart? Fake-quantizes a checkpoint in several ways and compares with
the FP8 original, teacher-forced.

    python judge.py quantkit/builtin/tiny-r1 [--documents 200]

Exact: share of evaluation problems whose whole response is the first choice, which greedy decoding
then reproduces word for word.
KL: mean over the tokens of those documents of KL(original || variant), in nats, one document a sequence.
The methods are stand-ins for quantkit's own: `awq` scales each linear alone by mean|x|^0.5, without a search. kv_b_proj stays as it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from export import decoder_layers, from_checkpoint, linears
from model import TinyR1
from tokenizers import Tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from train import document

Document = tuple[list[int], list[int]]


def int4_groups(w: Tensor, group: int = 128) -> Tensor:
    """Round to nearest, asymmetric, 16 levels per group of inputs."""
    x = w.unflatten(1, (-1, group))
    low, high = x.amin(2, keepdim=True).clamp(max=0), x.amax(2, keepdim=True).clamp(min=0)
    step = (high - low).clamp(min=1e-8) / 15
    zero = torch.round(-low / step)
    return (((x / step).round() + zero).clamp(0, 15) - zero).mul(step).flatten(1)


def fp4_groups(w: Tensor) -> Tensor:
    """E2M1 in groups of 16 with e4m3 scales under one global scale."""
    level = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    overall = w.abs().amax() / 2688
    x = w.unflatten(1, (-1, 16))
    scale = (x.abs().amax(2, keepdim=True) / 6 / overall).to(torch.float8_e4m3fn).float().clamp(
        min=2**-9
    ) * overall
    nearest = (x.abs().div(scale).unsqueeze(-1) - level).abs().argmin(-1)
    return (level[nearest] * x.sign() * scale).flatten(1)


def int8_rows(w: Tensor) -> Tensor:
    """Symmetric, one scale a row; also what happens to activations, one scale a token."""
    step = w.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (w / step).round() * step


def blocks(model: TinyR1, weight: Tensor) -> int:
    """Width of the input vectors that `weight` of the training formulation takes: one expert's,
    where experts lie side by side."""
    wide = {id(moe.experts.down_proj) for moe in model.moes()}
    return model.c.moe_intermediate_size if id(weight) in wide else weight.shape[1]


def quantizable(model: TinyR1) -> dict[int, int]:
    """id of each wide weight whose linears are quantized -> the width of one input vector."""
    found = {}
    for _, layer in decoder_layers(model):
        for name, weight in layer.named_parameters():
            if weight.ndim == 2 and not name.endswith(("kv_b_proj", "mlp.gate")):
                found[id(weight)] = blocks(model, weight)
    return found


class Observe(TorchFunctionMode):
    """Sums |x| of the inputs of every linear, by the id of its weight. Units of experts that a token does not choose are 0 and count so."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            key, value = id(args[1]), args[0].abs().flatten(0, -2).sum(0)
            self.sums[key] = self.sums.get(key, 0) + value
        return func(*args, **(kwargs or {}))


class Int8Inputs(TorchFunctionMode):
    """Rounds the inputs of the listed linears to int8, one scale a token (and expert)."""

    def __init__(self, widths: dict[int, int]) -> None:
        self.widths = widths

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and id(args[1]) in self.widths:
            x = int8_rows(args[0].unflatten(-1, (-1, self.widths[id(args[1])]))).flatten(-2)
            args = (x, *args[1:])
        return func(*args, **(kwargs or {}))


def run(model: TinyR1, documents: list[Document]) -> list[Tensor]:
    """Log-probabilities of the next token for every document, [S, vocab] each. What pads the
    shorter ones comes after them, unseen."""
    lengths = [len(ids) for ids, _ in documents]
    s = max(lengths)
    tokens = torch.tensor([ids + [0] * (s - len(ids)) for ids, _ in documents])
    logits, _, _ = model(
        tokens, torch.arange(s).expand_as(tokens), torch.ones(1, 1, s, s, dtype=torch.bool).tril()
    )
    return [row[:length].log_softmax(-1) for row, length in zip(logits, lengths, strict=True)]


def batches(documents: list[Document], size: int = 16) -> list[list[Document]]:
    return [documents[i : i + size] for i in range(0, len(documents), size)]


def quantized(model: TinyR1, rounding: Callable[[str, Tensor], Tensor]) -> TinyR1:
    """A copy whose linears went through `rounding`, kv_b_proj excepted."""
    result = copy.deepcopy(model)
    for prefix, layer in decoder_layers(result):
        for module, weight in linears(prefix, layer):
            if not module.endswith("kv_b_proj"):
                weight.copy_(rounding(module, weight.clone()))
    return result


def input_scales(model: TinyR1, documents: list[Document]) -> dict[str, Tensor]:
    """mean|x|^0.5 of every linear's inputs, normalized as AWQ does."""
    with Observe() as observe:
        for document in documents:
            run(model, [document])
    scales = {}
    for prefix, layer in decoder_layers(model):
        for module, weight in linears(prefix, layer):
            parts = module.split(".")
            total = observe.sums[id(weight._base if weight._base is not None else weight)]
            if "experts" in parts and parts[-1] == "down_proj":
                e = int(parts[parts.index("experts") + 1])
                total = total[e * weight.shape[1] : (e + 1) * weight.shape[1]]
            s = total.clamp(min=1e-4).sqrt()
            scales[module] = s / (s.max() * s.min()).sqrt()
    return scales


def compare(
    reference: list[Tensor] | None, variant: TinyR1, documents: list[Document], int8: bool
) -> tuple[dict[str, float], list[Tensor]]:
    """Exact share, KL and first-choice agreement with the reference (or itself); and the variant's
    log-probabilities."""
    found: list[Tensor] = []
    with Int8Inputs(quantizable(variant) if int8 else {}):
        for batch in batches(documents):
            found += run(variant, batch)
    right, kl, agree, tokens = 0, 0.0, 0, 0
    for (ids, mark), logs, original in zip(documents, found, reference or found, strict=True):
        target, marked = torch.tensor(ids[1:]), torch.tensor(mark[1:]) > 0
        right += int((logs[:-1].argmax(-1) == target)[marked].all())
        kl += (original.exp() * (original - logs)).sum().item()
        agree += int((original.argmax(-1) == logs.argmax(-1)).sum())
        tokens += len(ids)
    return {"exact": right / len(documents), "kl": kl / tokens, "top1_agree": agree / tokens}, found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--documents", type=int, default=200)
    args = parser.parse_args()
    model = from_checkpoint(args.model)
    encode = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    rng = random.Random(99)
    calibration = [document(rng, encode, "train") for _ in range(64)]
    documents = [document(rng, encode, "eval") for _ in range(args.documents)]
    row, reference = compare(None, model, documents, False)
    print(f"{'fp8':8}", json.dumps(row), flush=True)
    scales = input_scales(model, calibration)
    methods: dict[str, Callable[[str, Tensor], Tensor]] = {
        "rtn-w4": lambda module, w: int4_groups(w),
        "awq-w4": lambda module, w: int4_groups(w * scales[module]) / scales[module],
        "fp4": lambda module, w: fp4_groups(w),
        "fp4-awq": lambda module, w: fp4_groups(w * scales[module]) / scales[module],
        "int8": lambda module, w: int8_rows(w),
    }
    for name, rounding in methods.items():
        row, _ = compare(reference, quantized(model, rounding), documents, name == "int8")
        print(f"{name:8}", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
