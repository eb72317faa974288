"""An answer under one model or two: the probability of every token, how far the two are apart
there, and the experts that differ."""

from typing import Any

import torch
from torch import Tensor

from quantkit.playground.model import PlayModel, TextReading

_ROWS = 64
"""Tokens whose distributions are held at a time."""
_ALTERNATIVES = 5


def scored(models: list[PlayModel], prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """Of each token of the answer: text, probability under each model, KL(first || second) in nats, the likeliest tokens of each.

    With two models that have experts also the share of the first one's experts that the second did
    not choose, by layer and token.
    """
    ids = prompt + answer
    readings = [model.read(ids) for model in models]
    tokens: list[dict[str, Any]] = [{"text": text} for text in models[0].pieces(answer)]
    for begin in range(0, len(answer), _ROWS):
        rows = min(_ROWS, len(answer) - begin)
        first = len(prompt) - 1 + begin
        found = [
            model.logprobs(reading, first, first + rows) for model, reading in zip(models, readings)
        ]
        for row in range(rows):
            tokens[begin + row] |= _token(models, [one[row] for one in found], answer[begin + row])
    experts = (
        changed_experts(readings, len(prompt) - 1, len(ids) - 1) if len(readings) == 2 else None
    )
    return {"tokens": tokens, "experts": experts}


def _token(models: list[PlayModel], rows: list[Tensor], token: int) -> dict[str, Any]:
    """rows: log-probabilities [V] of each model."""
    likeliest = [one.topk(min(_ALTERNATIVES, len(one))) for one in rows]
    text = models[0].tokenizer.token_text
    return {
        "p": [float(one[token].exp()) for one in rows],
        "kl": divergence(*rows) if len(rows) == 2 else None,
        "top": [
            [[text(i), float(v.exp())] for i, v in zip(one.indices.tolist(), one.values)]
            for one in likeliest
        ],
    }


def divergence(first: Tensor, second: Tensor) -> float:
    """KL(first || second) in nats of log-probabilities [V]; what the first rules out counts nothing."""
    p = first.double().exp()
    terms = torch.where(p > 0, p * (first.double() - second.double()), 0.0)
    return max(float(terms.sum()), 0.0)


def changed_experts(readings: list[TextReading], begin: int, end: int) -> dict[str, Any] | None:
    """Of the tokens begin..end: by layer and token the share of the first one's experts that the
    second did not choose.

    None where they have no experts.
    """
    first, second = (reading.topk_ids for reading in readings)
    layers = sorted(first.keys() & second.keys())
    if not layers:
        return None
    changed = []
    for layer in layers:
        ours, theirs = first[layer][begin:end], second[layer][begin:end]
        kept = (ours[:, :, None] == theirs[:, None, :]).any(dim=2)
        changed.append((1 - kept.float().mean(dim=1)).tolist())
    return {"layers": layers, "changed": changed}


def parting(answers: list[list[int]]) -> int | None:
    """The first place where two answers differ; None where they are the same."""
    first, second = answers
    same = next(
        (place for place, (one, other) in enumerate(zip(first, second)) if one != other),
        min(len(first), len(second)),
    )
    return None if first == second else same
