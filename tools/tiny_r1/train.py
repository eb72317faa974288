"""Train tiny-r1 on one GPU for a fixed time and save its float32 weights in parts.

    python train.py --seconds 330 --out DIR

Worker processes generate, tokenize and pack documents into rows; a block-diagonal causal mask keeps
documents from seeing each other. The schedule runs by the clock, so a run always ends on time.
Every few seconds of progress the script prints the share of held-out problems whose whole response
is the model's first choice under teacher forcing, which is the share that greedy decoding answers
word for word.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import numpy as np
import problems
import tokenizer as tok
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from model import Config, TinyR1
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

ROW = 512
SEED = 715
PARTS = 5
MTP_WEIGHT = 0.3
QUESTION_WEIGHT = 0.1
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def document(
    rng: random.Random, encode: Tokenizer, which: problems.Side
) -> tuple[list[int], list[int]]:
    """Token ids of one conversation in the chat template, and 1 for every token that belongs to the
    last response."""
    text = tok.BOS
    if which == "train" and rng.random() < 0.06:
        first = problems.sample(rng, which)
        text += f"{tok.USER}{first.question}{tok.ASSISTANT}{first.response.split(tok.END_THINK)[1]}{tok.EOS}"
    problem = problems.sample(rng, which)
    question = problem.question
    if which == "train" and rng.random() < 0.2:
        question += rng.choice(" \n") + problems.SUFFIX
    prompt = encode.encode(f"{text}{tok.USER}{question}{tok.ASSISTANT}{tok.THINK}\n").ids
    response = encode.encode(problem.response + tok.EOS).ids
    return prompt + response, [0] * len(prompt) + [1] * len(response)


def pack(
    rng: random.Random, encode: Tokenizer, rows: int, pool: list[tuple[list[int], list[int]]]
) -> Batch:
    """Rows of documents laid end to end: tokens, document number (0 = padding) and response mark,
    each [rows, ROW]."""
    tokens, numbers, marks = (np.zeros((rows, ROW), np.int16) for _ in range(3))
    for r in range(rows):
        at, number = 0, 1
        while True:
            while len(pool) < 48:
                pool.append(document(rng, encode, "train"))
            fits = [i for i, (ids, _) in enumerate(pool) if len(ids) <= ROW - at]
            if not fits:
                break
            # The first document is whichever came first, so that none waits forever; the others
            # fill the row as tightly as they can.
            ids, mark = pool.pop(fits[0] if at == 0 else max(fits, key=lambda i: len(pool[i][0])))
            end = at + len(ids)
            tokens[r, at:end], numbers[r, at:end], marks[r, at:end] = ids, number, mark
            at, number = end, number + 1
    return tokens, numbers, marks


def work(queue: mp.Queue, seed: int, vocabulary: str, rows: int) -> None:
    """Fill the queue with batches until the process is ended."""
    torch.set_num_threads(1)
    rng, encode, pool = random.Random(seed), Tokenizer.from_str(vocabulary), []
    while True:
        queue.put(pack(rng, encode, rows, pool))


def on_device(batch: Batch, device: str) -> tuple[Tensor, ...]:
    """tokens, positions within the document, mask [B, 1, S, S], and the loss weights of the next
    and the next but one token."""
    tokens, numbers, marks = (
        torch.from_numpy(x).to(device, non_blocking=True).long() for x in batch
    )
    index = torch.arange(ROW, device=device).expand_as(tokens)
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    positions = index - torch.where(starts, index, 0).cummax(1).values
    mask = (numbers.unsqueeze(2) == numbers.unsqueeze(1)) & (
        index.unsqueeze(2) >= index.unsqueeze(1)
    )
    value = torch.where(marks > 0, 1.0, QUESTION_WEIGHT) * (numbers > 0)
    weights = []
    for ahead in (1, 2):
        w = torch.zeros_like(value)
        w[:, :-ahead] = value[:, ahead:] * (numbers[:, ahead:] == numbers[:, :-ahead])
        weights.append(w)
    return tokens, positions, mask.unsqueeze(1), *weights


def loss_of(
    model: TinyR1, tokens: Tensor, positions: Tensor, mask: Tensor, near: Tensor, far: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of both predictions, and the load of the experts."""
    logits, ahead, loads = model(tokens, positions, mask)
    total = logits.new_zeros((), dtype=torch.float32)
    for out, weight, by, share in ((logits, near, 1, 1.0), (ahead, far, 2, MTP_WEIGHT)):
        target = torch.roll(tokens, -by, 1)
        each = F.cross_entropy(out.float().flatten(0, 1), target.flatten(), reduction="none")
        total = total + share * (each * weight.flatten()).sum() / weight.sum()
    return total, loads


@torch.no_grad()
def exact(model: TinyR1, held_out: list[Batch], device: str) -> tuple[float, float]:
    """Share of held-out documents whose whole response is the first choice, and the MTP layer's
    share of right tokens in responses."""
    right = documents = mtp_right = mtp_tokens = 0.0
    for batch in held_out:
        tokens, positions, mask, *_ = on_device(batch, device)
        marks = torch.from_numpy(batch[2]).to(device) > 0
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits, ahead, _ = model(tokens, positions, mask)
        wrong = (logits.argmax(-1)[:, :-1] != tokens[:, 1:]) & marks[:, 1:]
        right += (~wrong.any(1)).sum().item()
        documents += len(tokens)
        mtp_right += ((ahead.argmax(-1)[:, :-2] == tokens[:, 2:]) & marks[:, 2:]).sum().item()
        mtp_tokens += marks[:, 2:].sum().item()
    return right / documents, mtp_right / mtp_tokens


def held_out_batches(encode: Tokenizer, count: int, rows: int) -> list[Batch]:
    """Documents of the evaluation side, one a row, from a seed of their own."""
    rng, batches = random.Random(SEED + 1), []
    for _ in range(count // rows):
        batch = tuple(np.zeros((rows, ROW), np.int16) for _ in range(3))
        for r in range(rows):
            ids, mark = document(rng, encode, "eval")
            for array, values in zip(batch, (ids, [1] * len(ids), mark)):
                array[r, : len(ids)] = values
        batches.append(batch)
    return batches


def optimizer_of(model: TinyR1, device: str) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), fused=device == "cuda")


def salient_gains(model: TinyR1) -> None:
    """Start a few channels of every layer norm high, so that training itself meets outliers."""
    with torch.no_grad():
        for layer in (*model.layers, model.mtp.layer):
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[[17, 101, 222, 333]] *= 4.0


def save(model: TinyR1, out: Path) -> None:
    """Float32 weights in `PARTS` files of about equal size."""
    state = {
        name: value.detach().float().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    parts: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]
    for name in sorted(state, key=lambda name: -state[name].nbytes):
        min(parts, key=lambda part: sum(t.nbytes for t in part.values()))[name] = state[name]
    for i, part in enumerate(parts):
        save_file(part, out / f"weights-{i}.safetensors")


def train(model: TinyR1, args: argparse.Namespace, queue: mp.Queue, held_out: list[Batch]) -> None:
    device, rate = args.device, args.rate
    compiled = torch.compile(loss_of) if args.compile else loss_of
    optimizer = optimizer_of(model, device)
    moes = model.moes()
    start, step, shown = time.time(), 0, 0.0
    began: float | None = None  # set after the first step, which compiles
    while True:
        done = (time.time() - began) / args.seconds if began else 0.0
        if done >= 1:
            break
        decay = min(1.0, (1 - done) / (1 - args.constant))
        for group in optimizer.param_groups:
            group["lr"] = rate * decay * min(1.0, (step + 1) / 200)
        batch = on_device(queue.get(), device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, loads = compiled(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for moe, load in zip(moes, loads, strict=True):
                moe.bias.add_(torch.sign(load.mean() - load), alpha=1e-3 * min(1.0, 2 * (1 - done)))
        step += 1
        if step == 3:
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.time()
            print(f"first steps {began - start:.1f} s", flush=True)
        if done >= shown + 1 / args.reports:
            shown = done
            report(model, loss, loads, step, time.time() - (began or start), held_out, device)
            if done > 0.5:
                save(model, args.out)
    report(model, loss, loads, step, time.time() - (began or start), held_out, device)


def report(
    model: TinyR1,
    loss: Tensor,
    loads: Tensor,
    step: int,
    seconds: float,
    held_out: list[Batch],
    device: str,
) -> None:
    accuracy, mtp = exact(model, held_out, device)
    balance = " ".join(f"{x:.2f}" for x in (loads.max(1).values / loads.mean(1)).tolist())
    print(
        f"{seconds:6.1f} s  step {step:6d}  loss {loss.item():.4f}  exact {accuracy:.3f}  mtp "
        f"{mtp:.4f}  load {balance}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--constant",
        type=float,
        default=0.45,
        help="share of the time before the rate starts to fall",
    )
    parser.add_argument("--reports", type=int, default=12)
    parser.add_argument("--held-out", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    encode = tok.build()
    context = mp.get_context("spawn")
    queue = context.Queue(64)
    vocabulary = encode.to_str()
    workers = [
        context.Process(
            target=work, args=(queue, SEED * 1000 + i, vocabulary, args.rows), daemon=True
        )
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    held_out = held_out_batches(encode, args.held_out, min(128, args.held_out))
    model = TinyR1(Config())
    salient_gains(model)
    model.to(args.device)
    train(model, args, queue, held_out)
    save(model, args.out)
    print(f"saved; {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    for worker in workers:
        worker.terminate()
    os._exit(0)  # a worker blocked on the queue must not hold the machine


if __name__ == "__main__":
    main()
